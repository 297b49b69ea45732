"""The one form on disk: segments of rows, versions of everything, and how they survive a crash."""

__all__: list[str] = []
