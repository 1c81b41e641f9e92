"""Partitioning: a joint function -> a forward, a backward, and a plan of what is saved between them, and why.

Imports TVM only. The functions exchanged are in the flat form of :mod:`autodiff.ir`.
"""

from .budget import fewest_bytes
from .coloring import RecomputeAll, SaveAll, coloring
from .cost import Cost
from .curve import BUDGETS, Point, curve
from .cut import STRATEGIES, Partitioned, partition
from .graph import Graph, Node, build_graph
from .min_cut import MinCut
from .plan import Plan, Saved, bytes_text
from .scans import differentiable_scans
from .split import rebuild_backward
from .strategy import Choice, Strategy

__all__ = [
    "BUDGETS",
    "STRATEGIES",
    "Choice",
    "Cost",
    "Graph",
    "MinCut",
    "Node",
    "Partitioned",
    "Plan",
    "Point",
    "RecomputeAll",
    "SaveAll",
    "Saved",
    "Strategy",
    "build_graph",
    "bytes_text",
    "coloring",
    "curve",
    "differentiable_scans",
    "fewest_bytes",
    "partition",
    "rebuild_backward",
]
