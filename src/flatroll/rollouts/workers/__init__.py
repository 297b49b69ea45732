"""Collectors whose envs are stepped by several processes."""

from flatroll.rollouts.workers.actors.ray_collector import RayCollector
from flatroll.rollouts.workers.multi_collector import MultiAsyncCollector, MultiCollector, MultiSyncCollector

__all__ = ["MultiAsyncCollector", "MultiCollector", "MultiSyncCollector", "RayCollector"]
