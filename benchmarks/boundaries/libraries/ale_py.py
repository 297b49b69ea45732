"""ale-py's row: `AtariVectorEnv` at the first end of a game, in both of its autoreset modes.

The game is Breakout, which ends when no life is left. Both modes get the same seeds and actions, so up to the first end
they are the same games.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import Array

PACKAGE = "ale-py"
SEEDS = range(4)
MODES = ("NextStep", "SameStep")


class End(NamedTuple):
    """The step that ends the first game: which env ended, what the step returned."""

    env: int
    observations: Array
    info: dict[str, Any]


def first_end(mode: str, seed: int) -> End:
    vector_env: Any = importlib.import_module("ale_py.vector_env").AtariVectorEnv
    env = vector_env("breakout", 2, autoreset_mode=gym.vector.AutoresetMode(mode))
    env.reset(seed=seed)
    generator = np.random.default_rng(seed)
    while True:
        observations, _, terminated, truncated, info = env.step(generator.integers(0, 4, 2))
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            found = End(int(ended[0]), observations.copy(), {name: np.copy(info[name]) for name in info})
            env.close()
            return found


def last_observation() -> Cell:
    """``info["final_obs"]`` of the mode SAME_STEP against what NEXT_STEP returns at the same step."""
    tally = Tally()
    for seed in SEEDS:
        same = first_end("SameStep", seed)
        right = first_end("NextStep", seed)
        tally.compare(f"seed {seed}", same.info["final_obs"][same.env], right.observations[right.env])
    return tally.cell(
        "another observation",
        note="only rows of ended games are compared; those of running games in final_obs are not written",
    )


def last_info() -> Cell:
    """``info["lives"]`` of the step that ends the game: 0."""
    tally = Tally()
    for mode in MODES:
        for seed in SEEDS:
            end = first_end(mode, seed)
            tally.compare(f"{mode} seed {seed}", end.info["lives"][end.env], 0)
    return tally.cell(
        "SAME_STEP: lives of the next game",
        note="NEXT_STEP is right; in SAME_STEP the info is that of the reset, and there is no final_info",
        script="ale_py_lives_at_the_end.sh",
    )


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return the fixtures that ale-py has parts for."""
    return {"last_observation": last_observation, "last_info": last_info}
