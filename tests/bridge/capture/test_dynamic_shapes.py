"""``dynamic_shapes=``: torch.export's notations, the dimensions that they let vary, and the errors of wrong ones."""

import pytest
import torch
from torch import nn
from torch.export import AdditionalInputs, Dim, ShapesCollection
from transformers.modeling_outputs import BaseModelOutput

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.capture import dynamic_dims, normalize_sample
from bridge.state import SampleCall

BATCH = Dim("batch")


class Takes(nn.Module):
    def forward(self, x, y=None, *, parts=None, **rest):
        return torch.tanh(x)


def rows() -> torch.Tensor:
    return torch.ones(7, 6)


STATIC = [
    None,
    {},
    (),
    {"x": None},
    ({},),
    {"x": {0: None}},
    {"x": {0: Dim.STATIC, 1: 6}},
    {"x": (Dim.STATIC, None)},
    ([7, 6],),
    {"x": {-1: 6}},
]


@pytest.mark.parametrize("spec", STATIC, ids=repr)
def test_what_is_static_is_fine(spec):
    module = Takes()
    add_tvm_dispatch(module, rows(), dynamic_shapes=spec)
    module(rows())
    assert stats(module).hits == 1


def test_static_structures_are_fine():
    sample = {"x": rows(), "y": [rows(), 2], "parts": {"a": (rows(), None)}, "more": rows()}
    spec = {"x": None, "y": [{0: 7}, None], "parts": {"a": ((7, 6), None)}, "rest": {"more": [None, 6]}}
    module = Takes()
    add_tvm_dispatch(module, sample, dynamic_shapes=spec)
    module(**sample)
    assert stats(module).hits == 1


VARYING = [
    ({"x": {0: BATCH}}, ["['x'][0]: dimension batch"]),
    (({0: BATCH, 1: Dim("width", min=2, max=9)},), ["[0][0]: dimension batch", "[0][1]: dimension width"]),
    ([(BATCH, None)], ["[0][0]: dimension batch"]),
    ({"x": {0: Dim.AUTO}}, ["['x'][0]: dimension Dim.AUTO"]),
    ({"x": (Dim.STATIC, Dim.DYNAMIC)}, ["['x'][1]: dimension Dim.DYNAMIC"]),
    ({"x": {0: 2 * BATCH}}, ["['x'][0]: dimension 2*batch"]),
    ({"x": {-2: BATCH + 1}}, ["['x'][-2]: dimension batch + 1"]),
]


def varying(spec, sample=None):
    """The dimensions that vary, with the words of the specification."""
    args, kwargs = normalize_sample(Takes(), rows() if sample is None else sample, None)
    return [f"{each.place}: dimension {each.dim}" for each in dynamic_dims(SampleCall(Takes(), args, kwargs), spec)]


@pytest.mark.parametrize(("spec", "expected"), VARYING, ids=repr)
def test_every_dimension_that_varies_is_found(spec, expected):
    assert varying(spec) == expected


def test_dimensions_inside_structures_are_found():
    sample = {"x": rows(), "y": [rows(), 2], "parts": {"a": BaseModelOutput(last_hidden_state=rows())}}
    spec = {"x": None, "y": [{0: BATCH}, Dim.DYNAMIC], "parts": {"a": [{1: Dim("width")}]}}
    places = [found.partition(":")[0] for found in varying(spec, sample)]
    assert places == ["['y'][0][0]", "['y'][1]", "['parts']['a'][0][1]"]
    module = Takes()
    before = dict(module.__dict__)
    with pytest.raises(UnsupportedModule, match=r"dynamic_shapes\['y'\]\[1\]: a number that varies"):
        add_tvm_dispatch(module, sample, dynamic_shapes=spec)
    assert module.__dict__ == before


def test_collections_of_shapes():
    x = rows()
    shapes = ShapesCollection()
    shapes[x] = {1: BATCH}
    assert varying(shapes, x) == ["['x'][1]: dimension batch"]
    inputs = AdditionalInputs()
    inputs.add((torch.ones(3, 6),))
    assert varying(inputs) == ["['x'][0]: dimension Dim.DYNAMIC"]


WRONG = [
    ("batch", TypeError, "got str"),
    (BATCH, TypeError, "got Dim"),
    ({"x": {0: "batch"}}, TypeError, r"\['x'\]\[0\]: wanted None, a Dim or a number, got 'batch'"),
    ({"x": {0: True}}, TypeError, "got True"),
    ({"x": Dim.AUTO}, TypeError, r"\['x'\]: wanted None, or a dict"),
    ({"x": {0: 8}}, ValueError, r"\['x'\]\[0\]: wanted the sample's 7, got 8"),
    ({"z": None}, ValueError, r"wanted what the sample has, \['x'\], got \['z'\]"),
    ({"x": None, "y": None}, ValueError, r"got \['x', 'y'\]"),
    ((None, None), ValueError, "as many as the sample has, 1, got 2"),
    ({"x": (None, None, None)}, ValueError, "each of 2 dimensions, got 3"),
    ({"x": {2: BATCH}}, ValueError, "no dimension 2, the sample has 2"),
    ({"x": {"rows": BATCH}}, ValueError, "no dimension 'rows'"),
]


@pytest.mark.parametrize(("spec", "error", "message"), WRONG, ids=repr)
def test_what_is_no_specification_of_this_sample_is_an_error(spec, error, message):
    module = Takes()
    before = dict(module.__dict__)
    with pytest.raises(error, match=rf"dynamic_shapes.*{message}"):
        add_tvm_dispatch(module, rows(), dynamic_shapes=spec)
    assert module.__dict__ == before
