"""Torch internals of CUDA: the state of ``torch.cuda`` and ``torch.backends``, read in a tenth of a microsecond.

cuDNN's recurrent layers: a kind of cell, sizes and directions → its operators' settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bridge.base.torch_internals import find

current_device: Callable[[], int] = find("torch._C._cuda_getDevice", torch.cuda.current_device)
"""The index of this thread's current device."""

current_stream: Callable[[int], int] = find(
    "torch._C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""A device's index → an identifier of this thread's current stream on it."""

empty_strided: Callable[..., torch.Tensor] = find(
    "torch._C._dynamo.guards._empty_strided_cuda",
    lambda *form: torch.empty_strided(*form[:2], dtype=form[2], device=torch.device("cuda", current_device())),
)
"""(shape, strides, dtype) → an uninitialized tensor on the current device."""

reinterpreted: Callable[..., torch.Tensor] = find(
    "torch._C._dynamo.guards._reinterpret_tensor",
    lambda base, shape, strides, offset: base.as_strided(shape, strides, base.storage_offset() + offset),
)
"""(tensor, shape, strides, offset in elements) → a view of the tensor's memory, from its first element on."""

_begin = find("torch._C._cuda_beginAllocateCurrentThreadToPool", None)
_end = find("torch._C._cuda_endAllocateToPool", None)
_release = find("torch._C._cuda_releasePool", None)


class memory_of_pool:
    """While active, this thread allocates on device ``index`` from a pool (its ``id``), as under ``use_mem_pool``."""

    __slots__ = ("_index", "_pool")

    def __init__(self, index: int, pool: tuple[int, int]):
        self._index, self._pool = index, pool

    def __enter__(self) -> None:
        _begin(self._index, self._pool)

    def __exit__(self, *error: object) -> None:
        _end(self._index, self._pool)
        _release(self._index, self._pool)


_precision = find("torch._C._get_fp32_precision_getter")

SETTINGS: dict[str, Callable[[], Any]] = {
    "float32 precision of CUDA products": partial(_precision, "cuda", "matmul"),
    "float32 precision of cuDNN's convolutions": partial(_precision, "cuda", "conv"),
    "float32 precision of cuDNN's recurrent layers": partial(_precision, "cuda", "rnn"),
    "reduced precision of float16 sums": find("torch._C._get_cublas_allow_fp16_reduced_precision_reduction"),
    "reduced precision of bfloat16 sums": find("torch._C._get_cublas_allow_bf16_reduced_precision_reduction"),
    "float16 accumulation": find("torch._C._get_cublas_allow_fp16_accumulation"),
    "cuDNN": find("torch._C._get_cudnn_enabled"),
    "cuDNN's benchmark": find("torch._C._get_cudnn_benchmark"),
    "cuDNN's deterministic algorithms": find("torch._C._get_cudnn_deterministic"),
    "flash attention": find("torch._C._get_flash_sdp_enabled"),
    "efficient attention": find("torch._C._get_mem_efficient_sdp_enabled"),
    "cuDNN's attention": find("torch._C._get_cudnn_sdp_enabled"),
    "attention by formula": find("torch._C._get_math_sdp_enabled"),
    "reduced precision of attention by formula": find("torch._C._get_math_sdp_allow_fp16_bf16_reduction"),
    "order of attention kernels": find("torch._C._get_sdp_priority_order"),
}
"""Settings that torch's CUDA kernels and their choice depend on: name in words → a function that reads it."""

_reads = list(SETTINGS.values())


def read_settings() -> tuple[Any, ...]:
    """The value of each of ``SETTINGS``."""
    return tuple([read() for read in _reads])


def products_are_tf32() -> bool:
    """Whether products of float32 on a GPU may be rounded to TF32 now."""
    return str(_precision("cuda", "matmul")) == "tf32"


attention_may_be_formula: Callable[[], bool] = SETTINGS["attention by formula"]
"""Whether torch may compute attention by its formula now."""


@functools.cache
def memory_of(device: torch.device) -> int | None:
    """Bytes of a CUDA device; ``None`` where it is missing: a host can inspect programs compiled for one."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(device).total_memory


_conv_backend: Callable[..., Any] = find("torch._C._select_conv_backend", lambda *_: None)
_by_cudnn: Any = find("torch._C._ConvBackend.Cudnn", object())


def convolves_by_cudnn(x: torch.Tensor, weight: torch.Tensor, *geometry: Any) -> bool:
    """Whether torch would use cuDNN for a convolution without a bias.

    ``geometry``: stride, padding, dilation, transposed, output padding, groups.
    """
    return _conv_backend(x, weight, None, *geometry) == _by_cudnn


def cudnn_flags() -> tuple[bool, bool, bool]:
    """cuDNN's present flags for convolutions: (measure algorithms, only deterministic ones, allow TF32)."""
    deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return torch.backends.cudnn.benchmark, deterministic, str(_precision("cuda", "conv")) == "tf32"


def recurrent_layers_are_tf32() -> bool:
    """Whether cuDNN's recurrent layers may round float32 to TF32 now."""
    return str(_precision("cuda", "rnn")) == "tf32"


def gpu_features(device: torch.device) -> tuple[Any, ...]:
    """Properties of a GPU and its libraries that torch's kernels and their draws may depend on: plain data."""
    found = torch.cuda.get_device_properties(device)
    sizes = found.multi_processor_count, found.max_threads_per_multi_processor, found.warp_size
    return found.name, found.major, found.minor, *sizes, torch.version.cuda, torch.backends.cudnn.version()


_fused_choice = find("torch._fused_sdp_choice")


def settle_attention_order(device: torch.device) -> None:
    """Makes torch choose an attention kernel on a GPU once, which fixes its order of kernels from then on."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return
    with torch.no_grad():
        one = torch.empty(1, 1, 8, 8, dtype=torch.float16, device=device)
        _fused_choice(one, one, one)


_SAME: tuple[tuple[Any, ...], ...] = (("none", "ieee"),)
"""Equivalent values of a setting."""


def meaning_the_same(value: Any) -> tuple[Any, ...]:
    """A setting's value, then its equivalents."""
    others = [other for same in _SAME if value in same for other in same if other != value]
    return value, *others


_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers of the cell kinds, by the names of torch's operators."""


def settings_of_layers(cell: str, size: int, layers: int, both_ways: bool) -> list[object]:
    """cuDNN's recurrent settings for states of ``size``, from the cell kind on; no dropout, no projections."""
    return [_MODES[cell], size, 0, layers, False, 0.0, True, both_ways, [], None]
