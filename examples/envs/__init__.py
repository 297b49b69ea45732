"""Wrappers of environments that the example programs use."""
