"""Trees over rows: sums for prioritized draws, a heap for the best rows."""
