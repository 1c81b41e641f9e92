"""Lowering: the pipeline's stages as data, their origins, and their reuse by equal calls."""
