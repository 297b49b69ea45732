"""Transforms that change batches on their way into a buffer and samples on their way out."""
