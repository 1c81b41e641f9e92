"""Modes of fake tensors: creation, and release of the real tensors.

Hidden fake type: outside of torch, the name of the class leads to a class without instances.

Code may test ``isinstance(x, torch._subclasses.FakeTensor)`` to learn whether forward is traced. Where forward is to be
traced as eager runs it, the answer is eager's. torch's own code sees the class itself, except for ``nn.Module.to``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from bridge.base.devices import HOST
from bridge.base.errors import is_user_file
from bridge.base.modes import while_active
from bridge.base.quirks import quirk
from bridge.base.torch_autograd import no_torch_dispatch
from bridge.base.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    HigherOrderOperator,
    aten,
    find,
    neg_view,
    pytree,
)

find("torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access")


_FAKE_FORMS: dict[Any, Any] = find("torch._higher_order_ops.utils.registered_hop_fake_fns", {})
"""Higher-order operators whose form for fake tensors the mode itself calls, by version of torch."""


_DEVICE = torch.ops.prim.device.default


class _FakeMode(FakeTensorMode):
    """A fake mode under which Dynamo compiles nothing: compiled functions run eager, as under other modes.

    Higher-order operators, as a Triton kernel in an operator's fake form, follow torch's rules for fake tensors, which
    torch looks up by the mode's exact class.

    Attributes:
        through: if set, runs each operator on tensors of the mode, as ``through(func, args, kwargs)``.
    """

    supports_higher_order_operators = True
    through: Callable[..., Any] | None = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.through is not None and func is not _DEVICE:  # a frequent query
            is_above = any(issubclass(kind, FunctionalTensor) for kind in types)
            return NotImplemented if is_above else self.through(func, args, kwargs or {})
        if isinstance(func, HigherOrderOperator) and func not in _FAKE_FORMS:
            return func.python_key_table[FakeTensorMode](self, *args, **(kwargs or {}))
        if func in _BAGS:
            return _bags(functools.partial(super().__torch_dispatch__, func, types), args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def alone(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function whose operators do not pass :attr:`through`."""
        with while_active(self, through=None), self:
            return call(*args, **kwargs)


_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)


@quirk(
    "F.embedding_bag",
    reason="its formula for fake tensors does not know the kernel for bfloat16 that saves no bags, as that for float16",
    test="tests/bridge/aten/test_nn.py::test_bags_of_half_types",
)
def _bags(run: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> Any:
    if args[0].dtype is not torch.bfloat16:
        return run(args, kwargs)
    halves = pytree.tree_map_only(torch.Tensor, _as_float16, (args, kwargs))
    result, *saved = run(*halves)
    return result.to(torch.bfloat16), *saved


def _as_float16(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is not torch.bfloat16:
        return tensor
    return new_fake(tensor.fake_mode, tensor.shape, tensor.stride(), torch.float16, tensor.fake_device)


def fake_mode(**options: Any) -> Any:
    """A fake mode whose tensors raise when their address is read, as torch.export's do.

    By default they return 0, or an offset from it, and a kernel unknown to torch (TorchScript's fused ones, Triton's)
    would use it: on a GPU the process loses its context.
    """
    mode = _FakeMode(**options)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def stand_in(value: torch.Tensor, mode: Any) -> torch.Tensor:
    """A fake tensor with the shape, strides, dtype and device of ``value``, in memory of its own."""
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def clear_fake_memo(mode: Any) -> None:
    """Makes a fake mode forget the real tensors behind its fake ones (weak references to them)."""
    converter = mode.fake_tensor_converter.meta_converter
    describer = converter.describer
    for memo in (converter.tensor_memo, converter.storage_memo, describer.lookup_tensor, describer.lookup_storage):
        memo.clear()


_META = torch.device("meta")


def new_fake(mode: Any, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A fake tensor in memory of its own, made past the mode."""
    with no_torch_dispatch():
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device=_META), device)


_subclassed, _no_address = find("torch.Tensor._make_subclass"), find("torch._C._set_throw_on_mutable_data_ptr")


def fake_state(mode: Any, device: torch.device) -> dict[str, Any]:
    """The attributes that the constructor of a fake tensor sets for a device."""
    return dict(vars(new_fake(mode, (), (), torch.float32, device)))


@functools.cache
def _fake_names() -> frozenset[str]:
    return frozenset(fake_state(fake_mode(), HOST))


def attributes_set_on(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes of a plain or fake tensor that code outside of torch's fake mode has set."""
    if type(tensor) is torch.Tensor:
        return vars(tensor)
    if type(tensor) is not FakeTensor:
        return {}
    return {name: value for name, value in vars(tensor).items() if name not in _fake_names()}


def fake_of(plain: torch.Tensor, device: torch.device, state: dict[str, Any]) -> Any:
    """A fake tensor around a meta tensor, made past its constructor, with the attributes of :func:`fake_state`."""
    with no_torch_dispatch():
        made = _subclassed(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device)
    _no_address(made)
    made.__dict__.update(state)
    return made


def meta_tensor(form: Any, base: Any = None) -> torch.Tensor:
    """A meta tensor in the memory of another one or its own; ``form``: its layout and dtype."""
    shape, stride, offset, dtype, _, _, is_conj, is_neg = form
    with no_torch_dispatch(), torch.no_grad():
        if base is None and not offset:
            made = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        else:
            made = torch.empty(0, dtype=dtype, device=_META)
            made.set_((made if base is None else base).untyped_storage(), offset, shape, stride)
        made = made.conj() if is_conj else made
        return neg_view(made) if is_neg else made


def outside_graph(fake: Any) -> Any:
    """A detached fake tensor, made past the mode."""
    with no_torch_dispatch(), torch.no_grad():
        return FakeTensor(fake.fake_mode, fake.detach(), fake.fake_device)


_MODULES: tuple[ModuleType, ...] = find("torch._subclasses"), find("torch._subclasses.fake_tensor")
_CONVERTING = find("torch.nn.modules.module").__file__
"""The file where ``module.to()`` treats modules of fake tensors differently."""


class _NoTensor:
    """Stands for the class of fake tensors."""


@contextmanager
def fake_type_hidden(here: Callable[[], bool]) -> Iterator[None]:
    """While active, code outside of torch finds another class under the name, where ``here()`` holds."""

    class Answering(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if value is not FakeTensor or not here():
                return value
            file = sys._getframe(1).f_code.co_filename
            return _NoTensor if file == _CONVERTING or is_user_file(file) else value

    before = [type(each) for each in _MODULES]
    for each in _MODULES:
        each.__class__ = Answering
    try:
        yield
    finally:
        for each, kind in zip(_MODULES, before, strict=True):
            each.__class__ = kind
