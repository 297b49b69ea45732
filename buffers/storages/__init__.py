"""Storages, which hold the rows of a buffer in a list, in tensors in memory, or in files."""
