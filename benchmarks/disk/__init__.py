"""Benchmarks of what is kept on disk."""
