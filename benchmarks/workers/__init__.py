"""Benchmarks of processes that work together."""
