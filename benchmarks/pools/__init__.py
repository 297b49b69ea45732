"""Benchmarks of env pools."""
