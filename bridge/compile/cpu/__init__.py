"""The CPU backend: row kernels, column sums, matrix products, random masks, threads."""
