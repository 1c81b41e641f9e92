"""Compile options: everything beside the function that a program depends on, as one frozen value and as a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bridge.artifact import versions
from bridge.compile.backend import Backend

__all__ = ["CompileOptions"]


@dataclass(frozen=True)
class CompileOptions:
    """How functions are compiled; made once per entry by :meth:`current`. Equal keys and equal functions: one program.

    Attributes:
        backend: the target.
        threads: of a kernel at most; the program runs on as many as there are when it is called, but its choices are
            made for this number.
        versions: see :attr:`key`.
        settings: of torch, that the backend's programs depend on.
        deterministic: whether torch's deterministic algorithms are asked for: a backend then measures nothing.
        sums_in_place: whether the order of additions may depend on what else is computed, see
            :mod:`bridge.compile.passes.product_variants`.
        constants: how many of the function's last parameters are the same at each call.
        grad_outs: how many of the function's last parameters are gradients of outputs: what depends on them is in no
            other function, and the way of its products may depend on who reads them.
        given_orders: ``(place, order)`` of parameters that lie in memory as ``permute(order)`` of them would, dense.
        orders: ``(place, order)`` of results that are to lie in memory as ``permute(order)`` of them would: these are
            views of that.
    """

    backend: Backend
    threads: int
    versions: tuple[tuple[str, str], ...]
    sums_in_place: bool = False
    grad_outs: int = 0
    constants: int = 0
    deterministic: bool = False
    settings: tuple[str, ...] = ()
    orders: tuple[tuple[int, tuple[int, ...]], ...] = ()
    given_orders: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def current(cls, backend: Backend) -> CompileOptions:
        """For this process as it is set up now."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        given = {"deterministic": deterministic, "settings": backend.settings()}
        return cls(backend, backend.threads(), versions(), **given)

    @property
    def key(self) -> tuple:
        """Everything a program depends on beside its function, as plain data: backend, threads, versions of torch, TVM
        and our own sources, torch's settings."""
        made_for = self.backend.key, self.threads, self.versions, self.settings
        lie = self.orders, self.given_orders
        return *made_for, self.sums_in_place, self.grad_outs, self.constants, self.deterministic, *lie
