"""Running stages on their own and holding them against autograd: interpreter, check, reproducer."""

from bridge.verify.check import Check, check
from bridge.verify.inputs import stage_inputs
from bridge.verify.repro import save_repro

__all__ = ["Check", "check", "save_repro", "stage_inputs"]
