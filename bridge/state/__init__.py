"""A module as Python sees it: its tensors, attributes and the names that its code reads; snapshot, restore, compare."""

from bridge.state.attribute_reads import AttributeReads
from bridge.state.code import CodeGuard
from bridge.state.derived import derived_attribute, derived_attributes, renew_derived
from bridge.state.generators import another_iterator, generators_put_back, is_iterator, iterator_parts, moved_generators
from bridge.state.many_contents import ManyContents
from bridge.state.module import hooks_of, own_attributes, written_class
from bridge.state.names import functions_of, with_helpers
from bridge.state.reachable import Contents, Reached
from bridge.state.snapshot import PythonState, Settling
from bridge.state.tensors import ModuleTensor, module_tensors, once_per_owner, tensor_problem
from bridge.state.values import constant_key, kept, kind_of_container, same, same_inside
from bridge.state.write_counts import dict_versions, same_versions

__all__ = [
    "AttributeReads",
    "CodeGuard",
    "Contents",
    "ManyContents",
    "ModuleTensor",
    "PythonState",
    "Reached",
    "Settling",
    "another_iterator",
    "constant_key",
    "derived_attribute",
    "derived_attributes",
    "dict_versions",
    "functions_of",
    "generators_put_back",
    "hooks_of",
    "is_iterator",
    "iterator_parts",
    "kept",
    "kind_of_container",
    "module_tensors",
    "moved_generators",
    "once_per_owner",
    "own_attributes",
    "renew_derived",
    "same",
    "same_inside",
    "same_versions",
    "tensor_problem",
    "with_helpers",
    "written_class",
]
