"""Recorded graphs: a program's launches, recorded once and replayed as one launch, where that is exact and pays."""
