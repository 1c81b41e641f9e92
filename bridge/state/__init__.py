"""The Python state of a module: its tensors and attributes; comparison of values."""

from bridge.state.module import (
    ModuleTensor,
    SampleCall,
    hooks_of,
    is_own_attribute,
    is_renewed,
    module_tensors,
    own_attributes,
    tensor_problem,
    written_class,
)
from bridge.state.values import (
    constant_key,
    dict_of,
    generators_put_back,
    kept,
    kind_of_container,
    moved_generators,
    same,
)
from bridge.state.write_counts import dict_behind, dict_versions, write_counter

__all__ = ["ModuleTensor", "SampleCall", "constant_key", "dict_behind", "dict_of", "dict_versions"]
__all__ += ["generators_put_back", "hooks_of", "is_own_attribute", "is_renewed", "kept", "kind_of_container"]
__all__ += ["module_tensors", "moved_generators", "own_attributes", "same", "tensor_problem"]
__all__ += ["write_counter", "written_class"]
