"""Measurements of the rooms: ``python -m flatroll bench`` runs every ``bench_*.py`` here."""
