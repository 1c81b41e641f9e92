"""Run time: kernels built and linked into a program of steps over one arena."""
