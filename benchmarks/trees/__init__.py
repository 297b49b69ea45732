"""Benchmarks of maps and forests."""
