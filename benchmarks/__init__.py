"""Benchmarks of the library: ``python -m flatroll bench`` runs every ``bench_*.py`` here."""
