"""The frozen corpus: what a tree makes of a fixed set of calls, kept on disk, against what a later tree makes of them.

    python -m tests.corpus freeze --out .corpus
    python -m tests.corpus compare --with .corpus

Fuzz and sweep say whether a tree agrees with eager. The corpus says whether two trees agree with each other: in bits,
in the text of programs, in refusals and in how often the user's ``forward`` runs. It is the proof that a refactoring
changes nothing.
"""
