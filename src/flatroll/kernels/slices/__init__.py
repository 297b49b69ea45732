"""Compiled kernels of the trajectory index: publishing rows in it, and drawing slices from it."""
