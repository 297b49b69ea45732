"""A replay buffer of whole trajectories on disk, and the folders that it reads."""
