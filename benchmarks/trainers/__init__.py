"""Benchmarks of what other libraries' trainers get from flatroll."""
