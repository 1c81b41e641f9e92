"""Random draws inside a program: eager's operator, from a generator in eager's state at that place."""

from __future__ import annotations

import json
from typing import Any

import torch

from bridge.base.generators import offset_of, own_at
from bridge.base.tensor_properties import laid_out
from bridge.base.torch_internals import VF, overload_named, schema
from bridge.capture import SLOPE_DRAWS, with_generator
from bridge.library.registry import library_function


@library_function("draw")
def draw(name, description, state, *given):
    """The result of eager's random operator for a generator's state, and the state afterwards."""
    generator = torch.Generator()
    # torch reads the state from the beginning of the tensor's storage
    generator.set_state(state.clone() if state.storage_offset() else state)
    return _drawn(name, description, generator, given), generator.get_state()


@library_function("draw_at_offset")
def draw_at_offset(name, description, advance, state, *parameters):
    """The result of eager's random operator for a GPU generator's seed and offset.

    Raises:
        RuntimeError: the generator does not move by ``advance``: later draws would not be eager's.
    """
    generator = own_at(parameters[0].device, state)
    before = offset_of(generator)
    made = _drawn(name, description, generator, parameters)
    if before is not None and (moved := offset_of(generator) - before) != advance:
        raise RuntimeError(f"{name} moved the generator by {moved}, where eager's moved it by {advance}")
    return made


def _drawn(name, description, generator, given):
    """The result of a random operator on the generator's device.

    Parameters keep eager's dtypes, which decide the bits, also where a check computes everything else in float64.
    """
    operator = overload_named(name)
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    sizes = next((each for each in given if not isinstance(each, torch.Tensor)), ())
    described = json.loads(description, object_hook=lambda value: sizes[value["$size"]] if "$size" in value else value)

    def read(value: Any) -> Any:
        if isinstance(value, dict) and "$tensor" in value:
            return laid_out(tensors[value["$tensor"]].to(getattr(torch, value["dtype"])), value["stride"])
        if isinstance(value, dict):
            return getattr(torch, value["$dtype"])
        return value

    args = [read(value) for value in described["args"]]
    kwargs = {name: read(value) for name, value in described["kwargs"].items() if value is not None}
    missing = sum(not argument.kwarg_only for argument in schema(operator).arguments) - len(args)
    if missing and str(schema(operator).arguments[0].type) == "Tensor" and _fills(operator):
        shape, stride, dtype = described["result"]
        args.insert(0, VF.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=generator.device))
    if operator in SLOPE_DRAWS:
        made = VF.empty_like(args[0], memory_format=torch.contiguous_format)
        operator(args[0], made, *args[1:], generator=generator)
    else:
        made = with_generator(operator)(*args, **kwargs, generator=generator)
    if wide := [tensor.dtype for tensor in tensors if tensor.dtype is torch.float64]:  # a check, see above
        made = made.to(wide[0]) if made.is_floating_point() else made
    return made


def _fills(operator: Any) -> bool:
    """Whether the operator's first tensor is only filled."""
    name = schema(operator).name
    return name.endswith(("_", "_like")) or str(operator) == "aten.bernoulli.p"
