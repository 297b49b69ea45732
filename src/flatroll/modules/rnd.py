"""`RND`: random network distillation, a reward for observations that are new."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from flatroll.layout.checks import check_number, check_sizes, check_whole_number
from flatroll.layout.final import next_entry
from flatroll.layout.keys import ENV, MASK, NestedKey, next_key, optional_marker, require
from flatroll.modules.by_space import Encoder, SpacedEnv, observed_spaces
from flatroll.modules.reward_scale import RewardScale
from flatroll.modules.running_norm import RunningNorm, update_norms


class RND(TensorDictModuleBase):
    """Random network distillation: rewards next observations that a network cannot predict yet.

    A *target* network with random weights, which never change, gives features of an observation; a *predictor* learns
    to give the same. Its error is large where observations are new:

    ``error[t] = mean((predictor(x) - target(x)) ** 2)``, with ``x = clip((next_obs[t] - mean) / std)``, and
    ``intrinsic_reward[t] = error[t] / std(R)``, with ``R[t] = gamma * R[t - 1] + error[t]`` over an env's steps.

    All statistics are running ones. Call :meth:`update` with each collected batch; it counts and writes the rewards.
    Add :meth:`loss` to the losses of each minibatch. Train a value head of its own on this reward, whose return does
    not end with an episode: ``GAE(..., episodic=False)``.

    Args:
        env: its observation space says what the networks read; it is not stepped.
        in_keys: the entries of a Dict observation to read, as for `flatroll.modules.actor`. Default: all.
        target, predictor: modules from these entries, ``[*B, *shape]`` each, to features ``[*B, F]``. Default: an MLP
            (a CNN for images) with ReLU; the predictor has one layer more.
        hidden: sizes of the target's layers; the last one is F. Default: ``(64, 64)``.
        out_key: of the reward, under ``"next"``. Default: ``"intrinsic_reward"``.
        gamma: discount in [0, 1] of ``R``, that of the intrinsic return. Default: 0.99.
        proportion: share of the rows, in (0, 1], that :meth:`loss` uses. With very many envs, a smaller one keeps the
            predictor from learning too fast. Default: 1.
        clip: limit of the absolute normalised numbers. Default: 5.

    Numbers of a Box, images of bytes included, are normalised each on its own; entries with choices (Discrete,
    MultiDiscrete) are one-hot vectors. Where a next observation is not known (hidden by the env, or NaN), the row's own
    takes its place.

    Raises:
        ValueError: a number out of range, or see `flatroll.modules.actor`.
        KeyError: when called: the batch has no next observations, and no ``final`` came with it; :meth:`update`: rows
            do not name their env (``Collector(track_envs=True)``).

    References:
        Y. Burda et al., Exploration by random network distillation, https://arxiv.org/abs/1810.12894

    >>> import gymnasium as gym
    >>> from flatroll.rollouts import Collector
    >>> env = gym.make_vec("CartPole-v1", num_envs=4)
    >>> rnd = RND(env)
    >>> batch = next(Collector(env, None, frames_per_batch=64, track_envs=True, seed=0))
    >>> reward = rnd.update(batch)["next", "intrinsic_reward"]
    >>> reward.shape, bool((reward > 0).all()), rnd.loss(batch).shape
    (torch.Size([64, 1]), True, torch.Size([]))
    """

    def __init__(
        self,
        env: SpacedEnv,
        *,
        in_keys: Sequence[NestedKey] | None = None,
        target: nn.Module | None = None,
        predictor: nn.Module | None = None,
        hidden: Sequence[int] = (64, 64),
        out_key: NestedKey = "intrinsic_reward",
        gamma: float = 0.99,
        proportion: float = 1.0,
        clip: float = 5.0,
    ) -> None:
        super().__init__()
        self.proportion = float(check_number("proportion", proportion, above=0, most=1))
        sizes = [check_whole_number("hidden", size) for size in check_sizes("hidden", hidden)]
        check_whole_number("the number of sizes in hidden", len(sizes))

        # Numbers are normalised, choices are not.
        seen = observed_spaces(env, in_keys)
        boxes = {
            key: spaces.Box(-np.inf, np.inf, x.shape) for key, x in seen.items() if isinstance(x, spaces.Box)
        }
        made: Any = {"clip": clip, "integers": True}
        self.norms = nn.ModuleList(RunningNorm(k, shape=x.shape, out_key=k, **made) for k, x in boxes.items())
        self.scale = RewardScale(gamma, clip=None, episodic=False, in_key=out_key)

        entries = [boxes.get(key, space) for key, space in seen.items()]
        self.target = target if target is not None else _features(entries, sizes)
        self.predictor = predictor if predictor is not None else _features(entries, [*sizes, sizes[-1]])
        self.target.requires_grad_(False)

        self.observed = list(seen)
        self.in_keys: list[Any] = [next_key(key) for key in seen]
        self.out_keys: list[Any] = [self.scale.in_key]

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase, *, final: TensorDictBase | None = None) -> TensorDictBase:
        """Write the intrinsic reward into rows ``[*B]``, with the statistics as they are; return them.

        Args:
            tensordict: the rows, a sample of a replay buffer, for example.
            final: what came with a compact batch (``collector.final``).
        """
        return tensordict.set(self.scale.in_key, self.scale.scaled(self.error(tensordict, final=final)))

    @torch.no_grad()
    def update(self, batch: TensorDictBase, *, final: TensorDictBase | None = None) -> TensorDictBase:
        """Count a collected batch, each observation once, and do what :meth:`forward` does; return the batch.

        Call it with every batch, in the order in which they were collected. After ``eval()`` nothing is counted.

        Args:
            batch: rows ``[N]`` as a collector yields them.
            final: see :meth:`forward`.
        """
        require(batch, ENV)
        update_norms(self.norms, batch, final=final)
        error = self.error(batch, final=final)
        self.scale.update(batch.clone(recurse=False).set(self.scale.in_key, error))
        return batch.set(self.scale.in_key, self.scale.scaled(error))

    def error(self, batch: TensorDictBase, *, final: TensorDictBase | None = None) -> Tensor:
        """Return the predictor's mean squared error at the next observations of rows ``[*B]``: ``[*B, 1]``."""
        after = TensorDict({key: next_entry(batch, key, final) for key in self.observed}, batch.batch_size)
        for norm in self.norms:
            norm(after)
        entries = [after.get(key) for key in self.observed]
        error: Tensor = self.predictor(*entries) - self.target(*entries)
        return error.square().mean(-1, keepdim=True)

    def loss(self, batch: TensorDictBase, *, final: TensorDictBase | None = None) -> Tensor:
        """Return the mean error over a random ``proportion`` of the rows ``[*B]``, a number, for the predictor.

        Args:
            batch: rows with next observations, in any order.
            final: see :meth:`forward`.
        """
        error = self.error(batch, final=final).squeeze(-1)
        used = torch.rand_like(error) < self.proportion
        real = optional_marker(batch, MASK)
        if real is not None:
            used = used & real
        return (error * used).sum() / used.sum().clamp(min=1)


def _features(entries: list[Any], sizes: list[int]) -> Encoder:
    """Return a network of an observation's entries, with orthogonal weights and a linear last layer."""
    network = Encoder(entries, sizes, nn.ReLU)
    del network.layers[-1]
    return network
