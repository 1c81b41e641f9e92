"""The zoo: tiny models as they are commonly trained, each with a batch and the trained part of its result."""

from tests.sweep.models import experts, pictures, several, spectral, speech, text
from tests.sweep.models.batches import Case

__all__ = ["MODELS", "Case"]

MODELS: dict[str, Case] = {}
for each in (text, pictures, experts, several, spectral, speech):
    MODELS |= each.MODELS
