"""Recorded graphs: launches of a program, recorded once and replayed as one launch, where that is exact and pays."""
