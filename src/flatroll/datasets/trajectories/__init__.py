"""Whole trajectories in a folder: the replay buffer that keeps them, and the folders it reads."""
