"""torch's kernels as named functions with attributes, for compiled programs and reference interpreters.

:data:`FUNCTIONS` holds ``library.<name>`` (see :mod:`autodiff.library`) by name: functions that return new tensors.
:data:`OUT_KERNELS` holds kernels that write into given tensors (:mod:`bridge.library.operators`). No name is in both.
"""

# Importing these registers their functions and kernels.
from bridge.library import attention, convolution, draws, indexing, operators, recurrent  # noqa: F401
from bridge.library.operators import waits_for_the_device
from bridge.library.registry import (
    ALIGNMENT,
    DRAWS,
    DRAWS_AT_OFFSET,
    FUNCTIONS,
    INTO_GIVEN,
    NEVER_RAISE,
    OUT_FUNCTIONS,
    OUT_KERNELS,
    REDRAWS,
    TensorAt,
    TensorsAt,
    dense,
    invoke,
    invoke_into,
)

__all__ = ["ALIGNMENT", "DRAWS", "DRAWS_AT_OFFSET", "FUNCTIONS", "INTO_GIVEN", "NEVER_RAISE", "OUT_FUNCTIONS"]
__all__ += ["OUT_KERNELS", "REDRAWS", "TensorAt", "TensorsAt", "dense", "invoke", "invoke_into", "waits_for_the_device"]
