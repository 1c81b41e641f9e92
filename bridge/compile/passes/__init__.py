"""Passes over the loop IR."""
