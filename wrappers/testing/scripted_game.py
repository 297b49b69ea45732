"""A scripted game of agents that come and go, with the interface of PettingZoo's ``ParallelEnv``."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

#: One life of an agent: the game step after which it joins, how many steps it takes, and how it ends.
Life: TypeAlias = tuple[int, int, Literal["terminated", "truncated"]]
#: One episode of a game: the lives of each agent in order, by name.
Plan: TypeAlias = Mapping[str, Sequence[Life]]
Results: TypeAlias = dict[str, Any]

_EPISODES: tuple[Plan, ...] = (
    {
        "a0": [(0, 5, "truncated")],
        "a1": [(0, 2, "terminated"), (3, 2, "truncated")],
        "a2": [(1, 2, "terminated")],
    },
    {"a0": [(0, 3, "terminated")], "a1": [(0, 3, "truncated")], "a2": [(0, 3, "terminated")]},
)


class ScriptedGame:
    """A PettingZoo parallel env whose observation is (game, agent, life, step), float32 ``[4]``.

    Which agents are present is known in advance: an agent acts ``steps`` times in each life, and a game ends when no
    agent is left. ``life`` counts an agent's lives over all episodes, ``step`` its steps in this life. The reward is
    the action plus ten times the agent's index; ``state()`` is (game, episode, step of the episode), float32 ``[3]``.

    Args:
        game: index of the game.
        episodes: plans of the episodes, played in a cycle. Default: two episodes of three agents, with an agent that
            joins late, one that returns, and both kinds of ends.
        mask: the observation is a dict of ``"observation"`` and ``"action_mask"``, int8 ``[5]``, in which action
            ``step % 5`` alone is legal. Default False.

    Raises:
        ValueError: no agent is present at the start, an agent's lives overlap, or one starts after the game's end.

    >>> game = ScriptedGame(game=7)
    >>> obs, infos = game.reset()
    >>> game.agents, obs["a1"].tolist()
    (['a0', 'a1'], [7.0, 1.0, 0.0, 0.0])
    >>> obs, rewards, terminations, truncations, infos = game.step({"a0": 3, "a1": 4})
    >>> game.agents, obs["a2"].tolist(), rewards
    (['a0', 'a1', 'a2'], [7.0, 2.0, 0.0, 0.0], {'a0': 3.0, 'a1': 14.0})
    """

    metadata = {"name": "scripted_game", "render_modes": []}  # noqa: RUF012 (as PettingZoo has it)
    render_mode = None

    def __init__(self, game: int = 0, episodes: Sequence[Plan] = _EPISODES, *, mask: bool = False) -> None:
        self.game = game
        self.episodes = episodes
        self.mask = mask
        self.possible_agents = sorted({name for plan in episodes for name in plan})
        self.agents: list[str] = []

        self.state_space = spaces.Box(-1, 1e6, (3,), np.float32)
        self._action = spaces.Discrete(5)
        self._observation: spaces.Space[Any] = spaces.Box(-1, 1e6, (4,), np.float32)
        if mask:
            self._observation = spaces.Dict(
                observation=self._observation, action_mask=spaces.Box(0, 1, (5,), np.int8)
            )

        self._lives = dict.fromkeys(self.possible_agents, -1)  # each agent's life, counted from 0
        self._steps = dict.fromkeys(self.possible_agents, 0)  # the agent's steps in that life
        self._episode = -1
        self._time = 0

        for plan in episodes:
            _check(plan)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of each agent's observations."""
        return self._observation

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of five actions."""
        return self._action

    @property
    def plan(self) -> Plan:
        """The plan of the current episode."""
        return self.episodes[self._episode % len(self.episodes)]

    def life(self, agent: str, life: int) -> Life:
        """Return the plan of an agent's life number ``number``, counted over all episodes."""
        episode = 0
        while True:
            lives = self.episodes[episode % len(self.episodes)].get(agent, ())
            if life < len(lives):
                return lives[life]
            life = life - len(lives)
            episode = episode + 1

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Results, dict[str, dict[str, Any]]]:
        """Begin the next episode, or with a seed the first one."""
        self._episode += 1
        if seed is not None:
            self._episode = 0
        self._time = 0
        self.agents = []
        for name in self.possible_agents:
            earlier = (self.episodes[k % len(self.episodes)].get(name, ()) for k in range(self._episode))
            self._lives[name] = sum(map(len, earlier)) - 1

        self._join()
        return {name: self._see(name) for name in self.agents}, {name: {} for name in self.agents}

    def step(self, actions: Mapping[str, Any]) -> tuple[Results, Results, Results, Results, Results]:
        """Step the agents that are present."""
        if sorted(actions) != sorted(self.agents):
            raise KeyError(f"actions must be those of {self.agents}, got {sorted(actions)}")

        acting = self.agents
        self._time = self._time + 1
        rewards = {
            name: float(action) + 10 * self.possible_agents.index(name) for name, action in actions.items()
        }
        terminations = dict.fromkeys(acting, False)
        truncations = dict.fromkeys(acting, False)

        self.agents = []
        for name in acting:
            self._steps[name] += 1
            _, steps, end = self.life(name, self._lives[name])
            if self._steps[name] < steps:
                self.agents.append(name)
            elif end == "terminated":
                terminations[name] = True
            else:
                truncations[name] = True

        observations = {name: self._see(name) for name in acting}
        self._join()
        observations |= {name: self._see(name) for name in self.agents}
        return observations, rewards, terminations, truncations, {name: {} for name in observations}

    def _join(self) -> None:
        for name, lives in self.plan.items():
            if any(join == self._time for join, _, _ in lives):
                self.agents.append(name)
                self._lives[name] += 1
                self._steps[name] = 0

    def _see(self, agent: str) -> Any:
        step = self._steps[agent]
        seen = np.array(
            (self.game, self.possible_agents.index(agent), self._lives[agent], step), dtype=np.float32
        )
        if not self.mask:
            return seen
        return {"observation": seen, "action_mask": (np.arange(5) == step % 5).astype(np.int8)}

    def state(self) -> npt.NDArray[np.float32]:
        """(game, episode, step of the episode), float32 ``[3]``."""
        return np.array((self.game, self._episode, self._time), np.float32)

    def render(self) -> None:
        """Return None."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _check(plan: Plan) -> None:
    """Raise ValueError if an episode cannot be played."""
    there: set[int] = set()  # steps at which an agent acts
    for name, lives in plan.items():
        free = 0
        for join, steps, _ in lives:
            if join < free or steps < 1:
                raise ValueError(
                    f"{name}'s lives must have steps, with at least one step between them, got {lives}"
                )
            there.update(range(join, join + steps))
            free = join + steps + 1
    if there != set(range(len(there))):
        raise ValueError(f"at least one agent must act at each step of the game until its end, got {plan}")
