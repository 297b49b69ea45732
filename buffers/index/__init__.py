"""Row numbers: the ring, the fragments of trajectories in it, and the trajectory index over them."""
