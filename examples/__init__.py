"""Complete, readable training programs; ``python -m flatroll demo`` runs the recurrent PPO."""
