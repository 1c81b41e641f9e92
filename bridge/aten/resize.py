"""Interpolation to another size → library functions."""

from __future__ import annotations

from bridge.aten.channels_last import library_of_images
from bridge.aten.dims import dims
from bridge.aten.registry import converts
from bridge.capture import UPSAMPLES

__all__: list[str] = []


@converts(*(packet.vec for packet in UPSAMPLES))
def upsample_vec(importer, node, x, output_size, *rest):
    """``rest``: align_corners (not for nearest modes), then the scale factors or ``None``."""
    *corners, factors = rest
    extents = importer.out(node).shape[2:]
    return _upsample(importer, node, x, extents, *corners, *(factors or [None] * len(extents)))


@converts(*(packet.default for packet in UPSAMPLES))
def upsample(importer, node, x, output_size, *rest):
    return _upsample(importer, node, x, output_size, *rest)


def _upsample(importer, node, x, extents, *rest):
    mode = UPSAMPLES[node.target.overloadpacket]
    aligned, scales = (False, rest) if mode.startswith("nearest") else (rest[0], rest[1:])
    scales = [float(scale or 0) for scale in (*scales, *[None] * (len(extents) - len(scales)))]
    args = [x, mode, dims(extents), bool(aligned), *scales]
    return library_of_images(importer, "upsample", args, importer.out(node))
