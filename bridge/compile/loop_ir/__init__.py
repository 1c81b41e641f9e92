"""Loop IR: a graph of point-wise operations, reductions and library calls over strided views."""
