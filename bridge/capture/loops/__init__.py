"""Loops in forward, found while it runs: one step of each loop is traced in the place of all."""
