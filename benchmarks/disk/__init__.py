"""Benchmarks of rows on disk."""
