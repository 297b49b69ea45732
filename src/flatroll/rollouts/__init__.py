"""Rollouts and collectors: step an env with a policy and return flat batches."""

from flatroll.rollouts.batch_columns import batch_spec
from flatroll.rollouts.collector import Collector
from flatroll.rollouts.evaluate import (
    Estimate,
    Evaluation,
    Evaluator,
    bootstrap_mean,
    evaluate,
    interquartile_mean,
)
from flatroll.rollouts.games.groups import GroupCollector
from flatroll.rollouts.random_actions import RandomPolicy
from flatroll.rollouts.rollout import check_env_specs, rollout
from flatroll.rollouts.workers import MultiAsyncCollector, MultiCollector, MultiSyncCollector, RayCollector

#: Older alias.
SyncDataCollector = Collector

__all__ = [
    "Collector",
    "Estimate",
    "Evaluation",
    "Evaluator",
    "GroupCollector",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "RandomPolicy",
    "RayCollector",
    "SyncDataCollector",
    "batch_spec",
    "bootstrap_mean",
    "check_env_specs",
    "evaluate",
    "interquartile_mean",
    "rollout",
]
