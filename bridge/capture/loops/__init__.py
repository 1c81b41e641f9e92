"""Loops in forward, found while it runs: one step of each is traced, and stands for all."""
