"""Capture: a module's sample call → a functional ATen graph, from the record of an eager run (``docs/capture.md``)."""

from bridge.capture.applications import apply_opaque, backward_opaque
from bridge.capture.autograd_uses import leads_out
from bridge.capture.captured import Captured, CapturedArguments, CapturedNames
from bridge.capture.counted_dims import sized
from bridge.capture.custom_functions import CUSTOM_GRADIENT, ONCE, OWN, TANGENT, UNKNOWN, WITH_GRADIENT
from bridge.capture.distributed import COLLECTIVE, exchange
from bridge.capture.draws import IsolatedRNG, attends_by_products, with_generator
from bridge.capture.functional import RAN
from bridge.capture.higher_order import ClosedFunction, as_python, has_form
from bridge.capture.kept_state import KeptPlace
from bridge.capture.loops.lengths import LoopedCall, looped_run
from bridge.capture.loops.operators import MARKS as LOOP_MARKS
from bridge.capture.numbers import (
    Counter,
    NotArithmeticError,
    NumberPlace,
    is_number,
    number_tensor,
    with_dynamic_scalars,
)
from bridge.capture.observation import Draw, DropoutOperand, Observation, Output, Parameter, StepMasks
from bridge.capture.opaque_functions import APPLY, BACKWARD
from bridge.capture.packed import PACKED_LAYERS, packed_layers
from bridge.capture.passes.alias_analysis import OVERWRITTEN, PATH, WHERE
from bridge.capture.passes.decompositions import COMPUTED_DRAWS, RECURRENT_LAYERS, SLOPE_DRAWS, UPSAMPLES, WHOLE
from bridge.capture.passes.stop_gradient import PART_OF, STOP_GRADIENT
from bridge.capture.precall_guards import FUNCTIONS, PreCallExpression, shown
from bridge.capture.prepared_twin import copier
from bridge.capture.record_call import RecordedCall, capture, record_call
from bridge.capture.refusals import check_call, device_of_call, uninitialized
from bridge.capture.sample import ALL_COUNTS, LEAST, DynamicDim, after_pre_hooks, dynamic_dims, normalize_sample
from bridge.capture.scalar_guards import ScalarGuard, same_numbers
from bridge.capture.steady_call import in_attempts, loops_tell
from bridge.capture.symbolic_sizes import TensorMetadata
from bridge.capture.thread_isolation import (
    CAPTURES,
    functions_of_torch,
    is_capturing,
    is_traced_here,
    one_capture_at_a_time,
)
from bridge.capture.twin import Twin
from bridge.capture.whole_functions import SHAPES

__all__ = [
    "ALL_COUNTS",
    "CAPTURES",
    "COLLECTIVE",
    "COMPUTED_DRAWS",
    "CUSTOM_GRADIENT",
    "FUNCTIONS",
    "LEAST",
    "LOOP_MARKS",
    "ONCE",
]
__all__ += [
    "OVERWRITTEN",
    "OWN",
    "PACKED_LAYERS",
    "PART_OF",
    "PATH",
    "RAN",
    "RECURRENT_LAYERS",
    "SHAPES",
    "SLOPE_DRAWS",
    "STOP_GRADIENT",
    "TANGENT",
]
__all__ += ["UNKNOWN", "UPSAMPLES", "WHERE", "WHOLE", "WITH_GRADIENT", "Captured", "Counter", "Draw"]
__all__ += ["functions_of_torch", "leads_out"]
__all__ += ["CapturedArguments", "CapturedNames", "ClosedFunction"]
__all__ += ["DropoutOperand", "DynamicDim", "IsolatedRNG", "KeptPlace", "LoopedCall", "NotArithmeticError"]
__all__ += ["NumberPlace", "Observation", "Output", "Parameter", "PreCallExpression", "RecordedCall"]
__all__ += [
    "ScalarGuard",
    "StepMasks",
    "TensorMetadata",
    "Twin",
    "after_pre_hooks",
    "as_python",
    "attends_by_products",
]
__all__ += [
    "capture",
    "check_call",
    "copier",
    "device_of_call",
    "dynamic_dims",
    "has_form",
    "is_capturing",
    "is_number",
]
__all__ += ["is_traced_here", "looped_run", "loops_tell", "normalize_sample", "number_tensor"]
__all__ += ["APPLY", "BACKWARD", "apply_opaque", "backward_opaque", "exchange", "in_attempts", "one_capture_at_a_time"]
__all__ += ["packed_layers", "record_call", "same_numbers", "shown"]
__all__ += ["sized", "uninitialized", "with_dynamic_scalars", "with_generator"]
