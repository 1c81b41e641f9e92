"""torch's kernels as named functions with attributes: what compiled programs call, and reference interpreters run.

:data:`FUNCTIONS` holds ``library.<name>`` (see :mod:`autodiff.library`) by name; :mod:`bridge.library.outputs` the
kernels that write into given tensors.
"""

# Importing these registers their functions.
from bridge.library import (  # noqa: F401
    attention,
    convolution,
    draws,
    elementwise,
    indexing,
    operators,
    outputs,
    pooling,
    recurrent,
    resize,
    sorting,
)
from bridge.library.registry import FUNCTIONS, NEVER_RAISE, TensorAt, TensorsAt, invoke

__all__ = ["FUNCTIONS", "NEVER_RAISE", "TensorAt", "TensorsAt", "invoke", "outputs"]
