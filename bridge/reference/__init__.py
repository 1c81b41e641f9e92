"""Reference interpreters: Relax functions and ATen graphs on torch, operator by operator."""

from bridge.reference.aten_graph import interpret_graph, needed_nodes, outputs_at, run_graph
from bridge.reference.relax import InterpretedRun, interpret

__all__ = ["InterpretedRun", "interpret", "interpret_graph", "needed_nodes", "outputs_at", "run_graph"]
