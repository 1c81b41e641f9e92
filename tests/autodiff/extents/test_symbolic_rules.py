"""Every gradient rule with a symbolic extent: at any size equal to the static pipeline's result."""

from __future__ import annotations

import importlib

import pytest

from bridge.reference.relax_operators import OPERATORS
from tests.autodiff.samples import SAMPLES, Sample
from tests.autodiff.symbolic import compare, extents_of_size

for _name in ("elementwise", "structure", "indexing", "library"):
    importlib.import_module(f"tests.autodiff.samples.{_name}")

#: Samples of operators that the interpreter spells out; TVM would compile the others once per size.
NAMES = sorted(name for name in SAMPLES if name in OPERATORS)
#: Guards of rules that do not hold for all sizes; a sample's constants fix the extent.
GUARDS = {
    "relax.reshape": ["12*n == 24"],
    "relax.broadcast_to": ["n == 2", "12*n == 24"],
    "relax.gather_elements": ["n >= 3"],  # indices are as wide as the data at most
    "relax.scatter_elements": ["n >= 3"],
}
#: The axis to vary, where it is not the first that is large enough: no index points along it.
AXES = {"relax.gather_elements": 1, "relax.scatter_elements": 1, "relax.split": 1}
#: How far the numbers of bindings may be apart: 2 / n is an operation where n is no number; a concatenation is taken
#: apart by slices, not by a split and its items; a pad by an extent is a concatenation with zeros; an extent that is
#: known to be a number is still spelled in another way.
APART = {"relax.concat": 1, "relax.strided_slice": 2, "relax.broadcast_to": 1}


def _place(name: str) -> tuple[Sample, int]:
    """The first sample of a rule and an axis of its first argument that can vary."""
    for entry in SAMPLES[name]:
        for axis, extent in enumerate(entry.args[0].shape):
            if extent > 1 and not entry.compiled and axis >= AXES.get(name, 0):
                return entry, axis
    raise AssertionError(f"no sample of {name} has an axis to vary")


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_holds_for_all_sizes(name):
    entry, axis = _place(name)
    places = extents_of_size(entry.args, 0, axis, everywhere=True)
    scope = compare(entry.build, entry.args, places, apart=APART.get(name, 0))
    assert [str(guard) for guard in scope.guards] == GUARDS.get(name, [])
