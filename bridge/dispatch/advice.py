"""Advice on misses: the guard field that keeps differing → what the user can do about it."""

from __future__ import annotations

__all__ = ["advice"]

_DEFAULT = 'call add_tvm_dispatch(module, sample) in the state of such a call, or give on_miss="compile"'
_KNOWN = (
    ("training flag", "call add_tvm_dispatch in the mode of the loop: module.train() before it, or module.eval()"),
    ("autocast", "call add_tvm_dispatch inside the same torch.autocast(...) as the loop's calls"),
    ("grad mode", "call add_tvm_dispatch under the same grad mode as the loop's calls (torch.no_grad() or not)"),
    ("inference mode", "call add_tvm_dispatch under the same grad mode as the loop's calls"),
    ("requires_grad of", "give a sample whose tensors require grad where the loop's do"),
    ("dtype of", "give a sample of the loop's dtypes"),
    ("shape of", "give a sample of the loop's shapes; pad or bucket lengths that vary (a DataLoader's drop_last=True)"),
    ("attribute", "keep a number that changes in a buffer (a 0-d tensor), whose value may change freely"),
    ("value of argument", "pass a number that changes as a 0-d tensor, whose value may change freely"),
    ("keyword arguments", "give a sample with the keyword arguments of the loop's calls"),
    ("alignment of", "give tensors that begin where torch allocates them: clone() a slice from an odd place"),
    ("frozen", 'give on_miss="compile", or call add_tvm_dispatch(..., freeze=True) again when the module has changed'),
    ("hook on", "register hooks on the dispatched module itself, or dispatch the layers below the hook"),
)
_TRAINER = (
    "HuggingFace's Trainer adds num_items_in_batch to the batch of a model that accepts it: add it to the sample "
    "(a 0-d int64 tensor), or dispatch the layers, not the whole model"
)


def advice(field: str, reason: str) -> str:
    """What helps where calls differ in ``field`` (of :class:`bridge.base.errors.GuardFailure`)."""
    if "num_items_in_batch" in reason:
        return _TRAINER
    return next((words for start, words in _KNOWN if field.startswith(start)), _DEFAULT)
