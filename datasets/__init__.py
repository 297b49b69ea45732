"""Offline data sets as replay buffers, and trajectories that are kept on disk."""

__all__: list[str] = []
