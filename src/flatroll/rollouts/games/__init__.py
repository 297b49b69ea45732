"""Collectors for games of several agents: the outer ring of this room."""
