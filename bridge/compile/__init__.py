"""The compiler: :func:`compile_function` turns a Relax function into a :class:`Program`, a list of instructions."""

from bridge.compile.backend import Backend, Built
from bridge.compile.codegen.philox import IN_A_ROW
from bridge.compile.cpu.backend import host_backend
from bridge.compile.cpu.build import features as host_features
from bridge.compile.cpu.mt19937 import (
    DEGREE,
    DOUBLE,
    FLOAT,
    PER_BLOCK,
    STATE_WORDS,
    WORDS,
    bernoulli_function,
    hold_function,
    swap_function,
)
from bridge.compile.cuda.products import Gpu, gpu_of
from bridge.compile.graphs.control import MODES, Mode, RecordedGraphs
from bridge.compile.graphs.executor import EntryGraphs
from bridge.compile.loop_ir.views import dense_strides
from bridge.compile.options import CompileOptions
from bridge.compile.pipeline import Compilation, compile_function
from bridge.compile.runtime.build import settle
from bridge.compile.runtime.cut import Liveness, Segment, cut
from bridge.compile.runtime.executor import with_constants
from bridge.compile.runtime.instance import evaluator
from bridge.compile.runtime.instructions import CallLibrary, Launch, MakeView, Operation
from bridge.compile.runtime.kernel_store import canonical_text, functions_of
from bridge.compile.runtime.loop_frame import Instruction, RunLoop
from bridge.compile.runtime.program import Program
from bridge.compile.runtime.storage import load as load_program
from bridge.compile.runtime.storage import save as save_program
from bridge.compile.schedule.products import ProductShape
from bridge.compile.signature import KeptFunction, digest_of
from bridge.compile.targets import backend_for
from bridge.compile.translate import DrawnMask

__all__ = ["DEGREE", "DOUBLE", "FLOAT", "IN_A_ROW", "MODES", "PER_BLOCK"]
__all__ += ["STATE_WORDS", "WORDS", "Backend", "Built", "CallLibrary", "Compilation"]
__all__ += ["CompileOptions", "DrawnMask", "EntryGraphs", "Gpu", "Instruction", "KeptFunction", "Launch"]
__all__ += ["Liveness", "MakeView", "Mode", "Operation", "ProductShape", "Program", "RecordedGraphs", "RunLoop"]
__all__ += ["Segment", "backend_for", "bernoulli_function", "canonical_text", "compile_function", "cut"]
__all__ += ["dense_strides", "digest_of", "evaluator", "functions_of", "gpu_of", "hold_function", "host_backend"]
__all__ += ["host_features", "load_program"]
__all__ += ["save_program", "settle", "swap_function", "with_constants"]
