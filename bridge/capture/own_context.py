"""What the user's own Function does while it is traced: what backward reads, what is told to ``ctx``, grad modes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.base.replaced import replaced
from bridge.base.torch_autograd import node_class
from bridge.base.torch_internals import no_torch_function, pytree, set_grad_enabled

__all__ = ["Inside", "NotedContext", "backward_running", "tensors_in"]

_thread = threading.local()


def backward_running() -> Inside | None:
    """The Function whose backward is being traced in this thread."""
    return getattr(_thread, "inside", None)


class Inside(TorchFunctionMode):
    """Inside a Function: grad modes are not the graph's, since autograd follows nothing; notes what backward reads.

    Attributes:
        runs_forward: whether forward is being run.
        unheld: what backward does and no graph holds: read a number, draw.
        sets_modes: whether forward switches grad mode on, or backward sets it or applies another Function, which a
            second derivative would see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sets_modes = self.runs_forward = False
        self.unheld: str | None = None
        self._made: set[int] | None = None
        self._kept: list[Any] = []
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is set_grad_enabled:
            self.sets_modes |= self.runs_backward or (self.runs_forward and args[0])
            with no_torch_function():
                return func(*args)
        if self._made is None:
            return func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and id(each) not in self._made:
                self._seen.setdefault(id(each), (each, each._version))
        result = func(*args, **(kwargs or {}))
        self._kept.append(result)  # while it lives, nothing else has its id
        self._made.update(id(each) for each in tensors_in(result) if id(each) not in self._seen)
        return result

    @property
    def runs_backward(self) -> bool:
        """Whether backward is being run."""
        return self._made is not None

    @contextmanager
    def reading(self) -> Iterator[list[tuple[torch.Tensor, int]]]:
        """Around backward; then the list has the tensors from elsewhere that it used, and their versions before."""
        self._made, found = set(), []
        _thread.inside = self
        try:
            yield found
        finally:
            _thread.inside = None
            found += self._seen.values()
            self._made, self._kept = None, []


class NotedContext:
    """While active, what forward tells its ``ctx`` is noted, and backward finds the very tensors that were saved.

    Autograd's own unpacking may make new tensors of them, which are none that the graph knows.

    Attributes:
        partial: whether the Function wants ``None`` for the gradients of outputs that are not used.
        saved: what it saved.
    """

    def __init__(self, kind: type) -> None:
        self.partial, self.saved = False, ()
        self._node = node_class(kind)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        here, ctx_class = threading.get_ident(), torch.autograd.function.FunctionCtx
        materialize, save = ctx_class.set_materialize_grads, ctx_class.save_for_backward
        theirs = self._node.saved_tensors

        def note_materialize(ctx: Any, value: bool) -> None:
            if threading.get_ident() == here:
                self.partial = not value
            materialize(ctx, value)

        def note_saved(ctx: Any, *tensors: Any) -> None:
            if threading.get_ident() == here and isinstance(ctx, self._node):
                self.saved = tensors
            save(ctx, *tensors)

        def saved(ctx: Any) -> Any:
            return self.saved if threading.get_ident() == here else theirs.__get__(ctx)

        noted = {"set_materialize_grads": note_materialize, "save_for_backward": note_saved}
        self._stack.enter_context(replaced(ctx_class, **noted))
        self._stack.enter_context(replaced(self._node, saved_tensors=property(saved)))

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def tensors_in(made: Any) -> list[torch.Tensor]:
    fields = made if isinstance(made, tuple | list) else (made,)
    return [each for each in fields if isinstance(each, torch.Tensor)]
