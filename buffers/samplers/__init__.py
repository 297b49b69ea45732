"""Samplers: they choose which rows or slices of the buffer a sample contains."""
