"""cuDNN's recurrent layers: a kind of cell, sizes and directions → what its operators are told."""

from __future__ import annotations

__all__ = ["settings_of_layers"]

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers of the kinds of cells, by the names of torch's operators."""


def settings_of_layers(cell: str, size: int, layers: int, both_ways: bool) -> list[object]:
    """What both of cuDNN's operators are told, from the kind of cell on: training, without dropout and projections.

    Args:
        size: elements of a state.
    """
    return [_MODES[cell], size, 0, layers, False, 0.0, True, both_ways, [], None]
