"""What the user's own Function does while it is traced: what backward reads, what is told to ``ctx``, grad modes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from bridge.base.replaced import replaced
from bridge.base.torch_autograd import node_class
from bridge.base.torch_internals import no_torch_function, pytree, set_grad_enabled

__all__ = ["Inside", "NotedContext", "backward_running", "function_running", "tensors_in"]

_thread = threading.local()


def function_running() -> Inside | None:
    """The Function that runs in this thread, forward or backward."""
    return getattr(_thread, "inside", None)


def backward_running() -> Inside | None:
    """The Function whose backward is being traced in this thread."""
    inside = function_running()
    return inside if inside is not None and inside.runs_backward else None


class Inside:
    """Inside a Function: grad modes are not the graph's, since autograd follows nothing; notes what backward reads.

    While active, :meth:`called` is asked by the mode of torch functions (:mod:`bridge.capture.functions`).

    Attributes:
        runs_forward: whether forward is being run.
        unheld: what backward does and no graph holds: read a number, draw.
        sets_modes: whether forward switches grad mode on, or backward sets it or applies another Function, which a
            second derivative would see.
    """

    def __init__(self) -> None:
        self.sets_modes = self.runs_forward = False
        self.unheld: str | None = None
        self._made: set[int] | None = None
        self._kept: list[Any] = []
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}

    def __enter__(self) -> None:
        self._before, _thread.inside = function_running(), self

    def __exit__(self, *error: object) -> None:
        _thread.inside = self._before

    def called(self, call: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What a torch function gives, which ``call(func, args, kwargs)`` calls."""
        if func is set_grad_enabled:
            self.sets_modes |= self.runs_backward or (self.runs_forward and args[0])
            with no_torch_function():
                return func(*args)
        if self._made is None:
            return call(func, args, kwargs)
        for each in pytree.tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and id(each) not in self._made:
                self._seen.setdefault(id(each), (each, each._version))
        result = call(func, args, kwargs)
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
        try:
            yield found
        finally:
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
        here, theirs = threading.get_ident(), self._node.saved_tensors
        materialize, save = self._node.set_materialize_grads, self._node.save_for_backward

        def note_materialize(ctx: Any, value: bool) -> None:
            if threading.get_ident() == here:
                self.partial = not value
            materialize(ctx, value)

        def note_saved(ctx: Any, *tensors: Any) -> None:
            if threading.get_ident() == here:
                self.saved = tensors
            save(ctx, *tensors)

        def saved(ctx: Any) -> Any:
            return self.saved if threading.get_ident() == here else theirs.__get__(ctx)

        noted = {"set_materialize_grads": note_materialize, "save_for_backward": note_saved}
        self._stack.enter_context(replaced(self._node, **noted, saved_tensors=property(saved)))

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def tensors_in(made: Any) -> list[torch.Tensor]:
    fields = made if isinstance(made, tuple | list) else (made,)
    return [each for each in fields if isinstance(each, torch.Tensor)]
