"""Samplers: which rows or slices of the buffer a sample holds."""
