"""Saved bytes, ours and torch's, side by side."""
