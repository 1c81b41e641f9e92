"""Row kernels on a GPU, forward and backward, beside Inductor's and the bandwidth of a copy: one Markdown table.

    python -m benchmarks gpu_rows --dtype bfloat16
    python -m benchmarks gpu_rows --only LayerNorm softmax

Each case is a small module: dispatched, eager, and by ``torch.compile``. Peers take turns; the table has medians of GPU
time. ``of copy``: the kernel's bandwidth (inputs and results once each; a drawn mask is free) relative to a ``copy_``
of 512 MiB. Data that fits into the GPU's second-level cache may exceed 1. ``--quick``: tiny cases, also without a GPU,
as a smoke test.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_clock import Step, by_turns, copy_bandwidth
from bridge import add_tvm_dispatch, stats


class BiasGelu(nn.Module):
    """``gelu(x + bias)``."""

    def __init__(self, width: int):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x + self.bias)


class DropoutAdd(nn.Module):
    """``dropout(x) + residual``."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return functional.dropout(x, 0.1, self.training) + residual


@dataclass(frozen=True)
class Case:
    """A module and its input.

    Attributes:
        make: ``make(width)``.
        shape: of the first input; ``inputs``: the number of inputs of this shape.
        classes: whether a further input names a class for each row.
        moved: numbers of tensors of the first input's size that the forward, and the backward, reads and writes.
    """

    make: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    moved: tuple[int, int]
    inputs: int = 1
    classes: bool = False


ROWS = 32 * 328
CASES = {
    "LayerNorm": Case(nn.LayerNorm, (ROWS, 768), (2, 3)),
    "LayerNorm, long": Case(nn.LayerNorm, (16384, 4096), (2, 3)),
    "RMSNorm": Case(nn.RMSNorm, (ROWS, 768), (2, 3)),
    "RMSNorm, long": Case(nn.RMSNorm, (16384, 4096), (2, 3)),
    "softmax": Case(lambda width: nn.Softmax(-1), (32, 12, 328, 328), (2, 3)),
    "softmax, long": Case(lambda width: nn.Softmax(-1), (4, 12, 1024, 1024), (2, 3)),
    "cross-entropy": Case(lambda width: nn.CrossEntropyLoss(), (4096, 30522), (1, 2), classes=True),
    "GELU + bias": Case(BiasGelu, (ROWS, 3072), (2, 3)),
    "dropout + add": Case(lambda width: DropoutAdd(), (ROWS, 3072), (3, 2), inputs=2),
}
"""By name; sizes of BERT at (32, 328), and longer rows."""


class Kernels:
    """Forward and backward of one peer, separately."""

    def __init__(self, module: nn.Module, inputs: list[Tensor], grad: Tensor):
        self.module, self.inputs, self.grad = module, inputs, grad
        self.leaves = [each for each in [*inputs, *module.parameters()] if each.requires_grad]
        self.y: Tensor | None = None

    def clear(self) -> None:
        """Before a forward: frees the last step's results."""
        self.y = None
        for leaf in self.leaves:
            leaf.grad = None

    def forward(self) -> None:
        self.y = self.module(*self.inputs)

    def prepare(self) -> None:
        """Before a backward."""
        self.clear()
        self.forward()

    def backward(self) -> None:
        self.y.backward(self.grad)


def measure(name: str, options: argparse.Namespace, device: torch.device, bandwidth: float) -> None:
    """Prints the lines of one case."""
    case, dtype = CASES[name], getattr(torch, options.dtype)
    shape = tuple(min(extent, 8) for extent in case.shape) if options.quick else case.shape
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(case.inputs)]
    if case.classes:
        inputs.append(torch.randint(0, shape[-1], shape[:-1], device=device))
    plain = case.make(shape[-1]).to(device, dtype)
    grad = torch.randn_like(plain(*inputs))
    ours = case.make(shape[-1]).to(device, dtype)
    add_tvm_dispatch(ours, tuple(inputs))
    modules = {"ours": ours, "eager": plain}
    if options.inductor:
        modules["inductor"] = torch.compile(case.make(shape[-1]).to(device, dtype))
    peers = {each: Kernels(module, inputs, grad) for each, module in modules.items()}
    nbytes = inputs[0].nbytes
    for direction, before, moved in (("forward", "clear", case.moved[0]), ("backward", "prepare", case.moved[1])):
        runs: dict[str, Step] = {each: getattr(made, direction) for each, made in peers.items()}
        first: dict[str, Step] = {each: getattr(made, before) for each, made in peers.items()}
        spent = by_turns(runs, options.rounds, True, first)
        cells = [f"{name} {direction}", str(list(shape))]
        cells += [f"{1e3 * spent[each]:.1f}" for each in peers]
        cells += [f"{spent['ours'] / spent[each]:.2f}" for each in peers if each != "ours"]
        cells += [f"{moved * nbytes / (milliseconds * 1e-3) / bandwidth:.2f}" for milliseconds in spent.values()]
        print(f"| {' | '.join(cells)} |", flush=True)
    if stats(ours).misses:
        raise RuntimeError(f"{name} was not dispatched: {stats(ours)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-inductor", dest="inductor", action="store_false", help="leave torch.compile out")
    parser.add_argument("--quick", action="store_true", help="tiny inputs, one round, no Inductor: does it work")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.inductor = 1, False
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else 1e10
    what = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    print(f"{what}, torch {torch.__version__}, {options.dtype}, copy {bandwidth / 1e12:.2f} TB/s\n")
    peers = ["ours", "eager", *(["inductor"] if options.inductor else [])]
    heads = ["kernel", "input", *(f"{each} us" for each in peers), *(f"ours/{each}" for each in peers[1:])]
    heads += [f"{each} of copy" for each in peers]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    for name in CASES:
        if any(part in name for part in options.only):
            measure(name, options, device, bandwidth)


if __name__ == "__main__":
    main()
