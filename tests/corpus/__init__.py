"""Frozen corpus: one tree's results of a fixed set of calls, kept on disk, against a later tree's results.

    python -m tests.corpus freeze --out .corpus
    python -m tests.corpus compare --with .corpus

Fuzz and sweep test whether a tree agrees with eager. The corpus tests whether two trees agree with each other: in bits,
in the text of programs, in refusals and in the number of runs of the user's ``forward``. It proves that a refactoring
changes nothing.
"""
