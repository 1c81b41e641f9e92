"""Foundations: errors, logs, locks, threads, pytrees, and torch's internals; imports no other package of ``bridge``."""
