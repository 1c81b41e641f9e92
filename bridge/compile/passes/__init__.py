"""Passes over the loop IR, each a function from graph to graph in a file of its own."""
