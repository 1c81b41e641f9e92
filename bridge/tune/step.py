"""Step of an entry: a module's call → one forward and, where there is one, backward, on memory that nobody notices.

The entry is given the module's tensors as leaves of their own that share its memory; buffers that a call writes are
copies. So no gradient, hook, buffer or counter of the user's is touched; :func:`unnoticed` puts generators back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from bridge.base.devices import HOST
from bridge.base.generators import default_generator
from bridge.base.torch_internals import pytree
from bridge.dispatch import Entry
from bridge.state import Snapshot, generators_put_back

__all__ = ["TimedStep", "unnoticed"]


class TimedStep:
    """One step; calling it runs it and returns when it is over.

    Args:
        entry: of the call ``module(*args, **kwargs)``; an attribute, too.

    Raises:
        GuardFailure: the entry does not serve the call.
    """

    def __init__(self, entry: Entry, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        self.entry, self._module = entry, module
        captured = entry.lowered.captured
        written = {index for index, _ in captured.mutated}
        self._inputs = []
        for index, tensor in enumerate(entry.guard.match(module, args, kwargs)):
            own = tensor.detach()
            if index in written:
                own = own.clone()
            self._inputs.append(own.requires_grad_(tensor.requires_grad))
        self._wanted = [self._inputs[index] for index in entry.lowered.wanted]
        self._device = captured.device
        self._seeds: list[torch.Tensor] | None = None

    def __call__(self) -> None:
        self.results()
        if self._device != HOST:
            torch.cuda.synchronize(self._device)

    def results(self) -> list[torch.Tensor]:
        """What the step computes: results, then the gradients that there are, of fixed random numbers."""
        with nullcontext() if self._wanted else torch.no_grad():
            made = self.entry(list(self._inputs), self._module)
        leaves = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in leaves if leaf.requires_grad]
        outputs = [leaf for leaf in outputs if leaf.ndim == 0] or outputs  # as a training loop goes backward
        if not (self._wanted and outputs):
            return leaves
        if self._seeds is None:
            self._seeds = list(map(_seed, outputs))
        gradients = torch.autograd.grad(outputs, self._wanted, self._seeds, allow_unused=True)
        return [*leaves, *(each for each in gradients if each is not None)]


def _seed(output: torch.Tensor) -> torch.Tensor:
    """A grad_out: of ones, a normalization's gradients would be nothing but rounding."""
    generator = torch.Generator(HOST).manual_seed(0)
    numbers = torch.randn(output.shape, generator=generator, device=HOST)
    return numbers.to(output.device, output.dtype)


@contextmanager
def unnoticed(entry: Entry, module: nn.Module) -> Iterator[None]:
    """Generators and the module's Python state are put back behind what runs inside."""
    devices = {draw.device for draw in entry.lowered.captured.draws}
    generators = [default_generator(device) for device in devices]
    before, states = Snapshot(module), [generator.get_state() for generator in generators]
    try:
        with generators_put_back():
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        before.restore()
