"""Operator classes of the cost model: the table of :mod:`autodiff.ops` -> the sets of names that the costs use.

An operator in none of these sets must be saved.
"""

from __future__ import annotations

from autodiff.ops import having

#: Expressions that only name something: an alias, a tuple, a constant.
TRIVIAL = frozenset({"Var", "DataflowVar", "Tuple", "TupleGetItem", "Constant", "GenericConst", "ShapeExpr"})

RANDOM = having("random")
VIEWS = having("view")
SLICES = having("slice")
CREATION = having("creation")
TRANSCENDENTAL = having("transcendental")
ROW = having("row")
PRODUCTS = having("product")
REDUCTIONS = having("reduction")

#: Library functions that read each element of their result once and compute next to nothing, or are point-wise.
CHEAP_LIBRARY = frozenset(name for name in having("cheap") | having("transcendental") if name.startswith("library."))
CHEAP = having("cheap") - CHEAP_LIBRARY
