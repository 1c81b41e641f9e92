"""The training script: its data, its measure of saved bytes, its verdict, and one small run to the table."""

import argparse
from collections import Counter

import pytest
import torch
from torch import nn

from benchmarks.saved_bytes import saved_for_backward
from benchmarks.text import IGNORED, MASK, SPECIAL, build_tokenizer, mask_tokens, masked_batches
from benchmarks.train_bert import Counts, Result, Training, failures, main, parse
from tests.sampling import sampled

pytestmark = pytest.mark.slow

SMALL = "--layers 1 --hidden 16 --heads 2 --vocabulary 200 --steps 4 --batch 2 --seq 12".split()


def test_tokenizer_ranks_by_frequency_then_alphabet():
    tokenizer = build_tokenizer(["b a b", "B, c"], 8)
    assert list(tokenizer.vocabulary) == [*SPECIAL, "b", ",", "a"]
    assert tokenizer.encode("A b, c") == [7, 5, 6, 1]


def test_tokenizer_needs_room_for_words():
    with pytest.raises(ValueError, match="special tokens"):
        build_tokenizer(["a"], 5)


def test_masking_proportions_and_labels():
    ids = torch.randint(len(SPECIAL), 100, (200, 100))
    ids[:, 0] = 2
    inputs, labels = mask_tokens(ids, 100, torch.Generator().manual_seed(0))
    predicted = labels != IGNORED
    assert not predicted[:, 0].any(), "special tokens are never predicted"
    assert torch.equal(labels[predicted], ids[predicted])
    assert torch.equal(inputs[~predicted], ids[~predicted])
    assert predicted.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (inputs[predicted] == MASK).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (inputs[predicted] == ids[predicted]).float().mean().item() == pytest.approx(0.1, abs=0.03)


def test_batches_depend_on_their_seed_alone():
    documents = ["one two three four five six seven"] * 40
    tokenizer = build_tokenizer(documents, 12)
    options = {"steps": 2, "batch": 3, "length": 8}
    state = torch.get_rng_state()
    first = masked_batches(tokenizer, documents, seed=1, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again = masked_batches(tokenizer, documents, seed=1, **options)
    other = masked_batches(tokenizer, documents, seed=2, **options)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(first, again, strict=True) for key in a)
    assert not all(torch.equal(a[key], b[key]) for a, b in zip(first, other, strict=True) for key in a)
    assert first[0]["input_ids"].shape == first[0]["labels"].shape == (3, 8)


def test_saved_bytes_count_each_storage_once_without_parameters_and_inputs():
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2, bias=False))
    x = torch.randn(5, 4)
    # Tanh saves its result, which the second Linear saves again: one storage of 5 x 8 float32.
    assert saved_for_backward(module, lambda: module(x), x) == 5 * 8 * 4
    assert saved_for_backward(module, lambda: module(x)) == 5 * 8 * 4 + 5 * 4 * 4


def result(own: list[float], other: list[float], undispatched: list[int]) -> Result:
    trainings = [Training(nn.Identity(), None, torch.get_rng_state(), losses) for losses in (own, other)]
    return Result(*trainings, [], Counts(0, Counter()), undispatched, 0.0, 0.0, 1, 1)


@pytest.mark.parametrize(
    ("own", "other", "undispatched", "named"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-6], [0], None),
        ([1.0, 2.0], [1.0, 2.1], [], "differ"),
        ([1.0, 2.0], [1.0, float("nan")], [], "differ"),
        ([1.0, 2.0], [1.0, 2.0], [1], "not dispatched"),
    ],
)
def test_verdict(own, other, undispatched, named):
    found = failures(result(own, other, undispatched), argparse.Namespace(tolerance=1e-4))
    assert (not found) if named is None else (named in found[0])


@pytest.mark.parametrize("arguments", [["--hidden", "10"], ["--steps", "0"], ["--seq", "2"], ["--dispatch", "all"]])
def test_wrong_options(arguments):
    with pytest.raises(SystemExit):
        parse(arguments)


@pytest.mark.parametrize("what", sampled(["model", "layers"], ["model"]))
def test_a_small_run(what, capsys, tmp_path):
    status = main([*SMALL, "--dispatch", what, "--plot", str(tmp_path / "curves.png")])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "4 hits, 0 misses" in printed.out
    assert "| eager | dispatched | ratio |" in printed.out
    assert (tmp_path / "curves.png").stat().st_size > 0
