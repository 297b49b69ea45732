"""Clocks, memory counters and tables that the benchmarks share."""
