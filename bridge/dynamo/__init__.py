"""The torch.compile backend ``"tvm_dispatch"``: Dynamo's graphs → entries, as for modules."""

from bridge.dynamo.backend import graphs, tvm_dispatch

__all__ = ["graphs", "tvm_dispatch"]
