"""Samplers, which choose the rows or slices of a sample."""
