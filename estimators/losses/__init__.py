"""Losses over flat batches: PPO, A2C, REINFORCE, DQN, SAC, and their target networks."""
