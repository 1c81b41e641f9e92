"""Dispatch: entries, guards and the autograd Function behind a module's call."""
