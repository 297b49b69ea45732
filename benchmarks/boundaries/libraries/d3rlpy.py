"""d3rlpy's row: its readers over logged data (``MDPDataset``) and over data that a policy collects (``collect``).

Its episodes hold one observation for each row. So a row that ends by truncation has no next observation, and d3rlpy
leaves it out: such rows are not counted here, neither as right nor as wrong.
"""

import contextlib
import importlib
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import (
    GAMMA,
    N_STEP,
    PLAN,
    SLICE,
    STACK,
    Row,
    ScriptedEnv,
    columns,
    follows,
    key_of,
    value,
)

PACKAGE = "d3rlpy"
STEPS = 32  # whole episodes
IMAGE = (3, 1, 1)


def part(name: str, module: str = "dataset") -> Any:
    """Import an object of the library by name."""
    with contextlib.redirect_stderr(io.StringIO()):  # an older gym, which it imports, prints a notice
        return getattr(importlib.import_module(f"d3rlpy.{module}"), name)


def rows_of(env: int) -> list[Row]:
    return [step[env] for step in PLAN.rows(STEPS)]


def logged(env: int, picker: Any = None) -> Any:
    """Return the env's rows as an ``MDPDataset``; rows of both ends are terminals, as it refuses both flags at once."""
    found = columns([[row] for row in rows_of(env)])
    return part("MDPDataset")(
        observations=found["observation"][:, 0].reshape(-1, *IMAGE),
        actions=found["action"][:, 0],
        rewards=found["reward"][:, 0],
        terminals=found["terminated"][:, 0].astype(np.float32),
        timeouts=(found["truncated"] & ~found["terminated"])[:, 0].astype(np.float32),
        transition_picker=picker,
        action_space=part("ActionSpace", "constants").DISCRETE,
        action_size=2,
    )


def collected(env: int, picker: Any = None) -> Any:
    """Return a replay buffer that a random policy collected from the env."""
    scripted: Any = ScriptedEnv(PLAN, env)
    buffer = part("create_fifo_replay_buffer")(limit=10**4, env=scripted, transition_picker=picker)
    policy = part("DiscreteRandomPolicyConfig", "algos")().create()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        policy.collect(scripted, buffer, n_steps=STEPS)
    return buffer


WAYS: dict[str, Callable[..., Any]] = {"MDPDataset": logged, "collect": collected}
NOTE = "MDPDataset is right; collect and fit_online drop the end of an episode of one row"
SCRIPT = "d3rlpy_episodes_of_one_row.sh"


def transitions(picker: Any = None) -> Iterator[tuple[str, Row, Any]]:
    """Yield each transition of both ways, with its way and the row where it begins."""
    for way, make in WAYS.items():
        for env in range(PLAN.num_envs):
            dataset = make(env, picker)
            for number in range(dataset.transition_count):
                episode, index = dataset.buffer[number]
                transition = dataset.transition_picker(episode, index)
                frame = np.asarray(episode.observations[index])
                yield way, PLAN.row(key_of(frame)), transition


def target(transition: Any, reward: float) -> float:
    """Return the target that its algorithms compute: the value is discounted by as many steps as were summed."""
    after = float(value(np.asarray(transition.next_observation).reshape(3)))
    going_on = 1 - float(transition.terminal)
    return reward + going_on * GAMMA ** int(transition.interval) * after


def both_ends() -> Cell:
    tally = Tally()
    for way, row, transition in transitions():
        if row.terminated and row.truncated:
            seen = target(transition, float(transition.reward[0]))
            tally.compare(f"{way} {row.key}", seen, row.reward)
    return tally.cell("adds the value of the next episode", note=NOTE, script=SCRIPT)


def last_observation() -> Cell:
    """The next observation of each transition; after a terminal one it is zeros, which no target reads."""
    tally = Tally()
    for way, row, transition in transitions():
        if not transition.terminal:
            seen = np.asarray(transition.next_observation).reshape(3)
            tally.compare(f"{way} {row.key}", seen, row.next_observation)
    return tally.cell(
        "the next episode's first observation",
        note=f"{NOTE}; rows that end by truncation are left out, as episodes hold no last observation",
        script=SCRIPT,
    )


def n_step() -> Cell:
    """MultiStepTransitionPicker; in a truncated episode it sums up to the last row that has a next observation."""
    tally = Tally()
    picker = part("MultiStepTransitionPicker")(N_STEP, GAMMA)
    for way, row, transition in transitions(picker):
        length, end = PLAN.episode(row.env, row.episode)
        newest = (row.env, row.episode, length - 2) if end == "truncated" else None
        seen = target(transition, float(transition.reward[0]))
        if end == "truncated" and row.step == length - 1:
            tally.check(f"{way} {row.key}", False, "has no next observation")
            continue
        tally.compare(f"{way} {row.key}", seen, PLAN.n_step_target(row.key, N_STEP, newest))
    return tally.cell("sums on into the next episode", note=NOTE, script=SCRIPT)


def frame_stacks() -> Cell:
    """FrameStackTransitionPicker, which pads with zeros, as it documents."""
    tally = Tally()
    picker = part("FrameStackTransitionPicker")(STACK)
    for way, row, transition in transitions(picker):
        if way != "MDPDataset":
            continue
        seen = np.asarray(transition.observation).reshape(STACK, 3)
        tally.compare(f"{way} {row.key}", seen, PLAN.stack(row.key, pad="zero"))
        if not transition.terminal:
            after = (row.env, row.episode, row.step + 1)
            seen = np.asarray(transition.next_observation).reshape(STACK, 3)
            tally.compare(f"{way} next of {row.key}", seen, PLAN.stack(after, pad="zero"))
    return tally.cell(
        "another frame", note="MDPDataset; collect was not tried, as its frames must be stacked before"
    )


def slices() -> Cell:
    """Each slice of its default slicer; padded steps have a mask of 0."""
    tally = Tally()
    for way, make in WAYS.items():
        for env in range(PLAN.num_envs):
            dataset = make(env)
            for number in range(dataset.transition_count):
                episode, index = dataset.buffer[number]
                part_of = dataset.trajectory_slicer(episode, index, SLICE)
                frames = part_of.observations[part_of.masks > 0].reshape(-1, 3)
                joined = any(not follows(*pair) for pair in itertools.pairwise(frames))
                tally.check(f"{way} {frames.tolist()}", not joined, "joins episodes")
    return tally.cell("joins two episodes", note=NOTE, script=SCRIPT)


def saved_buffer() -> Cell:
    """``dump`` and ``load`` of both ways' datasets."""
    tally = Tally()
    for way, make in WAYS.items():
        for env in range(PLAN.num_envs):
            dataset = make(env)
            file = io.BytesIO()
            dataset.dump(file)
            loaded = part("ReplayBuffer").load(file, part("InfiniteBuffer")())
            for number in range(dataset.transition_count):
                want = dataset.transition_picker(*dataset.buffer[number])
                seen = loaded.transition_picker(*loaded.buffer[number])
                for name in ("observation", "action", "reward", "next_observation", "terminal"):
                    tally.compare(f"{way} {number} {name}", getattr(seen, name), getattr(want, name))
    return tally.cell("another value after load")


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return the fixtures that d3rlpy has parts for."""
    return {
        "both_ends": both_ends,
        "last_observation": last_observation,
        "n_step": n_step,
        "slices": slices,
        "frame_stacks": frame_stacks,
        "saved_buffer": saved_buffer,
    }
