"""Saved modules trained on in a process without their source: the same losses, in the bit; the forward in C++."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from bridge import UnsupportedModule, add_tvm_dispatch, load_compiled, save_compiled, stats
from bridge.compile import CallLibrary, RunLoop
from tests.bridge.export.in_cpp import COMPILER, printed_by_the_example
from tests.bridge.export.trained_elsewhere import batch_of, trained
from tests.bridge.models import masked_lm
from tests.sampling import sampled


def bert():
    return masked_lm(attention="sdpa", layers=1)


def resnet():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10)
    return ResNetForImageClassification(config).train()


class Halved(torch.autograd.Function):
    """A backward that is not the forward's derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos() / 2


class Loss(NamedTuple):
    loss: torch.Tensor


class Mixed(nn.Module):
    """Complex numbers on the way, a mask, an operator of torch alone; a custom autograd Function, or a loop."""

    def __init__(self, is_looped=False):
        super().__init__()
        self.is_looped = is_looped
        self.cell, self.scale, self.drop = nn.GRUCell(4, 5), nn.Parameter(torch.ones(5)), nn.Dropout(0.2)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 5)
        for part in x.unbind(1):
            h = self.cell(part, h)
        spectrum = torch.fft.fft(self.drop(h * self.scale))
        return Loss(
            torch.linalg.svdvals(h * 2 if self.is_looped else Halved.apply(h)).sum()
            + (spectrum * spectrum.conj()).real.mean()
        )


MAKERS = {"bert": bert, "resnet": resnet, "mixed": Mixed, "looped": partial(Mixed, True)}


def saved_as(kind: str, folder: Path, device: torch.device | str = "cpu") -> nn.Module:
    """A module that trained a little on a device, and was saved to a folder then."""
    torch.manual_seed(0)
    batch = batch_of(kind, 0, device)
    module = add_tvm_dispatch(MAKERS[kind]().to(device), batch)
    module(**batch).loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad
    module.zero_grad()
    save_compiled(module, folder)
    return module


def trained_by_another_process(folders: Iterable[str]) -> dict[str, Any]:
    """The result of :func:`trained` for saved modules in a process without their source, by folder."""
    command = [sys.executable, "-m", "tests.bridge.export.trained_elsewhere", *folders]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Modules by the folders that they were saved to."""
    folders = {kind: tmp_path_factory.mktemp("saved") / kind for kind in ("resnet", "mixed", "looped")}
    return {str(folder): saved_as(kind, folder) for kind, folder in folders.items()}


def test_training_goes_on_in_a_process_without_the_source(saved):
    assert_trained_alike(saved)


@pytest.mark.sweep  # test_load.py covers the rest of it
def test_training_of_a_bert_goes_on_in_a_process_without_the_source(tmp_path):
    assert_trained_alike({str(tmp_path / "bert"): saved_as("bert", tmp_path / "bert")})


def assert_trained_alike(saved):
    elsewhere = trained_by_another_process(saved)
    for folder, module in saved.items():
        assert elsewhere[folder] == trained(module, Path(folder).name)
        assert not stats(module).misses


@pytest.mark.parametrize("kind", ["mixed", "looped"])
def test_programs_of_the_mixed_module_have_what_it_is_for(saved, kind):
    """Steps beside a custom Function stay unrolled."""
    (entry,) = stats(next(module for folder, module in saved.items() if Path(folder).name == kind)).entries
    assert (RunLoop in {type(step) for step in entry.forward.steps}) is (kind == "looped")
    assert "operator" in {step.name for step in entry.forward.steps if isinstance(step, CallLibrary)}


def test_gradients_of_gradients_want_the_source(saved):
    folder = next(folder for folder, module in saved.items() if isinstance(module, Mixed))
    loaded = load_compiled(folder)
    loss = loaded(**batch_of("mixed", 0)).loss
    with pytest.raises(RuntimeError, match="create_graph=True through a module of load_compiled"):
        torch.autograd.grad(loss, loaded.scale, create_graph=True)


def of_four_axes(mask: torch.Tensor) -> torch.Tensor:
    """An attention mask in the form whose numbers transformers does not read."""
    seen = mask.bool()[:, None, None]
    return torch.zeros_like(seen, dtype=torch.float).masked_fill(~seen, -1e4).repeat(1, 1, seen.shape[-1], 1)


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("kind", sampled(["bert", "resnet"], ["bert"]))
def test_the_forward_in_cpp(kind, tmp_path):
    torch.manual_seed(0)
    module, batch = MAKERS[kind]().eval(), batch_of(kind, 0)
    del batch["labels"]
    if kind == "bert":
        batch["attention_mask"][0, 4:] = 0
        with torch.no_grad(), pytest.raises(UnsupportedModule, match="checks: has no native form"):
            looks_at_its_mask = add_tvm_dispatch(copy.deepcopy(module), batch)
            save_compiled(looks_at_its_mask, tmp_path / "refused", native=True)
        batch["attention_mask"] = of_four_axes(batch["attention_mask"])
    with torch.no_grad():
        add_tvm_dispatch(module, batch)
        wanted = module(**batch).logits
    save_compiled(module, tmp_path / kind, native=True)
    printed = printed_by_the_example(tmp_path / kind / "forward.so", batch.values())
    torch.testing.assert_close(printed.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)
