"""Storage columns: the forms in which one tensor of each row is kept (plain, frame stack, zstd, sparse, host block)."""
