"""The boundary table: what libraries do at the edges of episodes, counted in wrong rows or values.

``python -m flatroll bench boundaries`` runs it. A library's author runs one row with NumPy, Gymnasium and the library
alone: ``python -m benchmarks.bench_boundaries --libraries NAME`` in the folder of the repository.
"""
