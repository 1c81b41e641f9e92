"""Verification of the lowering's stages against autograd: check, stage inputs, reproducer."""

from bridge.verify.check import Check, check
from bridge.verify.inputs import stage_inputs
from bridge.verify.repro import save_repro

__all__ = ["Check", "check", "save_repro", "stage_inputs"]
