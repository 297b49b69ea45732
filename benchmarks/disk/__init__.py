"""Benchmarks of what goes to disk and comes back."""
