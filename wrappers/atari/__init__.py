"""ale-py's envs: the outer ring of this room."""
