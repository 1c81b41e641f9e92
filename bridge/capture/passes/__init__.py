"""Passes over the traced graph (torch.fx), before it is converted to Relax."""
