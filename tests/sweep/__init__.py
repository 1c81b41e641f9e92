"""The parity sweep: torch's operator and module samples and tiny HuggingFace models, each against eager.

    python -m tests.sweep --suite opinfo --out sweep.csv --only '^nn.functional'

It belongs to the tests because it uses their comparison (``tests.bridge.compare``), and a part of it is a test
(``tests/bridge/parity/test_sweep_subset.py``); ``benchmarks/`` measures speed.
"""
