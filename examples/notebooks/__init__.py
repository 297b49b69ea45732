"""Notebooks as plain text (jupytext): run cell by cell, or `jupytext --to ipynb` makes notebooks of them."""
