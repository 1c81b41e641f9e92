"""Saved modules trained on in a process without their source: the same losses, in the bit; the forward in C++."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tvm
import tvm_ffi
from transformers import ResNetConfig, ResNetForImageClassification

from bridge import add_tvm_dispatch, save_compiled, stats
from tests.bridge.export.trained_elsewhere import batch_of, trained
from tests.bridge.models import masked_lm

EXAMPLE = Path(__file__).parents[3] / "examples" / "run_compiled.cc"
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def bert():
    return masked_lm(attention="sdpa", layers=1)


def resnet():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10)
    return ResNetForImageClassification(config).train()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Modules that trained a little, and the folders that they were saved to then."""
    made = {}
    for kind, make in {"bert": bert, "resnet": resnet}.items():
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
