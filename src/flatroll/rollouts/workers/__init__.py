"""Collectors that step envs in several processes or in actors of a Ray cluster."""

from flatroll.rollouts.workers.multi_collector import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from flatroll.rollouts.workers.on_ray.collector import RayCollector

__all__ = ["MultiAsyncCollector", "MultiCollector", "MultiSyncCollector", "RayCollector"]
