"""Partitioning: a joint function -> a forward, a backward, and a plan that lists the saved tensors with reasons.

Imports TVM only. The functions exchanged are in the flat form of :mod:`autodiff.ir`.
"""

from partition.budget import fewest_bytes
from partition.cost import Cost
from partition.cut import STRATEGIES, Partitioned, partition, rebuild_backward
from partition.graph import Choice, JointGraph, Node, Strategy, build_graph
from partition.min_cut import BUDGETS, MinCut, Point, curve
from partition.plan import Plan, RecomputeAll, SaveAll, Saved, bytes_text, coloring, columns
from partition.scans import differentiable_scans

__all__ = ["BUDGETS", "STRATEGIES", "Choice", "Cost", "JointGraph", "MinCut", "Node", "Partitioned", "Plan", "Point"]
__all__ += ["RecomputeAll", "SaveAll", "Saved", "Strategy", "build_graph", "bytes_text", "coloring", "columns"]
__all__ += ["curve", "differentiable_scans", "fewest_bytes", "partition", "rebuild_backward"]
