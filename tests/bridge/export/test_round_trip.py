"""Saved modules trained on in a process without their source: the same losses, in the bit; the forward in C++."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from bridge import add_tvm_dispatch, load_compiled, save_compiled, stats
from bridge.compile import CallLibrary, Loop
from tests.bridge.export.trained_elsewhere import batch_of, trained
from tests.bridge.models import masked_lm

EXAMPLE = Path(__file__).parents[3] / "examples" / "run_compiled.cc"
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


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
    """A loop, complex numbers on the way, a user's own Function, an operator that only torch computes."""

    def __init__(self):
        super().__init__()
        self.cell, self.scale = nn.GRUCell(4, 5), nn.Parameter(torch.ones(5))

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 5)
        for part in x.unbind(1):
            h = self.cell(part, h)
        spectrum = torch.fft.fft(h * self.scale)
        return Loss(torch.linalg.svdvals(Halved.apply(h)).sum() + (spectrum * spectrum.conj()).real.mean())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Modules that trained a little, and the folders that they were saved to then."""
    made = {}
    for kind, make in {"bert": bert, "resnet": resnet, "mixed": Mixed}.items():
        torch.manual_seed(0)
        module = add_tvm_dispatch(make(), batch_of(kind, 0))
        module(**batch_of(kind, 0)).loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
        module.zero_grad()
        folder = tmp_path_factory.mktemp("saved") / kind
        save_compiled(module, folder)
        made[str(folder)] = module
    return made


def test_training_goes_on_in_a_process_without_the_source(saved):
    command = [sys.executable, "-m", "tests.bridge.export.trained_elsewhere", *saved]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    elsewhere = json.loads(ran.stdout.splitlines()[-1])
    for folder, module in saved.items():
        assert elsewhere[folder] == trained(module, Path(folder).name)
        assert not stats(module).misses


def test_programs_of_the_mixed_module_have_what_it_is_for(saved):
    (entry,) = stats(next(module for module in saved.values() if isinstance(module, Mixed))).entries
    kinds = {type(step) for step in entry.forward.steps}
    assert Loop in kinds
    assert "operator" in {step.name for step in entry.forward.steps if isinstance(step, CallLibrary)}


def test_gradients_of_gradients_want_the_source(saved):
    folder = next(folder for folder, module in saved.items() if isinstance(module, Mixed))
    loaded = load_compiled(folder)
    loss = loaded(**batch_of("mixed", 0)).loss
    with pytest.raises(RuntimeError, match="create_graph=True through a module of load_compiled"):
        torch.autograd.grad(loss, loaded.scale, create_graph=True)


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_the_forward_in_cpp(tmp_path):
    torch.manual_seed(0)
    module, batch = bert().eval(), batch_of("bert", 0)
    del batch["labels"]
    batch["attention_mask"][0, 4:] = 0
    with torch.no_grad():
        add_tvm_dispatch(module, batch)
    save_compiled(module, tmp_path / "bert", native=True)
    binary = tmp_path / "run"
    roots = [Path(package.__file__).parent for package in (tvm, tvm_ffi)]
    libraries = [str(root / "lib") for root in roots]
    command = [COMPILER, "-std=c++17", str(EXAMPLE), "-o", str(binary), f"-I{roots[1] / 'include'}"]
    command += [f"-L{path}" for path in libraries] + ["-ltvm_runtime", "-ltvm_ffi", f"-Wl,-rpath,{':'.join(libraries)}"]
    subprocess.run(command, check=True, capture_output=True)
    given = b"".join(tensor.numpy().tobytes() for tensor in batch.values())
    ran = subprocess.run(
        [str(binary), str(tmp_path / "bert" / "forward.so")], input=given, capture_output=True, check=True
    )
    printed = torch.tensor([float(line) for line in ran.stdout.split()])
    with torch.no_grad():
        wanted = module(**batch).logits
    torch.testing.assert_close(printed.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)
