"""Storages: where the rows of a buffer are kept (a list, tensors in memory, files)."""
