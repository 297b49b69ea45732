"""Saves the state of envs in the middle of an episode, and restores it."""
