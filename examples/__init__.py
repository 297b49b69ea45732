"""Readable programs over the rooms; ``python -m flatroll demo`` runs the first of them."""
