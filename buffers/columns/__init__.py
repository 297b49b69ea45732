"""Storage columns: the ways to store one entry of all rows (plain, frame stack, zstd, sparse, host block)."""
