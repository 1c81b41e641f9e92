"""The CUDA backend: kernels from plans as thread-bound functions, machine code by NVRTC, products by torch."""
