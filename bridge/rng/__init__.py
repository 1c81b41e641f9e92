"""Random draws at call time: eager's generator, order and state."""

from bridge.rng.draws import Draws
from bridge.rng.swap import swap_state
from bridge.rng.undo import undo_draws

__all__ = ["Draws", "swap_state", "undo_draws"]
