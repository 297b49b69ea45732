"""Envs of pure JAX functions: the outer ring of this room."""
