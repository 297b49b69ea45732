"""Batches of small scripted envs, whose observation is (env, episode, step)."""

from typing import Any

import torch
from tensordict import TensorDict

from flatroll.rollouts import Collector
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv

LENGTHS = [[3, 1, 4], [2, 5], [6]]
IDS = ("collector", "traj_ids")


def make(which: str = "SameStep", **options: Any) -> Any:
    """Create three scripted envs: with torch, or with NumPy and this autoreset mode."""
    own = Script(3, **{"lengths": LENGTHS, **options})
    return ScriptedTorchEnv(own) if which == "torch" else ScriptedVectorEnv(own, autoreset_mode=which)


def collect(env: Any, frames: int, policy: Any = None, **options: Any) -> tuple[TensorDict, TensorDict]:
    """Collect one batch; with the observations that no row of a compact batch holds."""
    collector = Collector(env, policy, frames_per_batch=frames, seed=0, **options)
    return next(collector), collector.final


def true_next(batch: TensorDict) -> Any:
    """Return what follows the observations of scripted envs."""
    return batch["observation"] + torch.tensor([0.0, 0.0, 1.0])
