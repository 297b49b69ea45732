"""Kernels that copy and mark rows."""
