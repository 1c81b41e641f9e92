"""Special points: every supported operator at zeros, ties, infinities, nan, subnormals and overflow, beside eager."""
