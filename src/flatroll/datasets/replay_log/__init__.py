"""`ReplayLog`: seeds and actions on disk, from which an env makes the rows again."""
