"""Saved modules of a GPU: trained on in a process without their source, and their forward in C++."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bridge import add_tvm_dispatch, save_compiled, stats
from tests.bridge.export.in_cpp import COMPILER, printed_by_the_example
from tests.bridge.export.test_round_trip import MAKERS, bert, of_four_axes, resnet, saved_as, trained_by_another_process
from tests.bridge.export.trained_elsewhere import batch_of, trained
from tests.device import DEVICE
from tests.gpu.marks import ON_A_GPU

pytestmark = ON_A_GPU


def test_training_goes_on_in_a_process_without_the_source(tmp_path):
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        folders = {kind: tmp_path / kind for kind in MAKERS}
        saved = {str(folder): saved_as(kind, folder, DEVICE) for kind, folder in folders.items()}
        elsewhere = trained_by_another_process(saved)
        for folder, module in saved.items():
            assert elsewhere[folder] == trained(module, Path(folder).name), folder
            assert not stats(module).misses


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(("kind", "make"), [("bert", bert), ("resnet", resnet)])
def test_the_forward_in_cpp(kind, make, tmp_path):
    torch.manual_seed(0)
    module, batch = make().eval().to(DEVICE), batch_of(kind, 0, DEVICE)
    del batch["labels"]
    if kind == "bert":
        batch["attention_mask"] = of_four_axes(batch["attention_mask"])
    with torch.no_grad():
        add_tvm_dispatch(module, batch)
        wanted = module(**batch).logits
    save_compiled(module, tmp_path / kind, native=True)
    printed = printed_by_the_example(tmp_path / kind / "forward.so", batch.values(), on_a_gpu=True)
    torch.testing.assert_close(printed.reshape(wanted.shape), wanted.cpu(), rtol=1e-4, atol=1e-5)
