"""The published sets: where their files come from, and how rows are made of them."""
