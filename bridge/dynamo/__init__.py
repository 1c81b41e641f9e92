"""The torch.compile backend "tvm_dispatch"."""
