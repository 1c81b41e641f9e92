"""Random draws at call time: eager's generator, order and state."""

from bridge.rng.draws import Draws
from bridge.rng.undo import go_on, undo_draws

__all__ = ["Draws", "go_on", "undo_draws"]
