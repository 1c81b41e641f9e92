"""Machinery: code of torch, Python and this package whose reads do not count as forward's.

Functions among it that return the user's state are called again by the guard instead.
"""

from __future__ import annotations

import os
import weakref
from types import CodeType, FunctionType
from typing import Any

from bridge.base.errors import TORCH_DIR, is_pythons_file
from bridge.base.torch_internals import COMPILING

__all__ = ["ASKED_PYTHON", "CALLED", "CALLING", "CHANGING_PYTHON", "LOOKING", "OWN"]
__all__ += ["in_its_place", "is_in_its_place", "is_library", "is_machinery", "reads_as_forward"]

OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCHS = """
_ops.py overrides.py library.py _library _subclasses fx _prims _prims_common _refs _decomp _meta_registrations.py
_guards.py _higher_order_ops _functorch _dispatch _jit_internal.py _logging utils/_python_dispatch.py
utils/_pytree.py utils/_contextlib.py utils/_device.py utils/_cxx_pytree.py utils/_stats.py _compile.py _dynamo
_inductor _C autograd jit _export export nn/modules/module.py _classes.py _vmap_internals.py package
distributed/tensor/_ distributed/tensor/placement_types.py _weights_only_unpickler.py
""".split()
LIBRARY = os.path.dirname(os.__file__) + os.sep
_PYTHONS = "logging warnings.py tempfile.py importlib abc.py typing.py re/ sre_".split()
_PYTHONS += "inspect.py linecache.py traceback.py tokenize".split()
_PROCESSES = "util.py context.py synchronize.py process.py popen resource".split()
_PYTHONS += [f"multiprocessing/{each}" for each in _PROCESSES]
_CALLED = "utils/_config_module.py utils/weak.py hub.py storage.py distributed/device_mesh.py"
_CALLED += " distributed/distributed_c10d.py"
CALLED = tuple(os.path.join(TORCH_DIR, each) for each in _CALLED.split())
"""Files of torch that are machinery where machinery calls them, as Python's library is."""
CALLING = tuple(
    os.path.join(TORCH_DIR, each)
    for each in ("nn/modules/module.py", "autograd", "utils/_contextlib.py", "utils/_py", "distributed/tensor/_api.py")
)
"""Files of torch's machinery that call the user's functions."""
_UNREAD = (
    *(os.path.join(TORCH_DIR, each) for each in _TORCHS),
    *(LIBRARY + each for each in _PYTHONS),
    OWN,
    "<frozen importlib",
    "<frozen abc>",
    "<frozen zipimport",
)
_ASKED_PYTHON = {
    "logging/__init__.py": "isEnabledFor getEffectiveLevel hasHandlers getLevelName",
    "multiprocessing/context.py": "get_start_method",
    "multiprocessing/synchronize.py": "is_set get_value",
    "importlib/util.py": "find_spec",
    "linecache.py": "getline getlines",
    "tempfile.py": "gettempdir gettempdirb gettempprefix gettempprefixb",
    "threading.py": "current_thread main_thread active_count get_ident is_set",
}
_IN_FILES = {(LIBRARY + file, name) for file, names in _ASKED_PYTHON.items() for name in names.split()}
ASKED_PYTHON = frozenset(_IN_FILES | {("<frozen importlib.util>", "find_spec")})
LOOKING = (LIBRARY + "inspect.py", LIBRARY + "typing.py")
"""Files whose functions look into their arguments."""

_CHANGING = {
    "logging/__init__.py": """
        addHandler removeHandler setLevel addFilter removeFilter disable basicConfig captureWarnings
    """,
    "multiprocessing/synchronize.py": "set clear notify notify_all wait",
}
CHANGING_PYTHON = frozenset((LIBRARY + file, name) for file, names in _CHANGING.items() for name in names.split())
_PACKAGES = tuple(os.sep + each + os.sep for each in ("tqdm", "triton", "filelock", os.path.join("tvm", "script")))
"""Packages that torch's machinery calls: progress bars, the kernel compiler, file locks, and TVM's replacement of
``inspect.getfile``."""
_WARNS_ONCE = os.path.join(TORCH_DIR, "nn", "attention", "flex_attention.py")
"""A file of torch's that keeps the names of its past warnings in a set."""
_REFERENCES = ("weakref.py", "_weakrefset.py")
"""Files of weak references' callbacks, which run whenever an object dies."""
_FINALIZERS = frozenset(each.__code__ for each in vars(weakref.finalize).values() if isinstance(each, FunctionType))


def is_library(filename: str) -> bool:
    """Whether a file is Python's own or torch's."""
    return filename.startswith(TORCH_DIR) or is_pythons_file(filename)


_IN_ITS_PLACE = "bridge: runs in the place of a function that forward calls"
_READS = "bridge: runs in the place of a forward, and its reads count"


def in_its_place(function: Any) -> Any:
    """Decorator: marks a wrapper of this package around a function that forward calls, in the constants of its code."""
    return _marked(function, _IN_ITS_PLACE)


def reads_as_forward(function: Any) -> Any:
    """Marks a function of this package that stands for a layer's forward: its reads count as forward's."""
    return _marked(function, _READS)


def _marked(function: Any, mark: str) -> Any:
    code = function.__code__
    function.__code__ = code.replace(co_consts=(*code.co_consts, mark))
    return function


def is_in_its_place(code: CodeType) -> bool:
    """Whether code is of a wrapper that :func:`in_its_place` has marked."""
    return code.co_consts[-1:] == (_IN_ITS_PLACE,)


def is_machinery(code: CodeType, namespace: dict[str, Any]) -> bool:
    """Whether a function's reads do not count as forward's; ``namespace``: its globals."""
    if code.co_consts[-1:] == (_READS,):
        return False
    if (
        any(each in code.co_filename for each in _PACKAGES)
        or code in _FINALIZERS
        or code in COMPILING
        or (code.co_name == "_warn_once" and code.co_filename == _WARNS_ONCE)
        or (code.co_name in ("_remove", "remove") and code.co_filename.endswith(_REFERENCES))
    ):
        return True
    return code.co_filename.startswith(_UNREAD) or str(namespace.get("__name__")).startswith("bridge.")
