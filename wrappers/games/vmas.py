"""The adapter for VMAS: batched multi-agent games in torch that return a list with one tensor per agent."""

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor
from typing_extensions import override

from flatroll.wrappers.arrays import Array, Tree, map_tree
from flatroll.wrappers.families import Family, Request
from flatroll.wrappers.source import Capabilities, Info, Seed, Step, VectorSource, is_from


class VmasSource(VectorSource):
    """A VMAS ``Environment``, with one row per agent and game, in torch on its device.

    Created by `as_vector_env`. Row ``g * A + a`` is agent ``a`` of game ``g``; batches have the columns of
    `PettingZooSource`. VMAS does not reset games itself: this adapter resets ended games in the same step, one by one
    (``reset_at``), and keeps their last observations.

    Args:
        env: the result of ``vmas.make_env(..., terminated_truncated=True)``, without a wrapper.

    Raises:
        ValueError: the agents' spaces differ, or ``max_steps`` is set without ``terminated_truncated``.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, env: Any) -> None:
        self._agent_names = [agent.name for agent in env.agents]
        agents = len(self._agent_names)
        if env.max_steps is not None and not env.terminated_truncated:
            raise ValueError(
                f"max_steps={env.max_steps} makes VMAS report time limits as done, like terminations: make the env "
                "with terminated_truncated=True"
            )

        observation, action = (
            _shared_space(kind, getattr(env, f"{kind}_space"), self._agent_names)
            for kind in ("observation", "action")
        )

        device = torch.device(env.device)
        super().__init__(
            env, env.num_envs * agents, observation, action, Capabilities(device, "torch", exact_flags=True)
        )

        games = np.arange(env.num_envs)
        self.agents = np.tile(np.arange(agents), len(games)), np.repeat(games, agents)

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        if isinstance(seed, list):
            raise ValueError(f"seed must be one number, with which VMAS seeds all games, got {seed}")
        if rows is None:
            return self._rows(self.env.reset(seed=seed)), {}

        of_game = rows.view(self.env.num_envs, -1)
        if bool((of_game.any(1) != of_game.all(1)).any()):
            raise ValueError(
                "options['reset_mask'] must have all agents of a game or none: a game is reset as a whole"
            )

        for game in of_game[:, 0].nonzero().squeeze(-1).tolist():
            self.env.reset_at(game, return_observations=False)
        (shown,) = self.env.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=False, get_dones=False
        )
        return self._rows(shown), {}

    @override
    def step(self, actions: Tree) -> Step:
        # [G * A, ...] -> one [G, ...] per agent; discrete actions become [G, 1].
        moves = actions.view(self.env.num_envs, len(self._agent_names), -1).unbind(1)
        shown, paid, *dones, infos = self.env.step(list(moves))
        if len(dones) != 2:
            dones = [dones[0], torch.zeros_like(dones[0])]
        terminated, truncated = (flag.repeat_interleave(len(self._agent_names)) for flag in dones)

        return self._rows(shown), self._rows(paid).float(), terminated, truncated, self._info(infos)

    def _rows(self, by_agent: Any) -> Tree:
        """Stack a list or dict of per-agent trees ``[G, ...]`` into one new tree ``[G * A, ...]``."""
        if isinstance(by_agent, dict):
            trees = [by_agent[name] for name in self._agent_names]
        else:
            trees = by_agent
        return map_tree(lambda *leaves: torch.stack(leaves, 1).flatten(0, 1), *trees)

    def _info(self, by_agent: Any) -> Info:
        """Return the entries that all agents' infos have, ``[G * A, ...]``."""
        if isinstance(by_agent, dict):
            infos = list(by_agent.values())
        else:
            infos = by_agent

        first = infos[0]
        shared = [key for key in first if all(_alike(info.get(key), first[key]) for info in infos)]
        return {key: self._rows([info[key] for info in infos]) for key in shared}

    @override
    def close(self) -> None:
        """Do nothing: VMAS only has a window, which is closed with it."""


def _alike(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape


def _shared_space(kind: str, by_agent: Any, names: list[str]) -> spaces.Space[Any]:
    """Return the agents' common space, as a Gymnasium space."""
    keys = names if hasattr(by_agent, "keys") else range(len(names))
    found = [_gymnasium_space(by_agent[key]) for key in keys]
    for name, space in zip(names, found, strict=True):
        if space != found[0]:
            raise ValueError(
                f"all agents must have the same {kind}_space, got {found[0]} for {names[0]!r} and {space} for {name!r}"
                ": pad the smaller ones in the scenario"
            )
    return found[0]


def _gymnasium_space(space: Any) -> spaces.Space[Any]:
    """Convert a gym space to a Gymnasium space."""
    if hasattr(space, "spaces"):
        return spaces.Dict({key: _gymnasium_space(child) for key, child in space.spaces.items()})
    if hasattr(space, "nvec"):
        return spaces.MultiDiscrete(space.nvec)
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    return spaces.Box(space.low, space.high, dtype=space.dtype.type)


def _environment(request: Request) -> Any:
    """The env, if it is one of VMAS."""
    if is_from("vmas", request.env) and hasattr(request.env, "scenario"):
        return request.env
    return None


FAMILY = Family(
    name="games of VMAS",
    recognises=_environment,
    adapt=lambda request, env: (VmasSource(env), AutoresetMode.DISABLED),
)
