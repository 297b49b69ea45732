"""Tianshou: its collector into a VectorReplayBuffer, returns of its algorithms, and the wrapper that normalises."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.boundaries import fixtures as given
from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import PLAN, STEPS, Key, Row

PACKAGE = "tianshou"
LANE = 10  # rows of each env in a ring: the write head stands within episodes


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return a function for each fixture; sequences are stacks here, see `frame_stacks`."""
    return {
        "truncated_end": lambda: one_step_targets(lambda row: row.truncated and not row.terminated),
        "both_ends": lambda: one_step_targets(lambda row: row.truncated and row.terminated),
        "last_observation": last_observation,
        "dead_rows": dead_rows,
        "n_step": n_step,
        "frame_stacks": frame_stacks,
        "advantages": advantages,
        "episode_statistics": episode_statistics,
        "normaliser": normaliser,
        "saved_buffer": saved_buffer,
        "passes": passes,
        "last_info": last_info,
    }


def make_collector(
    lane: int = STEPS,
    buffer: Any = None,
    first: int = 0,
    wrap: Any = None,
    one_hot: bool = False,
    **options: Any,
) -> Any:
    """Return a collector over the scripted envs, whose first episode is number ``first``."""
    from tianshou.algorithm.algorithm_base import Policy  # pyright: ignore[reportMissingImports]
    from tianshou.data import Batch, Collector, VectorReplayBuffer  # pyright: ignore[reportMissingImports]
    from tianshou.env import DummyVectorEnv  # pyright: ignore[reportMissingImports]

    class Zeros(Policy):
        def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
            return Batch(act=np.zeros(len(batch.obs), np.int64))

    scripted = [given.ScriptedEnv(PLAN, env, one_hot=one_hot) for env in range(PLAN.num_envs)]
    for one in scripted:
        one.episode = first - 1
    env = DummyVectorEnv([lambda one=one: one for one in scripted])
    if wrap is not None:
        env = wrap(env)
    if buffer is None:
        buffer = VectorReplayBuffer(lane * PLAN.num_envs, PLAN.num_envs, **options)
    space = scripted[0]
    policy = Zeros(action_space=space.action_space, observation_space=space.observation_space)
    return Collector(policy, env, buffer)


def collected(lane: int = STEPS, steps: int = STEPS, **options: Any) -> Any:
    """Return a buffer with the rows of some vector steps."""
    collector = make_collector(lane, **options)
    collector.reset()
    collector.collect(n_step=steps * PLAN.num_envs)
    return collector.buffer


def all_rows(buffer: Any) -> tuple[Any, Any]:
    """Return all rows in order, and their places in the buffer."""
    batch, indices = buffer.sample(0)
    return batch, indices


def rows_of(batch: Any) -> list[Row]:
    return [PLAN.row(given.key_of(observation)) for observation in batch.obs]


def episodic(buffer: Any, lmbda: float) -> tuple[Any, Any, Any]:
    """Return rows, returns and advantages, as the on-policy algorithms compute them, with the scripted values."""
    from tianshou.algorithm.algorithm_base import Algorithm  # pyright: ignore[reportMissingImports]

    batch, indices = all_rows(buffer)
    returns, gains = Algorithm.compute_episodic_return(
        batch,
        buffer,
        indices,
        v_s_=given.value(batch.obs_next),
        v_s=given.value(batch.obs),
        gamma=given.GAMMA,
        gae_lambda=lmbda,
    )
    return rows_of(batch), returns, gains


def n_step_targets(buffer: Any, n: int) -> tuple[list[Row], Any]:
    """Return rows and n-step targets, as the off-policy algorithms compute them, with the scripted values."""
    import torch
    from tianshou.algorithm.algorithm_base import Algorithm  # pyright: ignore[reportMissingImports]

    def values(buffer: Any, indices: Any) -> Any:
        return torch.as_tensor(given.value(buffer[indices].obs_next))

    batch, indices = all_rows(buffer)
    done = Algorithm.compute_nstep_return(batch, buffer, indices, values, gamma=given.GAMMA, n_step=n)
    return rows_of(batch), done.returns.flatten().tolist()


def one_step_targets(chosen: Callable[[Row], bool]) -> Cell:
    buffer = collected()
    rows, returns, _ = episodic(buffer, 0.0)
    tally = Tally()
    for name, targets in (("GAE", returns), ("n-step", n_step_targets(buffer, 1)[1])):
        for row, target in zip(rows, targets, strict=True):
            if chosen(row):
                tally.compare((name, row.key), target, PLAN.target(row))
    return tally.cell("target differs")


def last_observation() -> Cell:
    batch, _ = all_rows(collected())
    tally = Tally()
    for row, after in zip(rows_of(batch), batch.obs_next, strict=True):
        if row.done:
            tally.compare(row.key, after, row.next_observation)
    return tally.cell("not the last observation", note=f"With ignore_obs_next=True {next_obs_note()}.")


def next_obs_note() -> str:
    """Say what the option that keeps each observation once does, which is not the default."""
    batch, _ = all_rows(collected(ignore_obs_next=True))
    tally = Tally()
    for row, after in zip(rows_of(batch), batch.obs_next, strict=True):
        if row.done:
            tally.compare(row.key, after, row.next_observation)
    return f"{tally.wrong} of {tally.of} are the row's own observation"


def dead_rows() -> Cell:
    batch, _ = all_rows(collected())
    tally = Tally()
    for before, after in zip(batch.obs, batch.obs_next, strict=True):
        tally.check(given.key_of(before), given.follows(before, after))
    return tally.cell("no transition")


def newest_rows(buffer: Any) -> set[Key]:
    """Return the newest row of each env."""
    return {given.key_of(buffer.obs[int(place)]) for place in np.atleast_1d(buffer.last_index)}


def check_n_step(buffer: Any, ends: set[Key], tally: Tally) -> None:
    """Compare the n-step targets of all rows; ``ends`` are rows that no stored row continues."""
    for row, target in zip(*n_step_targets(buffer, given.N_STEP), strict=True):
        newest = next((end for end in ends if end[:2] == row.key[:2]), None)
        tally.compare(row.key, target, PLAN.n_step_target(row.key, newest=newest))


def n_step() -> Cell:
    tally = Tally()
    for steps in (LANE - 3, LANE + 4, 2 * LANE, STEPS):  # a ring that is not full, and heads at three places
        buffer = collected(LANE, steps)
        check_n_step(buffer, newest_rows(buffer), tally)
    return tally.cell("n-step target differs")


def frame_stacks() -> Cell:
    """The buffer repeats the oldest frame of an episode that it holds."""
    tally = Tally()
    wrong = {"obs": 0, "obs_next": 0}
    for lane in (STEPS, LANE):
        batch, _ = all_rows(collected(lane, stack_num=given.STACK))
        keys = [given.key_of(frames[-1]) for frames in batch.obs]
        for key, before, after in zip(keys, batch.obs, batch.obs_next, strict=True):
            oldest = min(step for env, episode, step in keys if (env, episode) == key[:2])
            later = (key[0], key[1], key[2] + 1)
            for name, at, frames in (("obs", key, before), ("obs_next", later, after)):
                seen = tally.wrong
                tally.compare((name, key), frames, PLAN.stack(at, first=oldest))
                wrong[name] += tally.wrong - seen
    return tally.cell(
        "obs_next lacks the episode's first frame",
        note=f"obs {wrong['obs']}, obs_next {wrong['obs_next']}.",
        script="tianshou_stacked_obs_next.sh",
    )


def advantages() -> Cell:
    buffer = collected()
    window = PLAN.rows(STEPS)
    keys = [row.key for step in window for row in step]
    right = dict(zip(keys, given.advantages(window).flatten(), strict=True))
    rows, _, gains = episodic(buffer, given.LAMBDA)
    tally = Tally()
    for row, gain in zip(rows, gains, strict=True):
        tally.compare(row.key, gain, right[row.key])
    return tally.cell("advantage differs")


def episode_statistics() -> Cell:
    collector = make_collector()
    collector.reset()
    stats = collector.collect(n_step=STEPS * PLAN.num_envs)
    ended = [row for step in PLAN.rows(STEPS) for row in step if row.done]
    tally = Tally()
    for row, gain, length in zip(ended, stats.returns, stats.lens, strict=True):
        tally.compare(row.key, (gain, length), PLAN.episode_return(row.env, row.episode))
    return tally.cell("return or length differs")


def normaliser() -> Cell:
    from tianshou.env import VectorEnvNormObs  # pyright: ignore[reportMissingImports]

    collector = make_collector(wrap=VectorEnvNormObs, one_hot=True)
    collector.reset()
    collector.collect(n_step=STEPS * PLAN.num_envs)
    statistics = collector.env.get_obs_rms()
    rows = [row for step in PLAN.rows(STEPS) for row in step]
    acted_on = [row.key for row in rows]
    also_seen = {(row.env, row.episode, row.step + 1) for row in rows} - set(acted_on)
    tally = Tally()
    for key, right in given.counts_are_right(
        PLAN, statistics.count * statistics.mean, acted_on, sorted(also_seen)
    ):
        tally.check(key, right)
    return tally.cell("counted twice or never")


def saved_buffer() -> Cell:
    """A buffer saved within episodes, loaded and continued by a new collector: rows, and n-step sums over the seam."""
    from tianshou.data import VectorReplayBuffer  # pyright: ignore[reportMissingImports]

    one = collected(3 * LANE, 9)
    ends = newest_rows(one)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "buffer.hdf5")
        one.save_hdf5(file)
        two = VectorReplayBuffer.load_hdf5(file)
    collector = make_collector(buffer=two, first=8)
    collector.reset(reset_buffer=False)
    collector.collect(n_step=9 * PLAN.num_envs)

    tally = Tally()
    batch, _ = all_rows(two)
    for row, after in zip(rows_of(batch), batch.obs_next, strict=True):
        tally.compare(row.key, after, row.next_observation)
    check_n_step(two, ends | newest_rows(two), tally)
    return tally.cell(
        "n-step sums run over the seam",
        note="One-step rows are right: only sums look past the row where the first run stopped.",
        script="tianshou_n_step_seam.sh",
    )


def passes() -> Cell:
    tally = Tally()
    batch, _ = all_rows(collected())
    held = [row.key for row in rows_of(batch)]
    for size, merge in ((7, False), (7, True), (16, True)):
        parts = batch.split(size, shuffle=True, merge_last=merge)
        drawn = [row.key for part in parts for row in rows_of(part)]
        for key in held:
            tally.check((size, merge, key), drawn.count(key) == 1)
    return tally.cell("not once in a pass")


def last_info() -> Cell:
    batch, _ = all_rows(collected())
    tally = Tally()
    for row, seen in zip(rows_of(batch), batch.info["row"], strict=True):
        if row.done:
            tally.compare(row.key, seen, row.reward)
    return tally.cell("not the last step's")
