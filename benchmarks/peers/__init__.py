"""Benchmarks of learning beside stable-baselines3, an optional package."""
