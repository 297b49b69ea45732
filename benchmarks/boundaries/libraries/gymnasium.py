"""Gymnasium: its vector env in the three autoreset modes, and its vector wrappers."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.boundaries import fixtures as given
from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import PLAN, STEPS, Row

PACKAGE = "gymnasium"
MODES = ("NextStep", "SameStep", "Disabled")


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return a function for each fixture; Gymnasium stores, samples and estimates nothing."""
    return {
        "last_observation": last_observation,
        "frame_stacks": frame_stacks,
        "episode_statistics": episode_statistics,
        "normaliser": normaliser,
        "last_info": last_info,
    }


def play(env: Any, mode: str) -> Iterator[tuple[list[Row | None], Any, Any, Any]]:
    """Step a vector env; yield the script's rows, and observations, rewards and infos of each step.

    In the mode ``"Disabled"`` ended envs are reset by a mask, before the next step.
    """
    env.reset()
    for step in PLAN.played(STEPS, mode):
        observations, rewards, terminated, truncated, info = env.step(np.zeros(PLAN.num_envs, np.int64))
        # A copy: the mask's reset may write into the same arrays.
        yield step, np.array(observations), rewards, info
        ended = terminated | truncated
        if mode == "Disabled" and ended.any():
            env.reset(options={"reset_mask": ended})


def last_observation() -> Cell:
    tally = Tally()
    for mode in MODES:
        for step, observations, _, info in play(given.vector_env(mode), mode):
            for row in step:
                if row is None or not row.done:
                    continue
                seen = observations[row.env]
                if mode == "SameStep":
                    seen = info["final_obs"][row.env]
                tally.compare((mode, row.key), seen, row.next_observation)
    return tally.cell("not the last observation")


def frame_stacks() -> Cell:
    """The wrapper of single envs, in each of the vector env's modes; it repeats an episode's first frame."""

    def make(env: int) -> Any:
        return lambda: gym.wrappers.FrameStackObservation(given.ScriptedEnv(PLAN, env), given.STACK)

    tally = Tally()
    for mode in MODES:
        makers = [make(env) for env in range(PLAN.num_envs)]
        env = gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode(mode))
        for step, observations, _, info in play(env, mode):
            for number, row in enumerate(step):
                frames = observations[number]
                tally.compare((mode, number), frames, PLAN.stack(given.key_of(frames[-1])))
                if row is not None and row.done and mode == "SameStep":
                    last = info["final_obs"][number]
                    tally.compare((mode, row.key), last, PLAN.stack(given.key_of(row.next_observation)))
    return tally.cell("frames of another episode")


def episode_statistics() -> Cell:
    tally = Tally()
    by_mode: dict[str, int] = {}
    for mode in MODES:
        before = tally.wrong
        env = gym.wrappers.vector.RecordEpisodeStatistics(given.vector_env(mode))
        for step, _, _, info in play(env, mode):
            for row in step:
                if row is not None and row.done:
                    told = info["episode"]
                    right = PLAN.episode_return(row.env, row.episode)
                    tally.compare((mode, row.key), (told["r"][row.env], told["l"][row.env]), right)
        by_mode[mode] = tally.wrong - before
    return tally.cell(
        "a masked reset wipes running envs",
        note=f"Wrong by mode: {words(by_mode)}. The wrapper around each single env is right in all three.",
        thread="Farama-Foundation/Gymnasium#1696",
        script="gymnasium_masked_reset_statistics.sh",
    )


def words(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def normaliser() -> Cell:
    """NormalizeObservation, which supports NEXT_STEP alone, and NormalizeReward in each mode."""
    tally = Tally()
    by_part = {"observations": observation_counts(tally)}
    for mode in MODES:
        before = tally.wrong
        env = gym.wrappers.vector.NormalizeReward(given.vector_env(mode), gamma=given.GAMMA)
        right = given.scaled_rewards_by_key(PLAN.played(STEPS, mode))
        for step, _, rewards, _ in play(env, mode):
            for row in step:
                if row is not None:
                    tally.compare((mode, row.key), rewards[row.env], right[row.key])
        by_part[f"rewards {mode}"] = tally.wrong - before
    return tally.cell(
        "reward scale: returns run over ends",
        note=f"Wrong by part: {words(by_part)}. The return so far is dropped in the row "
        "that terminates, before it counts.",
        thread="Farama-Foundation/Gymnasium#1507",
        script="gymnasium_normalize_reward_ends.sh",
    )


def observation_counts(tally: Tally) -> int:
    env = gym.wrappers.vector.NormalizeObservation(given.vector_env(one_hot=True))
    for _ in play(env, "NextStep"):
        pass
    rows = [row for step in PLAN.played(STEPS) for row in step if row is not None]
    acted_on = [row.key for row in rows]
    also_seen = {(row.env, row.episode, row.step + 1) for row in rows} - set(acted_on)
    counted = env.obs_rms.count * env.obs_rms.mean
    before = tally.wrong
    for key, right in given.counts_are_right(PLAN, counted, acted_on, sorted(also_seen)):
        tally.check(key, right)
    return tally.wrong - before


def last_info() -> Cell:
    tally = Tally()
    for mode in MODES:
        for step, _, _, info in play(given.vector_env(mode), mode):
            for row in step:
                if row is None or not row.done:
                    continue
                told = info
                if mode == "SameStep":
                    told = info["final_info"]
                tally.compare((mode, row.key), told["row"][row.env], row.reward)
    return tally.cell("not the last step's")
