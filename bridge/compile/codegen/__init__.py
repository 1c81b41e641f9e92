"""Code generation shared by the backends: emitter, point-wise rules, kernels as TIR."""
