"""Hindsight goals of a step writer's rows, stored or waiting, against the list of all steps that were written."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.buffers import (
    HindsightTransform,
    LazyTensorStorage,
    MultiStepTransform,
    ReplayBuffer,
    StepWriter,
)

UNKNOWN = -1.0


def reached(achieved: Any, desired: Any, info: Any) -> Any:
    return (achieved == desired).all(-1) * 1.0


class Envs:
    """E envs whose achieved goal is (env, episode, step); now and then one is reset early."""

    def __init__(self, count: int, seed: int = 0, abandon: float = 0.0) -> None:
        self.count, self.random, self.abandon = count, np.random.default_rng(seed), abandon
        self.episode, self.step = np.zeros((2, count), np.int64)
        self.fresh = np.ones(count, np.bool_)
        self.length = self.random.integers(1, 9, count)
        self.rows: list[list[tuple[int, int]]] = []  # per step, each env's (episode, step)

    def achieved(self, shift: int = 0) -> Any:
        return np.stack([np.arange(self.count), self.episode, self.step + shift], -1).astype(np.float32)

    def next(self) -> dict[Any, Any]:
        ended = self.step + 1 >= self.length
        goal = np.full((self.count, 3), UNKNOWN, np.float32)
        step = {
            "achieved_goal": self.achieved(),
            "desired_goal": goal,
            "is_init": self.fresh,
            ("next", "achieved_goal"): self.achieved(1),
            ("next", "desired_goal"): goal,
            ("next", "reward"): np.full(self.count, -7.0),
            ("next", "terminated"): ended & (self.episode % 2 == 0),
            ("next", "truncated"): ended & (self.episode % 2 == 1),
        }
        self.rows.append(list(zip(self.episode.tolist(), self.step.tolist(), strict=True)))
        over = ended | (self.random.random(self.count) < self.abandon)
        self.episode, self.step = self.episode + over, np.where(over, 0, self.step + 1)
        self.length = np.where(over, self.random.integers(1, 9, self.count), self.length)
        self.fresh = over
        return step

    def span(self, oldest: int, step: int, env: int) -> tuple[int, int]:
        """How many rows of this one's trajectory there are before it, from step ``oldest`` on, and in all."""
        episode = self.rows[step][env][0]
        steps = [t for t in range(oldest, len(self.rows)) if self.rows[t][env][0] == episode]
        return step - steps[0], len(steps)


class Spy(HindsightTransform):
    """Notes what it chooses from."""

    def choose(self, at: Any, count: Any, generator: Any) -> Any:
        self.seen = list(zip(at.tolist(), count.tolist(), strict=True))
        return super().choose(at, count, generator)


def writer_of(
    num_envs: int, transform: Any, capacity: int = 48, window: int = 8, compact: bool = False
) -> StepWriter:
    storage = LazyTensorStorage(capacity * num_envs, compact_obs=compact)
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=storage, transform=transform, generator=generator).writer_for(
        num_envs, window=window
    )


def all_rows(writer: StepWriter) -> tuple[Any, Any]:
    steps = torch.arange(writer.oldest, writer.steps).repeat_interleave(writer.num_envs)
    return steps, torch.arange(writer.num_envs).repeat(writer.steps - writer.oldest)


@examples(12, derandomize=True)
@given(
    num_envs=st.sampled_from([1, 3, 8]),
    window=st.sampled_from([1, 3, 8, 24]),
    compact=st.booleans(),
    abandon=st.sampled_from([0.0, 0.2]),
    strategy=st.sampled_from(["future", "final", "episode"]),
    seed=st.integers(0, 9),
)
def test_goals_are_drawn_from_all_rows_of_the_trajectory(
    num_envs: int, window: int, compact: bool, abandon: float, strategy: Any, seed: int
) -> None:
    transform = Spy(reached, goal_selection_strategy=strategy, n_sampled_goal=4)
    writer, envs = writer_of(num_envs, transform, 24, window, compact), Envs(num_envs, seed, abandon)
    for t in range(80):
        writer.write(envs.next())
        if t % 9 == 5:
            writer.flush()  # a short window
        if t % 5:
            continue
        steps, env = all_rows(writer)
        rows = writer.read(steps, env)
        spans = [envs.span(writer.oldest, s, e) for s, e in zip(steps.tolist(), env.tolist(), strict=True)]
        assert transform.seen == spans
        at, count = torch.tensor(spans).T
        changed = rows["relabelled"].flatten()
        now = rows["achieved_goal"].long()
        assert torch.equal(now[:, 0], env)
        goal = rows["desired_goal"].long()
        assert (goal[~changed] == UNKNOWN).all() and (rows["next", "reward"][~changed] == -7).all()
        assert torch.equal(goal[changed, :2], now[changed, :2])
        # Steps of the episode: that of the first row there is, and of the last.
        first = now[:, 2] - at
        last = first + count - 1
        lowest = {"future": now[:, 2], "final": last, "episode": first}[strategy] + 1
        assert ((goal[:, 2] >= lowest) & (goal[:, 2] <= last + 1))[changed].all()
        assert torch.equal(rows["next", "desired_goal"], rows["desired_goal"])
        hit = (goal[:, 2] == now[:, 2] + 1).float()
        assert torch.equal(rows["next", "reward"][changed, 0], hit[changed])


def test_goals_of_a_trajectory_half_stored_are_uniform() -> None:
    """Ten rows, eight of them stored; ``critical`` values are 0.999 quantiles of chi-square."""
    transform = HindsightTransform(reached, goal_selection_strategy="episode", n_sampled_goal=float("inf"))
    writer, envs = writer_of(2, transform), Envs(2)
    envs.length[:] = 20
    for _ in range(10):
        writer.write(envs.next())
    assert len(writer.buffer) == 16  # type: ignore[arg-type]
    for step in (3, 9):  # one that is stored, one that waits
        goals = writer.read([step] * 10_000, 1)["desired_goal"][:, 2]
        counts = torch.stack([(goals == value).sum() for value in range(1, 11)]).double()
        assert counts.sum() == 10_000 and ((counts - 1000) ** 2 / 1000).sum() < 27.9
    transform.goal_selection_strategy = "future"
    goals = writer.read([7] * 10_000, 0)["desired_goal"][:, 2]
    counts = torch.stack([(goals == value).sum() for value in (8, 9, 10)]).double()
    assert counts.sum() == 10_000 and ((counts - 10_000 / 3) ** 2 / (10_000 / 3)).sum() < 13.8


def test_samples_of_the_writer_and_of_the_buffer() -> None:
    transform = HindsightTransform(reached, goal_selection_strategy="final")
    writer, envs = writer_of(3, transform, compact=True), Envs(3)
    for _ in range(45):
        writer.write(envs.next())
    for sample in (writer.sample(500), writer.buffer.sample(500)):  # type: ignore[attr-defined]
        changed = sample["relabelled"].flatten()
        assert 0.7 < changed.double().mean() < 0.9
        assert torch.equal(sample["desired_goal"][changed, :2], sample["achieved_goal"][changed, :2])


def test_draws_are_reproducible() -> None:
    samples = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        writer, envs = writer_of(2, HindsightTransform(reached)), Envs(2)
        for _ in range(20):
            writer.write(envs.next())
        samples.append(writer.sample(64))
    assert (samples[0] == samples[1]).all()


def test_n_step_and_hindsight() -> None:
    transform = HindsightTransform(reached, goal_selection_strategy="episode", n_sampled_goal=float("inf"))
    writer, envs = writer_of(2, transform), Envs(2)
    writer.buffer.append_transform(MultiStepTransform(n_steps=3, gamma=0.5))  # type: ignore[attr-defined]
    for _ in range(30):
        writer.write(envs.next())
    steps, env = all_rows(writer)
    rows = writer.read(steps, env)
    now, goal = rows["achieved_goal"][:, 2], rows["desired_goal"][:, 2]
    length = rows["steps_to_next_obs"][:, 0]
    away = goal - now - 1  # rows until the goal is reached
    expected = torch.where((away >= 0) & (away < length), 0.5**away, 0.0)
    assert torch.equal(rows["next", "reward"][:, 0], expected.float())
    assert torch.equal(rows["next", "achieved_goal"][:, 2], now + length)
    assert torch.equal(rows["next", "desired_goal"], rows["desired_goal"])


def test_two_writers_and_an_extend_in_one_buffer() -> None:
    transform = Spy(reached, goal_selection_strategy="episode")
    writer, envs = writer_of(2, transform, 16, 4), Envs(2)
    other, others = writer.buffer.writer_for(2, window=4, writer=1), Envs(2, seed=1)  # type: ignore[attr-defined]
    for t in range(60):
        writer.write(envs.next())
        if t % 3 == 0:
            other.write(others.next())
        for each, source in ((writer, envs), (other, others)):
            if not each.steps or t % 4:
                continue
            steps, env = all_rows(each)
            rows = each.read(steps, env)
            spans = [
                source.span(each.oldest, s, e) for s, e in zip(steps.tolist(), env.tolist(), strict=True)
            ]
            assert transform.seen == spans
            changed = rows["relabelled"].flatten()
            assert torch.equal(rows["desired_goal"][changed, :2], rows["achieved_goal"][changed, :2])


def test_stored_rows_that_another_writer_overwrites_give_no_goals() -> None:
    transform = Spy(reached, goal_selection_strategy="episode")
    writer, envs = writer_of(1, transform, 16, 8), Envs(1)
    envs.length[:] = 50
    for _ in range(10):
        writer.write(envs.next())
    count = 16
    goal = torch.full((count, 3), UNKNOWN)
    after = {
        "achieved_goal": goal,
        "desired_goal": goal,
        "reward": torch.zeros(count, 1),
        "done": torch.ones(count, 1, dtype=torch.bool),
        "terminated": torch.ones(count, 1, dtype=torch.bool),
        "truncated": torch.zeros(count, 1, dtype=torch.bool),
    }
    ids = {"traj_ids": torch.arange(count) + (1 << 41)}
    init = torch.ones(count, 1, dtype=torch.bool)
    batch = {"achieved_goal": goal, "desired_goal": goal, "is_init": init, "collector": ids, "next": after}
    writer.buffer.extend(TensorDict(batch, [count]))
    rows = writer.read([8, 9], 0)
    assert transform.seen == [(0, 2), (1, 2)]
    assert set(rows["desired_goal"][rows["relabelled"].flatten(), 2].tolist()) <= {9.0, 10.0}
    with pytest.raises(IndexError):
        writer.read([3], 0)


@pytest.mark.parametrize("seen", [True, False])
def test_an_id_that_is_left_and_comes_back(seen: bool) -> None:
    """The goals of such a trajectory would be those of the one in between. The writer sees that a step has another id
    than the one before, and marks it; a copy does not know the step before its first one."""
    transform = Spy(reached, goal_selection_strategy="episode", n_sampled_goal=float("inf"))
    writer = writer_of(1, transform, 24, 4)
    for t, number in enumerate([5] * 4 + [6] * 4 + [5] * 4):
        writer = writer if seen or t < 8 else copy.deepcopy(writer)
        transform = writer.buffer.transforms[0]  # type: ignore[assignment]
        now = np.array([[0.0, number, t]], np.float32)
        step = {"achieved_goal": now, "desired_goal": now * 0, ("next", "achieved_goal"): now + 1}
        flags = {"is_init": np.array([t % 4 == 0 and t < 8]), ("next", "done"): np.array([False])}
        reward = {("next", "reward"): np.zeros(1)}
        writer.write({**step, **flags, **reward, ("collector", "traj_ids"): np.array([number])})
    if seen:
        writer.read(range(12), 0)
        assert transform.seen == [(t % 4, 4) for t in range(12)]
    else:
        with pytest.raises(ValueError, match="reused the"):
            writer.read([11] * 50, 0)


def test_a_copy_and_an_emptied_buffer() -> None:
    transform = Spy(reached)
    writer, envs = writer_of(2, transform), Envs(2)
    for _ in range(13):
        writer.write(envs.next())
    twin = copy.deepcopy(writer)  # its waiting rows are stored
    steps, env = all_rows(twin)
    twin.read(steps, env)
    seen: Any = twin.buffer.transforms[0]
    assert seen.seen == [envs.span(0, s, e) for s, e in zip(steps.tolist(), env.tolist(), strict=True)]
    writer.buffer.empty()  # type: ignore[attr-defined]
    writer.write(envs.next())
    steps, env = all_rows(writer)
    writer.read(steps, env)
    assert transform.seen == [
        envs.span(writer.oldest, s, e) for s, e in zip(steps.tolist(), env.tolist(), strict=True)
    ]
