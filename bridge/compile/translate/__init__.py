"""Relax → loop IR, one translation per operator; :func:`translate` is the package's entry point."""

# Importing these registers their translations.
from bridge.compile.translate import arithmetic, libcalls, shapes  # noqa: F401
from bridge.compile.translate.builder import TRANSLATIONS
from bridge.compile.translate.function import translate
from bridge.compile.translate.shapes import DrawnMask

__all__ = ["TRANSLATIONS", "DrawnMask", "translate"]
