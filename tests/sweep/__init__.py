"""The parity sweep: torch's operator and module samples and tiny HuggingFace models, each against eager.

    python -m tests.sweep --suite opinfo --out sweep.csv --only '^nn.functional'

It lives with the tests because it asserts what they assert, through the same comparison (``tests.bridge.compare``), and
because a part of it is one of them (``tests/bridge/parity/test_sweep_subset.py``); ``benchmarks/`` measures speed.
"""
