"""SuperSuit's row: its frame stacks, and its vector env of a PettingZoo game.

The game has one agent for each env of the plan, all with the episodes of the plan's first env, as a game's agents end
together.
"""

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import PLAN, STACK, STEPS, Array, Row, ScriptedEnv, reward_of

PACKAGE = "supersuit"
AGENTS = ("agent_0", "agent_1")


def rows() -> list[Row]:
    """Return the rows of the game, which all agents share but for the number of their env."""
    return [step[0] for step in PLAN.rows(STEPS)]


def stacked_env(version: str) -> Any:
    scripted: Any = ScriptedEnv(PLAN)
    return getattr(importlib.import_module("supersuit"), version)(scripted, STACK)


def frame_stacks() -> Cell:
    """``frame_stack_v1`` (zeros before the first frame) and ``frame_stack_v2`` (the first frame again), over resets."""
    tally = Tally()
    for version, pad in (("frame_stack_v1", "zero"), ("frame_stack_v2", "first")):
        env = stacked_env(version)
        observation, _ = env.reset()
        for row in rows():
            want = PLAN.stack(row.key, pad="zero" if pad == "zero" else "first")
            tally.compare(f"{version} {row.key}", observation.reshape(STACK, 3), want)

            observation, _, terminated, truncated, _ = env.step(0)
            after = (row.env, row.episode, row.step + 1)
            want = PLAN.stack(after, pad="zero" if pad == "zero" else "first")
            tally.compare(f"{version} next of {row.key}", observation.reshape(STACK, 3), want)
            if terminated or truncated:
                observation, _ = env.reset()
    return tally.cell("another frame")


def game() -> Any:
    """Return the plan's first env as a PettingZoo game of two agents, which see their own number as env."""
    base: Any = importlib.import_module("pettingzoo").ParallelEnv

    class Game(base):
        def __init__(self) -> None:
            self.metadata = {"name": "scripted"}
            self.render_mode = None
            self.possible_agents = list(AGENTS)
            self.inner = ScriptedEnv(PLAN)
            self.agents = list(AGENTS)

        def observation_space(self, agent: str) -> Any:
            return gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

        def action_space(self, agent: str) -> Any:
            return gym.spaces.Discrete(2)

        def each(self, observation: Array) -> dict[str, Array]:
            shift = np.array((1, 0, 0), np.float32)
            return {agent: observation + number * shift for number, agent in enumerate(AGENTS)}

        def reset(self, seed: Any = None, options: Any = None) -> Any:
            observation, info = self.inner.reset()
            return self.each(observation), {agent: dict(info) for agent in AGENTS}

        def step(self, actions: Any) -> Any:
            observation, reward, terminated, truncated, info = self.inner.step(0)
            flags = [dict.fromkeys(AGENTS, flag) for flag in (terminated, truncated)]
            infos = {agent: dict(info) for agent in AGENTS}
            return self.each(observation), dict.fromkeys(AGENTS, reward), *flags, infos

    return Game()


def ended_steps() -> list[tuple[Row, list[dict[str, Any]]]]:
    """Return the rows that ended the game, each with the infos of that step of ``pettingzoo_env_to_vec_env_v1``."""
    env = importlib.import_module("supersuit").pettingzoo_env_to_vec_env_v1(game())
    env.reset()
    found: list[tuple[Row, list[dict[str, Any]]]] = []
    for row in rows():
        _, _, terminated, truncated, infos = env.step(np.zeros(len(AGENTS), np.int64))
        if (terminated | truncated).any():
            found.append((row, infos))
    return found


def last_observation() -> Cell:
    """``infos[agent]["terminal_observation"]`` of the step that ends the game."""
    tally = Tally()
    for row, infos in ended_steps():
        for number, info in enumerate(infos):
            want = row.next_observation + np.array((number, 0, 0), np.float32)
            tally.compare(f"{row.key} agent {number}", info["terminal_observation"], want)
    return tally.cell("another observation")


def last_info() -> Cell:
    """An info entry that both the last step and the reset after it have."""
    tally = Tally()
    for row, infos in ended_steps():
        for number, info in enumerate(infos):
            tally.compare(f"{row.key} agent {number}", info["row"], reward_of(row.key))
    return tally.cell(
        "the entry of the reset that follows",
        note="entries that the reset does not have are right; its source merges them so on purpose",
        script="supersuit_last_infos.sh",
    )


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return the fixtures that SuperSuit has parts for."""
    return {"last_observation": last_observation, "frame_stacks": frame_stacks, "last_info": last_info}
