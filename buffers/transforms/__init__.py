"""Transforms of batches to store and of samples."""
