"""Examples that save and resume."""
