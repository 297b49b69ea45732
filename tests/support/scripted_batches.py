"""Batches of small scripted envs, whose observation is (env, episode, step)."""

from collections import Counter
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

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


class Ops(TorchDispatchMode):
    """Counts torch operations, and refuses those that would wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.made: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} waits for the device"
        self.count[name] += 1
        out = func(*args, **(kwargs or {}))
        view = isinstance(out, torch.Tensor) and any(
            isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
            for a in args
        )
        if isinstance(out, torch.Tensor) and not view:
            self.made[tuple(out.shape), out.dtype] += 1
        return out
