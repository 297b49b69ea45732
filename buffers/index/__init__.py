"""Bookkeeping of stored rows: the ring of slots, and the index of the trajectories in it."""
