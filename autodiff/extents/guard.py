"""Guard: what was concluded about sizes from the sample, as a condition on them that prints."""

from __future__ import annotations

from dataclasses import dataclass

from autodiff.extents.polynomial import Symbol, Terms, symbols_of, text

__all__ = ["SizeGuard"]


@dataclass(frozen=True)
class SizeGuard:
    """``terms >= 0``, ``terms == 0`` or ``terms != 0``.

    Attributes:
        relation: ``">="``, ``"=="`` or ``"!="``.
    """

    terms: Terms
    relation: str

    def __str__(self) -> str:
        positive = [(monomial, factor) for monomial, factor in self.terms if factor > 0]
        negative = [(monomial, -factor) for monomial, factor in self.terms if factor < 0]
        return f"{text(tuple(positive))} {self.relation} {text(tuple(negative))}"

    def holds(self, value: int) -> bool:
        """Whether it holds where its terms have this value."""
        return value >= 0 if self.relation == ">=" else (value == 0) == (self.relation == "==")

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The symbols that it speaks of."""
        return symbols_of(self.terms)
