"""Every registered gradient rule against torch.autograd in float64; a rule without a sample fails."""

from __future__ import annotations

import importlib

import pytest
import torch

from autodiff import clean, differentiate
from autodiff.gradients.registry import RULES
from autodiff.ir import bindings, library_name, op_name, results
from autodiff.normalization import fold_normalizations
from autodiff.ops import having
from tests.autodiff.evaluate import evaluate, function
from tests.autodiff.gradcheck import check, draw, interpreted
from tests.autodiff.samples import SAMPLES

for _name in ("elementwise", "structure", "indexing", "library", "scan"):
    importlib.import_module(f"tests.autodiff.samples.{_name}")

CASES = [(name, index) for name, samples in SAMPLES.items() for index in range(len(samples))]


@pytest.mark.parametrize("name,index", CASES, ids=str)
def test_values_and_gradients_equal_torch(name, index):
    entry = SAMPLES[name][index]
    run = (lambda func, args: evaluate(func, *args)) if entry.compiled else interpreted
    check(entry.build, entry.reference, *entry.args, run=run, rtol=entry.rtol, atol=entry.rtol / 10)


@pytest.mark.parametrize("name", sorted({*RULES} - having("creation")))
def test_every_rule_has_samples_that_call_it(name):
    assert name in SAMPLES, f"add a sample of {name} to tests/autodiff/samples/"
    for entry in SAMPLES[name]:
        func = function(entry.build, *entry.args)
        body = fold_normalizations(list(bindings(func)), results(func)[0])
        assert name in {library_name(value) or op_name(value) for _, value in body}


def test_a_second_derivative_of_a_gamma_is_refused_as_in_eager():
    """The first derivative's operator has arguments that its own rule reads; torch has no derivative of it."""
    (entry,) = SAMPLES["library.draw"]
    joint = clean(differentiate(function(entry.build, *entry.args), [0], [1]))
    given = *entry.args, draw(3, 4, seed=1), draw(3, 4, seed=2)
    by_gradient = interpreted(clean(differentiate(joint, [1], [2])), given)[-1]
    slope = interpreted(joint, (*entry.args, torch.ones(3, 4).double()))[1]
    torch.testing.assert_close(by_gradient, given[-1] * slope, rtol=1e-12, atol=0)
    twice = clean(differentiate(joint, [1], [1]))
    with pytest.raises(Exception, match="_standard_gamma_grad"):
        interpreted(twice, given)


def test_every_sample_is_of_a_rule():
    assert set(SAMPLES) <= {*RULES}
