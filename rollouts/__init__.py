"""Rollouts and collectors: env steps in, flat marked batches out."""

from flatroll.rollouts.collector import Collector
from flatroll.rollouts.rollout import rollout

__all__ = ["Collector", "rollout"]
