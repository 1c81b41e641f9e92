"""A module as Python sees it: its tensors, attributes and the names that its code reads; snapshot, restore, compare."""
