"""The part of the parity sweep that always runs: torch's operator and module samples, and five HuggingFace models.

``python -m tests.sweep`` runs all of them. Samples under ``EXPECTED`` must be dispatched and equal; the others,
which the sweep may also find refused, must only not be wrong.
"""

import pytest

from tests.sampling import sampled, spread
from tests.sweep import moduleinfo, opinfo, zoo

pytestmark = pytest.mark.slow

EXPECTED_OPERATORS = [
    "add",
    "sub",
    "mul",
    "div:no_rounding_mode",
    "neg",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
    "erf",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "sum",
    "mean",
    "softmax",
    "log_softmax",
    "where",
    "masked_fill",
    "cat",
    "gather",
    "select",
    "squeeze",
    "unsqueeze",
    "permute",
    "transpose",
    "reshape",
    "expand",
    "clone",
    "nn.functional.linear",
    "nn.functional.gelu",
    "nn.functional.relu",
    "nn.functional.dropout",
    "nn.functional.layer_norm",
    "nn.functional.embedding",
    "nn.functional.cross_entropy",
    "nn.functional.scaled_dot_product_attention",
]

COMMON = {
    *("sub", "neg", "exp", "sqrt", "rsqrt", "sigmoid", "erf", "mm", "bmm", "mean", "log_softmax", "where", "select"),
    *("squeeze", "unsqueeze", "permute", "transpose", "expand", "clone", "nn.functional.relu"),
    *("mul", "log", "tanh", "addmm", "matmul", "softmax", "nn.functional.linear", "nn.functional.gelu"),
    *("nn.functional.dropout", "nn.functional.layer_norm", "nn.functional.scaled_dot_product_attention"),
}
"""Which many other tests compare with eager, or which are lowered as another one here is."""

OTHER_OPERATORS = [
    "amax",
    "max:reduction_with_dim",
    "prod",
    "cumsum",
    "var",
    "std",
    "pow",
    "maximum",
    "clamp",
    "topk",
    "sort",
    "index_select",
    "index_put",
    "scatter_add",
    "flip",
    "roll",
    "tril",
    "logsumexp",
    "linalg.vector_norm",
    "einsum",
    "nn.functional.batch_norm",
    "nn.functional.conv2d",
    "nn.functional.max_pool2d",
    "nn.functional.pad:reflect",
    "nn.functional.interpolate:bilinear",
    "nn.functional.alpha_dropout",
    "bernoulli",
    "complex",
]

EXPECTED_MODULES = [
    "nn.Linear",
    "nn.LayerNorm",
    "nn.Embedding",
    "nn.GELU",
    "nn.Tanh",
    "nn.Softmax",
    "nn.CrossEntropyLoss",
]

OTHER_MODULES = ["nn.BatchNorm1d", "nn.GroupNorm", "nn.Conv2d", "nn.LSTM", "nn.MultiheadAttention", "nn.PReLU"]

EXPECTED_MODELS = ["bert-sdpa", "distilbert", "electra"]
"""All of them BERT's kin, which test_bert.py and test_training.py have."""

OTHER_MODELS = ["gpt2", "vit"]

SAMPLES = pytest.mark.parametrize("limit", [1, pytest.param(2, marks=pytest.mark.sweep)])
"""Samples of an operator or module: the first of torch's, or the first and the last; ``python -m tests.sweep`` runs
more."""


@SAMPLES
@pytest.mark.parametrize("name", sampled(EXPECTED_OPERATORS, lambda name: name not in COMMON))
def test_operator(name, limit):
    expect_pass(opinfo.run_case(name, limit=limit))


@SAMPLES
@pytest.mark.parametrize("name", sampled(OTHER_OPERATORS, spread(OTHER_OPERATORS, 4)))
def test_other_operator(name, limit):
    expect_nothing_wrong(opinfo.run_case(name, limit=limit))


@SAMPLES
@pytest.mark.parametrize("name", sampled(EXPECTED_MODULES, spread(EXPECTED_MODULES, 3)))
def test_module(name, limit):
    expect_pass(moduleinfo.run_case(name, limit=limit))


@SAMPLES
@pytest.mark.parametrize("name", sampled(OTHER_MODULES, spread(OTHER_MODULES)))
def test_other_module(name, limit):
    expect_nothing_wrong(moduleinfo.run_case(name, limit=limit))


@pytest.mark.parametrize("name", sampled(EXPECTED_MODELS, []))
def test_model(name):
    expect_pass(zoo.run_case(name))


@pytest.mark.parametrize("name", sampled(OTHER_MODELS, ["vit"]))
def test_other_model(name):
    expect_nothing_wrong(zoo.run_case(name))


def expect_pass(outcome):
    assert outcome.status == "pass", f"{outcome.status}: {outcome.detail}"
    assert outcome.passed > 0


def expect_nothing_wrong(outcome):
    assert outcome.status not in ("mismatch", "error"), f"{outcome.status}: {outcome.detail}"
    if outcome.status.startswith("refused"):
        assert outcome.status != "refused()", f"a refusal names no operator: {outcome.detail}"
