"""The Python state of a module: its tensors and attributes; snapshot, restore, compare."""

from bridge.state.module import (
    ModuleTensor,
    SampleCall,
    Snapshot,
    hooks_of,
    is_own_attribute,
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
    same_inside,
)
from bridge.state.write_counts import dict_behind, dict_versions, write_counter

__all__ = ["ModuleTensor", "SampleCall", "Snapshot", "constant_key", "dict_behind", "dict_of", "dict_versions"]
__all__ += ["generators_put_back", "hooks_of", "is_own_attribute", "kept", "kind_of_container", "module_tensors"]
__all__ += ["moved_generators", "own_attributes", "same", "same_inside", "tensor_problem", "write_counter"]
__all__ += ["written_class"]
