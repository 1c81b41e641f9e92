"""Schedule: which nodes share a kernel, its iteration space, and the order of its reductions."""
