"""Benchmarks of writing to and reading from disk."""
