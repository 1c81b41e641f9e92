"""Reference interpreters: Relax functions and ATen graphs on torch, operator by operator."""
