"""Capture: a module's call to a functional ATen graph, checked against a fake run and an eager run."""
