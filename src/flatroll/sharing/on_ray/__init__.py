"""Calls of actors of a Ray cluster: the outer ring of this room."""
