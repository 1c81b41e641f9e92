"""Relax → loop IR, one translation per operator; :func:`translate` is the room's face."""

# Importing these registers their translations.
from bridge.compile.translate import arithmetic, concat, fallback, libcalls, matmul, scan, shapes  # noqa: F401
from bridge.compile.translate.drawn_masks import DrawnMask
from bridge.compile.translate.function import translate
from bridge.compile.translate.registry import TRANSLATIONS

__all__ = ["TRANSLATIONS", "DrawnMask", "translate"]
