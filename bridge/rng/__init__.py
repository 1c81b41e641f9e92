"""Random draws at call time: eager's generators, order and state."""

from bridge.rng.computed import alignment_of, begin_check, checked_gpu, mask_at, recomputed_mask
from bridge.rng.draws import Draws, undo_draws
from bridge.rng.engine import swap_state

__all__ = ["Draws", "alignment_of", "begin_check", "checked_gpu", "mask_at", "recomputed_mask", "swap_state"]
__all__ += ["undo_draws"]
