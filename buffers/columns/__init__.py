"""Storage columns, which store one entry of all rows: plain, frame stack, zstd, sparse, host block."""
