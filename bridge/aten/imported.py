"""Imported call: a module's forward as a Relax function, and what its parameters and results are."""

from __future__ import annotations

from dataclasses import dataclass

from autodiff.ir import Function

__all__ = ["Imported"]


@dataclass(frozen=True)
class Imported:
    """A module's forward as a Relax function.

    Attributes:
        function: parameters are the module's tensors, the argument tensors, then ``draw_<k>`` inputs for random draws
            that are no dropout; results are the computed outputs, then the new values of mutated buffers, then the
            generator's state and the place of a broken check, where there are such.
        output_of: for each leaf of the module's result, its index among the function's results, ``None`` if the
            leaf is not computed (a constant, or a view of something that the caller has).
        num_outputs: how many results are outputs; those after them belong to ``Captured.mutated``, in order.
        dropout_draws: eager draw of each ``relax.nn.dropout`` binding, in binding order.
        input_draws: eager draw of each ``draw_<k>`` parameter, in parameter order.
        leaves_state: whether the program draws: then the result after the mutated buffers, uint8, is the state that the
            default generator has after the call.
        checks: conditions on numbers, in words: what is looked at, and what was found. If there are any, the function's
            last result, int64 and 0-d, is the place of the first that does not hold, from 1 on, or 0.
    """

    function: Function
    output_of: tuple[int | None, ...]
    num_outputs: int
    dropout_draws: tuple[int, ...]
    input_draws: tuple[int, ...]
    leaves_state: bool = False
    checks: tuple[tuple[str, str], ...] = ()
