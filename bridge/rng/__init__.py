"""Random draws at call time: eager's generator, order and state."""

from bridge.rng.draws import Draws

__all__ = ["Draws"]
