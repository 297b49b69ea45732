"""Rollouts and collectors: step an env with a policy and return flat batches."""

from flatroll.rollouts.collector import Collector
from flatroll.rollouts.rollout import rollout

__all__ = ["Collector", "rollout"]
