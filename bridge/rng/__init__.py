"""Random draws at call time: eager's generator, order and state."""
