"""Compile options: everything a program depends on besides its function, as one frozen value and as a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bridge.artifact import versions
from bridge.compile.backend import Backend

__all__ = ["CompileOptions"]


@dataclass(frozen=True)
class CompileOptions:
    """Settings of one compilation, made once per entry by :meth:`current`. Equal keys and functions: one program.

    Attributes:
        backend: the target.
        threads: a kernel's maximum. A call uses the current number; the program's choices are made for this one.
        versions: see :attr:`key`.
        settings: torch's settings that the backend's programs depend on.
        deterministic: torch's deterministic algorithms are on; the backend then times nothing.
        constants: the number of trailing parameters that are the same at each call.
        grad_outs: the number of trailing parameters that are gradients of outputs. A value that depends on them
            occurs in no other function, so the algorithm of its products may depend on their consumers.
        given_orders: ``(place, order)`` of parameters that are dense in memory after ``permute(order)``.
        orders: ``(place, order)`` of results to be written dense after ``permute(order)``, and returned as views.
    """

    backend: Backend
    threads: int
    versions: tuple[tuple[str, str], ...]
    grad_outs: int = 0
    constants: int = 0
    deterministic: bool = False
    settings: tuple[str, ...] = ()
    orders: tuple[tuple[int, tuple[int, ...]], ...] = ()
    given_orders: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def current(cls, backend: Backend) -> CompileOptions:
        """The options of this process as it is set up now."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        given = {"deterministic": deterministic, "settings": backend.settings()}
        return cls(backend, backend.threads(), versions(), **given)

    @property
    def key(self) -> tuple:
        """Everything a program depends on besides its function, as plain data."""
        made_for = self.backend.key, self.threads, self.versions, self.settings
        lie = self.orders, self.given_orders
        return *made_for, self.grad_outs, self.constants, self.deterministic, *lie
