"""Benchmarks of text rollouts."""
