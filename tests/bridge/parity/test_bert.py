"""BERT, from one layer to whole models with their loss: outputs, every gradient and the generator as in eager."""

import pytest
import torch

from tests.bridge.compare import check_module
from tests.bridge.models import (
    bert_layer,
    bert_model,
    classifier,
    masked_labels,
    masked_lm,
    padding,
    tokens,
)
from tests.device import generators
from tests.sampling import sampled

SHAPES = [(3, 17), (1, 5), (2, 32)]


def hidden_states(batch: int, sequence: int) -> torch.Tensor:
    return torch.randn(batch, sequence, 24, requires_grad=True)


@pytest.mark.parametrize(
    ("attention", "shape", "dropout"),
    sampled(
        [(kind, *given) for kind in ("eager", "sdpa") for given in (*((s, 0.1) for s in SHAPES), (SHAPES[0], 0.0))],
        [("sdpa", SHAPES[0], 0.1), ("eager", SHAPES[1], 0.1)],
    ),
    ids=str,
)
def test_layer(attention, shape, dropout):
    check_module(lambda: bert_layer(attention=attention, dropout=dropout), lambda: hidden_states(*shape))


@pytest.mark.parametrize(("attention", "dropout"), sampled([("eager", 0.1), ("sdpa", 0.0)], [("sdpa", 0.0)]))
def test_layer_float32(attention, dropout):
    check_module(
        lambda: bert_layer(attention=attention, dropout=dropout), lambda: hidden_states(3, 17), dtype=torch.float32
    )


@pytest.mark.parametrize("attention", sampled(["eager", "sdpa"], ["sdpa"]))
def test_layer_with_additive_mask(attention):
    def inputs():
        mask = (1.0 - padding().to(torch.float64))[:, None, None, :] * -1e4
        return {"hidden_states": hidden_states(3, 17), "attention_mask": mask.expand(3, 1, 17, 17).contiguous()}

    check_module(lambda: bert_layer(attention=attention), inputs)


def test_layer_whose_input_does_not_require_grad():
    check_module(bert_layer, lambda: torch.randn(3, 17, 24))


def test_dropout_is_drawn_and_moves_the_generator():
    """Guards the comparison itself: two seeds must differ, and so must the generator before and after a call."""
    layer = check_module(bert_layer, lambda: hidden_states(3, 17))
    x = hidden_states(3, 17).double()
    torch.manual_seed(1)
    before = generators()
    first = layer(x)
    assert not torch.equal(generators(), before)
    assert not torch.allclose(first, layer(x))


@pytest.mark.sweep  # it is inside of the masked language models, and takes embeddings below
@pytest.mark.parametrize(("attention", "dtype"), [("eager", torch.float64), ("sdpa", torch.float32)], ids=str)
def test_model(attention, dtype):
    check_module(
        lambda: bert_model(attention=attention),
        lambda: {"input_ids": tokens(), "attention_mask": padding()},
        dtype=dtype,
    )


@pytest.mark.sweep  # test_training.py trains it, with labels
@pytest.mark.parametrize(("attention", "dtype"), [("sdpa", torch.float64), ("eager", torch.float32)], ids=str)
def test_masked_lm_with_labels(attention, dtype):
    def inputs():
        ids = tokens()
        return {"input_ids": ids, "attention_mask": padding(), "labels": masked_labels(ids)}

    check_module(lambda: masked_lm(attention=attention), inputs, dtype=dtype)


@pytest.mark.sweep
def test_masked_lm_without_padding():
    def inputs():
        ids = tokens(2, 32)
        return {"input_ids": ids, "labels": masked_labels(ids)}

    check_module(masked_lm, inputs)


def test_masked_lm_positional():
    check_module(lambda: masked_lm(layers=1), lambda: (tokens(), padding(), torch.zeros(3, 17, dtype=torch.int64)))


@pytest.mark.sweep
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sequence_classification_with_labels(attention):
    check_module(
        lambda: classifier(attention=attention),
        lambda: {"input_ids": tokens(), "attention_mask": padding(), "labels": torch.tensor([2, 0, 1])},
    )


def test_embeddings_as_input():
    check_module(
        bert_model,
        lambda: {"inputs_embeds": torch.randn(3, 17, 24, requires_grad=True), "attention_mask": padding()},
    )
