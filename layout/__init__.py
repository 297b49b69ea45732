"""What a flat marked batch is: its keys, its one boundary rule, and the tools that show and check it."""

from flatroll.layout.boundaries import run_ends, run_starts

__all__ = ["run_ends", "run_starts"]
