"""Spectrograms for tracing: ``torch.istft`` → a whole operator.

torch asks on its way whether the windows leave a gap between them. The length of the signal is in the sizes.
"""

from __future__ import annotations

import torch

from bridge.base.torch_internals import aten
from bridge.capture.whole_functions import HANDLERS, WholeFunction, define_whole

__all__: list[str] = []


def _signal(input, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex):
    *batch, _, frames = input.shape
    hop_length = n_fft // 4 if hop_length is None else hop_length
    whole = n_fft + hop_length * (frames - 1)
    if length is None:
        length = whole - 2 * (n_fft // 2) if center else whole
    return input.new_empty((*batch, length), dtype=input.dtype if return_complex else input.dtype.to_real())


_istft = define_whole(
    "istft(Tensor input, int n_fft, int? hop_length, int? win_length, Tensor? window, bool center, bool normalized,"
    " bool? onesided, int? length, bool return_complex) -> Tensor",
    WholeFunction(aten.istft.default),
    _signal,
)


def _traced_istft(
    input,
    n_fft,
    hop_length=None,
    win_length=None,
    window=None,
    center=True,
    normalized=False,
    onesided=None,
    length=None,
    return_complex=False,
):
    rest = n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex
    return _istft(input, *rest)


for _function in (torch.istft, torch.Tensor.istft):
    HANDLERS[_function] = _traced_istft
