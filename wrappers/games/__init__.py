"""Games of several agents: the outer ring of this room."""
