"""Check of a GPU's masks: masks by the kernels of this package and by eager, bit for bit, once per device and process.

Which numbers eager's dropout takes is no documented rule of torch's: it depends on the kernel, the GPU's size and how
elements are loaded. A GPU, or a torch, that draws otherwise has its masks drawn by torch.
"""

from __future__ import annotations

import functools
import math

import torch
from tvm import relax

from bridge.base.generators import default_generator, on_side_states
from bridge.base.log import channel
from bridge.compile import IN_A_ROW, Compilation, CompileOptions, DrawnMask, Gpu, backend_for, gpu_of
from bridge.rng.computed import mask_of_attention

__all__ = ["begin_check", "checked_gpu"]

log = channel("philox")

_SEED = 0x9E3779B97F4A7C15
_RATE = 0.3
_CASES = (
    (torch.float32, 4, 0),
    (torch.float16, 8, 0),
    (torch.bfloat16, 8, 0),
    (torch.float32, 2, 0),
    (torch.bfloat16, 1, 0),
    (torch.float32, 2, 2),
    (torch.float16, 4, 4),
)
"""Type, elements that a thread loads at once, first element of the tensor in its memory."""
_ATTENTIONS = ((2, 3, 37, 45), (1, 2, 130, 200))
"""Weights of attention: whole blocks of its kernel and parts of them; rows that begin anywhere in a call's four."""


_BEGUN: dict[torch.device, Compilation | None] = {}
"""The check's program on its way; ``None`` behind the check."""


def begin_check(device: torch.device) -> None:
    """Begins to compile what :func:`checked_gpu` runs, in the background, if nobody has: it will be asked soon."""
    if device not in _BEGUN:
        _BEGUN[device] = begun = _compilation(device)
        begun.finish()


@functools.cache
def checked_gpu(device: torch.device) -> Gpu | None:
    """A GPU's size if it draws its masks as kernels compute them; ``None`` if not, which is logged."""
    gpu = gpu_of(device)
    if _draws_alike(device, gpu):
        return gpu
    log.warning(
        "torch %s draws dropout masks by a rule of its own on %s; masks are left to it and stored",
        torch.__version__,
        torch.cuda.get_device_name(device),
    )
    return None


def _draws_alike(device: torch.device, gpu: Gpu) -> bool:
    """Masks and the generator's offset, over several launches of several rounds, from a seed of 64 bits."""
    counts = [_count(gpu, width, place) for place, (_, width, _) in enumerate(_CASES)]
    states, masks = [], []
    generator = default_generator(device)
    with on_side_states(generator, _side(device)), torch.no_grad():
        for (dtype, _, first), count in zip(_CASES, counts, strict=True):
            offset = generator.get_offset()
            states.append((_SEED, offset))
            dropped = torch.empty(count + first, dtype=dtype, device=device)[first:]
            masks.append(torch.native_dropout(dropped, _RATE, True)[1])
            if generator.get_offset() != offset + gpu.advance(count):
                return False
        for shape in _ATTENTIONS:
            offset = generator.get_offset()
            states.append((_SEED, offset))
            masks.append(mask_of_attention(shape, _RATE, device).flatten())
            if generator.get_offset() != offset + -(-math.prod(shape) // 4) * 4:
                return False
    compilation = _BEGUN.get(device) or _compilation(device)
    program = compilation.finish()
    _BEGUN[device] = None
    given = torch.tensor(states, dtype=torch.uint64)
    made = [mask.logical_not() for mask in program(list(given.unbind()))]
    compilation.keep()
    return all(map(torch.equal, made, masks))


def _side(device: torch.device) -> torch.Generator:
    side = torch.Generator(device).manual_seed(_SEED)
    side.set_offset(2**34 - 4)  # calls are counted beyond 32 bits
    return side


def _count(gpu: Gpu, width: int, place: int) -> int:
    """Elements of which a thread loads ``width`` at once, and no more: two rounds of all threads, or a part of one."""
    rounds = 2 * gpu.most_threads * max(width, 4) if place % 2 else 1000 * width
    return rounds + (width if width < 8 else 0)


def _compilation(device: torch.device) -> Compilation:
    """States → masks of all cases, as kernels compute them."""
    gpu = gpu_of(device)
    widths = [width for _, width, _ in _CASES] + [IN_A_ROW] * len(_ATTENTIONS)
    counts = [_count(gpu, width, place) for place, (_, width, _) in enumerate(_CASES)]
    counts += map(math.prod, _ATTENTIONS)
    params = [relax.Var(f"mask_{place}", relax.TensorType((count,), "bool")) for place, count in enumerate(counts)]
    builder = relax.BlockBuilder()
    with builder.function("masks", params):
        with builder.dataflow():
            results = [builder.emit_output(relax.op.logical_not(param)) for param in params]
        builder.emit_func_output(relax.Tuple(results))
    drawn = {
        place: DrawnMask(_RATE, width, gpu.launched(count))
        for place, (width, count) in enumerate(zip(widths, counts, strict=True))
    }
    options = CompileOptions.current(backend_for(device))
    return Compilation(builder.get()["masks"], "masks", options, drawn)
