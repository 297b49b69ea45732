"""Shared tools of the benchmarks: timing, memory and tables."""
