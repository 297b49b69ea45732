"""Notebooks as plain text (jupytext): run them cell by cell, or convert them with `jupytext --to ipynb`."""
