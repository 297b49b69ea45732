"""cpprb's row: `ReplayBuffer` with its n-step returns, memory compressions and files, one buffer for each env.

The loop is that of its documentation: ``add`` for each transition, ``on_episode_end`` at each end.
"""

import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import GAMMA, N_STEP, PLAN, STACK, Array, Key, Row, ring_keys, value

PACKAGE = "cpprb"
STEPS = 48
RINGS = (10, 11, 12)


def replay_buffer() -> Any:
    return importlib.import_module("cpprb").ReplayBuffer


def rows_of(env: int) -> list[Row]:
    return [step[env] for step in PLAN.rows(STEPS)]


def columns(stacked: bool, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the ``env_dict`` of a buffer; ``next_obs`` is left out where ``next_of`` makes it."""
    shape = (3, STACK) if stacked else (3,)
    found: dict[str, dict[str, Any]] = {"obs": {"shape": shape}, "rew": {}, "done": {}}
    if "next_of" not in options:
        found["next_obs"] = {"shape": shape}
    return found


def seen_at(key: Key, stacked: bool) -> Array:
    """Return the observation at a key: [3], or [3, STACK] with the frames last, as ``stack_compress`` asks for them."""
    if stacked:
        return PLAN.stack(key).T
    return np.array(key, np.float32)


def next_key(row: Row) -> Key:
    return row.env, row.episode, row.step + 1


def filled(buffer: Any, env: int, stacked: bool = False) -> Iterator[list[Row]]:
    """Add the env's rows one by one; yield those added so far after each."""
    rows = rows_of(env)
    for number, row in enumerate(rows, start=1):
        buffer.add(
            obs=seen_at(row.key, stacked),
            next_obs=seen_at(next_key(row), stacked),
            rew=row.reward,
            done=float(row.terminated),
        )
        if row.done:
            buffer.on_episode_end()
        yield rows[:number]


def compare_stored(tally: Tally, name: str, buffer: Any, keys: list[Key], stacked: bool) -> None:
    """Count the observations and the next observations of the stored rows, each found by its reward."""
    stored = buffer.get_all_transitions()
    number_of = {float(reward): number for number, reward in enumerate(stored["rew"][:, 0])}
    for key in keys:
        row = PLAN.row(key)
        number = number_of[row.reward]
        tally.compare(f"{name}: obs of {key}", stored["obs"][number], seen_at(key, stacked))
        tally.compare(
            f"{name}: next_obs of {key}", stored["next_obs"][number], seen_at(next_key(row), stacked)
        )


def last_observation() -> Cell:
    """With and without ``next_of``, in rings that wrap, looked at after each step."""
    tally = Tally()
    for options in ({}, {"next_of": "obs"}):
        for ring in RINGS:
            for env in range(PLAN.num_envs):
                buffer = replay_buffer()(ring, columns(False, **options), **options)
                for rows in filled(buffer, env):
                    compare_stored(tally, f"{options}", buffer, ring_keys(rows, ring), stacked=False)
    return tally.cell(note="next_obs given with each row, and next_of with on_episode_end")


def frame_stacks() -> Cell:
    """Full stacks, ``stack_compress``, and ``stack_compress`` with ``next_of``, in rings that wrap."""
    both = ("obs", "next_obs")
    tally = Tally()
    for options in ({}, {"stack_compress": both}, {"stack_compress": "obs", "next_of": "obs"}):
        for ring in RINGS:
            for env in range(PLAN.num_envs):
                buffer = replay_buffer()(ring, columns(True, **options), **options)
                for rows in filled(buffer, env, stacked=True):
                    compare_stored(tally, f"{options}", buffer, ring_keys(rows, ring), stacked=True)
    return tally.cell(
        "next stacks end in a later episode's frames",
        note="only with next_of and stack_compress together, in a ring that has wrapped; each alone is right",
        script="cpprb_compressed_stacks.sh",
    )


def n_step() -> Cell:
    """The target of its documentation: ``rew + (1 - done) * gamma**n * V(next_obs)``."""
    tally = Tally()
    for env in range(PLAN.num_envs):
        nstep = {"size": N_STEP, "gamma": GAMMA, "rew": "rew", "next": "next_obs"}
        buffer = replay_buffer()(STEPS, columns(False), Nstep=nstep)
        for _ in filled(buffer, env):
            pass

        stored = buffer.get_all_transitions()
        for number, observation in enumerate(stored["obs"]):
            key = (int(observation[0]), int(observation[1]), int(observation[2]))
            after = float(value(stored["next_obs"][number]))
            going_on = 1 - float(stored["done"][number, 0])
            seen = float(stored["rew"][number, 0]) + going_on * GAMMA**N_STEP * after
            tally.compare(key, seen, PLAN.n_step_target(key))
    return tally.cell(
        "truncated tails lack next_obs; done comes late",
        note="next_obs of the last n - 1 rows of a truncated episode is all ones, and their discount would be another; "
        "done of the row n - 1 steps before a terminated end is 0, its documentation says 1",
        script="cpprb_n_step_tails.sh",
    )


def saved_buffer() -> Cell:
    """``save_transitions`` into a file, loaded by a new buffer: plain, with ``next_of``, and both kinds of file."""
    tally = Tally()
    for options in ({}, {"next_of": "obs"}):
        for safe in (True, False):
            buffer = replay_buffer()(STEPS, columns(False, **options), **options)
            *_, rows = filled(buffer, 0)
            with tempfile.TemporaryDirectory() as folder:
                file = str(Path(folder) / "rows.npz")
                buffer.save_transitions(file, safe=safe)
                loaded = replay_buffer()(STEPS, columns(False, **options), **options)
                loaded.load_transitions(file)
            name = f"{options}, safe={safe}"
            compare_stored(tally, name, loaded, [row.key for row in rows], stacked=False)
    return tally.cell(
        "next_of: ends have the next episode's observation",
        note="only with next_of and the default safe=True; right without next_of, and with safe=False",
        script="cpprb_saved_next_of.sh",
    )


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return the fixtures that cpprb has parts for."""
    return {
        "last_observation": last_observation,
        "n_step": n_step,
        "frame_stacks": frame_stacks,
        "saved_buffer": saved_buffer,
    }
