"""Running stages on their own and holding them against autograd: interpreter, check, reproducer."""
