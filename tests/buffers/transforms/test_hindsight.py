"""Hindsight goals against a search through all stored rows. A goal is (writer, episode, step), so a wrong one shows."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers import (
    Compose,
    HindsightTransform,
    LazyTensorStorage,
    MultiStepTransform,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
)

CAPACITY = 61
STRATEGIES = ["future", "final", "episode"]
UNKNOWN = -1.0  # of the env's own goals, which no trajectory reaches
OWN_REWARD = -7.0


def reached(achieved: Any, desired: Any, info: Any) -> Any:
    """1 where the goal is reached, like ``compute_reward`` of a sparse env."""
    return (achieved == desired).all(-1) * 1.0


def hindsight(
    strategy: Any = "future", n_sampled_goal: float = math.inf, **options: Any
) -> HindsightTransform:
    return HindsightTransform(
        options.pop("reward_fn", reached),
        goal_selection_strategy=strategy,
        n_sampled_goal=n_sampled_goal,
        **options,
    )


def batch_of(world: Any, steps: list[Any]) -> TensorDict:
    batch: TensorDict = world.to_batch(steps)
    for part in (batch, batch["next"]):
        part["achieved_goal"] = part["observation"].clone()
        part["desired_goal"] = torch.full_like(part["observation"], UNKNOWN)
    batch["next", "reward"] = torch.full((len(steps), 1), OWN_REWARD)
    return batch


def one_episode(rows: int, number: int = 0, first: int = 0, done: bool = True) -> TensorDict:
    """Rows ``first ... rows - 1`` of an episode; the goal that row t reaches is (0, number, t + 1)."""
    count = rows - first
    now = torch.stack(
        [torch.zeros(count), torch.full((count,), number), torch.arange(first, rows)], -1
    ).float()
    later = now + torch.tensor([0.0, 0.0, 1.0])
    ends = torch.zeros(count, 1, dtype=torch.bool)
    ends[-1] = done
    goal = torch.full_like(now, UNKNOWN)
    flags = {"done": ends, "terminated": ends, "truncated": torch.zeros_like(ends)}
    reward = torch.full((count, 1), OWN_REWARD)
    after = {"achieved_goal": later, "desired_goal": goal.clone(), "reward": reward, **flags}
    ids = {"traj_ids": torch.full((count,), number)}
    init = torch.arange(first, rows)[:, None] == 0
    return TensorDict(
        {"achieved_goal": now, "desired_goal": goal, "is_init": init, "collector": ids, "next": after},
        [count],
    )


def buffer_of(transform: Any, capacity: int = 100, compact: bool = False, **options: Any) -> ReplayBuffer:
    storage = LazyTensorStorage(capacity, compact_obs=compact)
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=storage, transform=transform, generator=generator, **options)


def chi_square(goals: Tensor, values: range) -> float:
    """Pearson's statistic of goals that should be uniform over ``values``, and nothing else."""
    counts = torch.tensor([(goals == value).sum() for value in values]).double()
    assert int(counts.sum()) == len(goals)
    expected = len(goals) / len(values)
    return float(((counts - expected) ** 2 / expected).sum())


# --- which goals ----------------------------------------------------------------------------------------------------


@examples(12, derandomize=True)
@given(
    strategy=st.sampled_from(STRATEGIES),
    compact=st.booleans(),
    sampler=st.sampled_from([RandomSampler, PrioritizedSampler, SamplerWithoutReplacement]),
    seed=st.integers(0, 9),
)
def test_goals_are_those_of_the_trajectory(
    world: Any, strategy: str, compact: bool, sampler: Any, seed: int
) -> None:
    made = PrioritizedSampler(CAPACITY, 0.7, 0.5) if sampler is PrioritizedSampler else sampler()
    buffer = buffer_of(hindsight(strategy, 4), CAPACITY, compact, sampler=made, batch_size=32)
    model, writers = world.Model(CAPACITY), world.writers(3, seed, longest=9)
    for i in range(40):
        steps = world.windows(writers, [(i % 3, i % 5 + 1), ((i + 1) % 3, 2)])
        buffer.extend(batch_of(world, steps))
        model.extend(steps)
        if i % 4:
            continue
        sample = buffer.sample()
        changed = sample["relabelled"].flatten()
        own = sample[~changed]
        assert (own["desired_goal"] == UNKNOWN).all() and (own["next", "desired_goal"] == UNKNOWN).all()
        assert (own["next", "reward"] == OWN_REWARD).all()
        stored = [(s.writer, s.episode, s.step) for s in model.slots().values()]
        for row in sample[changed]:
            writer, episode, step = row["observation"].tolist()
            rows = [s for w, e, s in stored if (w, e) == (writer, episode)]
            allowed = {
                "future": [s + 1 for s in rows if s >= step],
                "final": [max(rows) + 1],
                "episode": [s + 1 for s in rows],
            }[strategy]
            goal = row["desired_goal"].tolist()
            assert goal[:2] == [writer, episode] and goal[2] in allowed
            assert row["next", "desired_goal"].tolist() == goal
            assert row["achieved_goal"].tolist() == [writer, episode, step]
            assert row["next", "achieved_goal"].tolist() == [writer, episode, step + 1]
            assert row["next", "reward"].item() == float(goal[2] == step + 1)


@pytest.mark.parametrize(
    ("strategy", "values", "critical"),
    [("future", range(3, 8), 18.5), ("episode", range(1, 8), 22.5), ("final", range(7, 8), 0.0)],
)
def test_goals_are_uniform(strategy: str, values: range, critical: float) -> None:
    """Row 2 of 7; ``critical`` is the 0.999 quantile of chi-square with len(values) - 1 degrees of freedom."""
    buffer = buffer_of(hindsight(strategy, 4))
    buffer.extend(one_episode(5, number=1))
    buffer.extend(one_episode(3, number=2, done=False))
    buffer.extend(one_episode(4, number=3))
    buffer.extend(one_episode(7, number=2, first=3))  # goes on in a second fragment
    rows = buffer[[5 + 2] * 20_000]
    changed = rows["relabelled"].flatten()
    assert abs(changed.double().mean().item() - 0.8) < 3.3 * (0.8 * 0.2 / len(rows)) ** 0.5
    goals = rows["desired_goal"][changed]
    assert (goals[:, 1] == 2).all()
    assert chi_square(goals[:, 2], values) <= critical


def test_uniform_over_rows_and_goals_of_a_sample() -> None:
    """Of an episode of 3 rows, ``future`` gives (row, goal) with probability 1/3 * 1/(3 - row)."""
    buffer = buffer_of(hindsight())
    buffer.extend(one_episode(3))
    sample = buffer.sample(18_000)
    pairs = sample["achieved_goal"][:, 2] * 10 + sample["desired_goal"][:, 2]
    statistic = 0.0
    for pair, share in {1: 1 / 9, 2: 1 / 9, 3: 1 / 9, 12: 1 / 6, 13: 1 / 6, 23: 1 / 3}.items():
        expected = share * len(sample)
        statistic += (int((pairs == pair).sum()) - expected) ** 2 / expected
    assert statistic < 20.5  # 0.999 quantile, 5 degrees of freedom


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_row_episodes_reach_their_own_goal(strategy: str, compact: bool) -> None:
    buffer = buffer_of(hindsight(strategy), compact=compact)
    for number in range(5):
        buffer.extend(one_episode(1, number))
    sample = buffer.sample(50)
    assert torch.equal(sample["desired_goal"], sample["next", "achieved_goal"])
    assert (sample["next", "reward"] == 1).all()


def test_an_overwritten_head_gives_no_goals() -> None:
    buffer = buffer_of(hindsight("episode"), capacity=8)
    buffer.extend(one_episode(8, number=0))
    buffer.extend(one_episode(3, number=1))  # rows 0 to 2 of the first are gone
    sample = buffer.sample(2000)
    first = sample["achieved_goal"][:, 1] == 0
    assert sample["achieved_goal"][first][:, 2].unique().tolist() == [3, 4, 5, 6, 7]
    assert sample["desired_goal"][first][:, 2].unique().tolist() == [4, 5, 6, 7, 8]


def test_a_running_trajectory_takes_part_with_what_it_has() -> None:
    buffer = buffer_of(hindsight("final"))
    for count in (2, 4, 5):
        buffer.extend(one_episode(count, first=count - 1 - (count == 2) - (count == 4), done=count == 5))
        assert (buffer.sample(20)["desired_goal"][:, 2] == count).all()


def test_all_or_none() -> None:
    for n_sampled_goal, share in ((0, 0.0), (math.inf, 1.0)):
        buffer = buffer_of(hindsight(n_sampled_goal=n_sampled_goal))
        buffer.extend(one_episode(5))
        sample = buffer.sample(50)
        assert sample["relabelled"].double().mean() == share
        assert ((sample["desired_goal"] == UNKNOWN).all(-1).double().mean()) == 1 - share


# --- slices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"pad_output": True}, {"by": "start"}, {"span": True}])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slice_has_one_goal(strategy: str, options: dict[str, Any]) -> None:
    sampler = SliceSampler(slice_len=4, **options)
    buffer = buffer_of(hindsight(strategy, 1), sampler=sampler, batch_size=200)
    lengths = [1, 2, 3, 9, 12]  # slices are longer than the first three
    for number, length in enumerate(lengths):
        buffer.extend(one_episode(length, number))
    sample = buffer.sample()
    starts = sample["is_init"].flatten()
    if options.get("pad_output"):
        starts = torch.arange(len(sample)) % 4 == 0
    number = starts.cumsum(0) - 1
    seen = set()
    for rows in (sample[number == i] for i in range(int(number[-1]) + 1)):
        seen.add(bool(rows["relabelled"][0]))
        assert (rows["relabelled"] == rows["relabelled"][0]).all()
        goal = rows["desired_goal"][0]
        assert (rows["desired_goal"] == goal).all() and (rows["next", "desired_goal"] == goal).all()
        if rows["relabelled"][0]:
            _, episode, step = rows["achieved_goal"][0].long().tolist()
            lowest = {"future": step + 1, "final": lengths[episode], "episode": 1}[strategy]
            assert goal[1] == episode and lowest <= goal[2] <= lengths[episode]
            hits = (rows["next", "achieved_goal"] == goal).all(-1, keepdim=True)
            assert torch.equal(rows["next", "reward"], hits.float())
    assert seen == {True, False}


def test_goals_of_slices_are_uniform_from_their_first_row_on() -> None:
    buffer = buffer_of(hindsight(), sampler=SliceSampler(slice_len=3), batch_size=30_000)
    buffer.extend(one_episode(5))
    firsts = buffer.sample().view(-1, 3)[:, 0]
    for first in range(3):
        goals = firsts["desired_goal"][firsts["achieved_goal"][:, 2] == first][:, 2]
        assert chi_square(goals, range(first + 1, 6)) < [18.5, 16.3, 13.8][first]


# --- rewards and flags ----------------------------------------------------------------------------------------------


def test_flags_stay_as_stored() -> None:
    buffer = buffer_of(hindsight("final"))
    buffer.extend(one_episode(4))
    rows = buffer[:]
    assert rows["next", "terminated"].flatten().tolist() == [False, False, False, True]
    assert rows["next", "done"].flatten().tolist() == [False, False, False, True]


def test_terminated_fn_writes_terminated_and_done() -> None:
    transform = hindsight("future", terminated_fn=lambda a, d, info: reached(a, d, info).bool())
    buffer = buffer_of(transform)
    batch = one_episode(4)
    batch["next", "terminated"] = torch.zeros(4, 1, dtype=torch.bool)
    batch["next", "truncated"] = batch["next", "done"].clone()
    buffer.extend(batch)
    rows = buffer[[0, 1, 2, 3] * 20]
    hit = rows["next", "reward"] == 1
    assert hit[:].any() and not hit.all()
    assert torch.equal(rows["next", "terminated"], hit)
    assert torch.equal(rows["next", "done"], hit | rows["next", "truncated"])
    assert torch.equal(rows["next", "truncated"], rows["achieved_goal"][:, 2:] == 3)


def test_the_env_s_own_end_is_no_end_for_another_goal() -> None:
    """A row that was terminated by its own goal goes on for another one; without ``truncated``, done says as much."""
    transform = hindsight("episode", terminated_fn=lambda a, d, info: reached(a, d, info).bool())
    buffer = buffer_of(transform)
    buffer.extend(one_episode(4).exclude(("next", "truncated")))
    rows = buffer[[3] * 50]
    hit = rows["desired_goal"][:, 2:] == 4
    assert torch.equal(rows["next", "terminated"], hit) and torch.equal(rows["next", "done"], hit)


def test_the_functions_get_rows_at_once_with_info() -> None:
    calls: list[Any] = []

    def reward(achieved: Any, desired: Any, info: Any) -> Any:
        calls.append((achieved, desired, info))
        return -np.linalg.norm(achieved - desired, axis=-1) - info["action"]

    buffer = buffer_of(hindsight("final", 1, reward_fn=reward, info_keys="action", as_numpy=True))
    batch = one_episode(5)
    batch["action"] = torch.arange(5)
    buffer.extend(batch)
    rows = buffer[[0, 1, 2, 3, 4] * 4]
    [(achieved, desired, info)] = calls
    changed = rows["relabelled"].flatten()
    assert all(isinstance(part, np.ndarray) for part in (achieved, desired, info["action"]))
    assert info["action"].tolist() == rows["action"][changed].tolist()
    assert achieved.tolist() == rows["next", "achieved_goal"][changed].tolist()
    step = rows["achieved_goal"][:, 2:][changed]
    assert torch.equal(rows["next", "reward"][changed], -(5 - (step + 1)) - step)
    assert rows["next", "reward"].dtype is torch.float32


def test_nested_goals_as_sb3_s_buffer_keeps_them() -> None:
    batch = one_episode(5)
    goals = {key: batch.pop(key) for key in ("achieved_goal", "desired_goal")}
    later = {key: batch["next"].pop(key) for key in goals}
    batch["observation"], batch["next", "observation"] = TensorDict(goals, [5]), TensorDict(later, [5])
    buffer = buffer_of(hindsight("final"), compact=True)
    buffer.extend(batch)
    rows = buffer[:]
    assert (rows["observation", "desired_goal"][:, 2] == 5).all()
    assert (rows["next", "observation", "desired_goal"][:, 2] == 5).all()
    assert rows["next", "reward"].flatten().tolist() == [0, 0, 0, 0, 1]


# --- with n-step transitions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["hindsight", "n-step"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_n_step_rewards_are_for_the_new_goal(world: Any, ends: bool, compact: bool, first: str) -> None:
    def reward(achieved: Tensor, desired: Tensor, info: Any) -> Tensor:
        return -(achieved - desired)[:, 2].abs()

    terminated = (lambda a, d, info: reached(a, d, info).bool()) if ends else None
    parts: list[Any] = [
        hindsight("episode", 2, reward_fn=reward, terminated_fn=terminated),
        MultiStepTransform(n_steps=3, gamma=0.5),
    ]
    buffer = buffer_of(
        Compose(parts if first == "hindsight" else parts[::-1]), CAPACITY, compact, batch_size=200
    )
    model, writers = world.Model(CAPACITY), world.writers(3, 1, longest=9)
    for i in range(40):
        steps = world.windows(writers, [(i % 3, i % 5 + 1), ((i + 1) % 3, 2)])
        buffer.extend(batch_of(world, steps))
        model.extend(steps)
    stored = {(s.writer, s.episode, s.step): s for s in model.slots().values()}
    for row in buffer.sample():
        writer, episode, step = row["observation"].long().tolist()
        goal, relabelled = row["desired_goal"].tolist(), bool(row["relabelled"])
        total, at = 0.0, step
        for j in range(3):
            hit = relabelled and goal[2] == at + 1
            total += 0.5**j * (-abs(at + 1 - goal[2]) if relabelled else OWN_REWARD)
            done = (
                stored[writer, episode, at].done
                if not (relabelled and ends)
                else (hit or stored[writer, episode, at].truncated)
            )
            if done or (writer, episode, at + 1) not in stored:
                break
            at += 1
        length = min(at - step + 1, 3)
        assert row["steps_to_next_obs"].item() == length
        assert row["next", "reward"].item() == pytest.approx(total)
        assert row["next", "achieved_goal"].tolist() == [writer, episode, step + length]
        assert row["next", "desired_goal"].tolist() == goal


# --- draws ----------------------------------------------------------------------------------------------------------


def test_draws_are_reproducible_from_the_buffer_s_generator() -> None:
    samples = []
    for prefetch in (None, 2):
        buffer = buffer_of(hindsight("future", 1), batch_size=32, prefetch=prefetch)
        buffer.extend(one_episode(50))
        torch.manual_seed(len(samples))  # the global generator has no part
        samples.append([buffer.sample() for _ in range(4)])
        twin = copy.deepcopy(buffer) if prefetch is None else None
        if twin is not None:
            assert (twin.sample() == buffer.sample()).all()
    assert all(bool((one == other).all()) for one, other in zip(*samples, strict=True))


def test_one_gather_of_goals_and_nothing_else_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = buffer_of(hindsight("future", 1), batch_size=64, compact=True)
    buffer.extend(one_episode(90))
    calls, read = [], buffer.storage.read_rows

    def recorded(slots: Tensor, follow: Any = None, **options: Any) -> Any:
        calls.append((len(slots), options.get("keys")))
        return read(slots, follow, **options)

    monkeypatch.setattr(buffer.storage, "read_rows", recorded)
    sample = buffer.sample()
    goals = int(sample["relabelled"].sum())
    assert calls == [(64, None), (goals, frozenset({("next", "achieved_goal")}))]


def test_goals_that_are_overwritten_meanwhile_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = buffer_of(hindsight("episode"), capacity=12)
    buffer.extend(one_episode(10, done=False))
    read, late = buffer.storage.read_rows, [one_episode(4, 1)]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if options.get("keys") is not None and late:  # while the goals are read
            buffer.extend(late.pop())
        return read(*arguments, **options)

    monkeypatch.setattr(buffer.storage, "read_rows", interrupted)
    rows = buffer[[9] * 40]  # row 9 stays, rows 0 and 1 go
    assert not late
    steps = rows["desired_goal"][:, 2]
    assert (rows["desired_goal"][:, :2] == 0).all() and steps.min() >= 3 and steps.max() == 10


def test_a_next_observation_that_moves_meanwhile_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the newest row moves, from the place that it had of its own, into the row after it."""
    buffer = buffer_of(hindsight("final"), compact=True)
    buffer.extend(one_episode(10, done=False))
    read, late = buffer.storage.read_rows, [one_episode(11, first=10, done=False)]
    late += [one_episode(1, number) for number in range(1, 5)]  # the last ones of which take its place

    def interrupted(*arguments: Any, **options: Any) -> Any:
        while options.get("keys") is not None and late:  # while the goals are read
            buffer.extend(late.pop(0))
        return read(*arguments, **options)

    monkeypatch.setattr(buffer.storage, "read_rows", interrupted)
    goals = buffer[[5] * 4]["desired_goal"]
    assert not late and goals.tolist() == [[0.0, 0.0, 11.0]] * 4


def test_slots_that_are_read_are_not_changed() -> None:
    buffer = buffer_of(hindsight("final"))
    buffer.extend(one_episode(5))
    before = buffer.storage[:].clone()
    buffer.sample(100)
    assert (buffer.storage[:] == before).all()
    assert (before["desired_goal"] == UNKNOWN).all()


# --- alone ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_a_batch_goals_come_from_each_run(strategy: str) -> None:
    batch = torch.cat([one_episode(n, number) for number, n in enumerate([3, 1, 6])])
    generator = torch.Generator().manual_seed(0)
    before = batch.clone()
    relabelled = hindsight(strategy, generator=generator)(batch)
    assert (batch == before).all() and "relabelled" not in batch
    lengths = torch.tensor([3, 1, 6])[batch["achieved_goal"][:, 1].long()]
    goal = relabelled["desired_goal"]
    lowest = {"future": batch["next", "achieved_goal"][:, 2], "final": lengths, "episode": torch.ones(10)}
    assert torch.equal(goal[:, 1], batch["achieved_goal"][:, 1])
    assert (goal[:, 2] >= lowest[strategy]).all() and (goal[:, 2] <= lengths).all()
    assert torch.equal(
        relabelled["next", "reward"][:, 0], (goal[:, 2] == batch["next", "achieved_goal"][:, 2]).float()
    )


# --- what is refused ------------------------------------------------------------------------------------------------


def test_arguments() -> None:
    for options, text in [
        ({"goal_selection_strategy": "random"}, "'future', 'final' or 'episode', got 'random'"),
        ({"n_sampled_goal": -1}, "n_sampled_goal must be at least 0, got -1"),
        ({"n_sampled_goal": math.nan}, "n_sampled_goal must be at least 0, got nan"),
        ({"info_keys": ("action", "info")}, "info_keys="),
    ]:
        with pytest.raises(ValueError, match=text):
            HindsightTransform(reached, **options)  # type: ignore[arg-type]
    for options in ({"reward_fn": None}, {"reward_fn": reached, "terminated_fn": 1}):
        with pytest.raises(TypeError, match="must be a function of"):
            HindsightTransform(**options)  # type: ignore[arg-type]
    assert repr(hindsight("final", 4)) == "HindsightTransform('final', n_sampled_goal=4, reward_fn=reached)"
    assert HindsightTransform(reached).her_ratio == pytest.approx(0.8)


def _wide(achieved: Tensor, desired: Tensor, info: Any) -> Any:
    return achieved


@pytest.mark.parametrize(
    ("change", "options", "error", "text"),
    [
        ("desired_goal", {}, KeyError, "desired_goal"),
        (("next", "achieved_goal"), {}, KeyError, "Hindsight goals are next observations"),
        (("next", "reward"), {}, KeyError, "reward"),
        (("next", "terminated"), {"terminated_fn": reached}, KeyError, "terminated"),
        (None, {"info_keys": ["force"]}, KeyError, "force"),
        (None, {"reward_fn": lambda a, d, info: 1.0}, ValueError, "one number for each of the 5 rows"),
        (None, {"reward_fn": _wide}, ValueError, r"got \[5, 3\]"),
        (
            None,
            {"reward_fn": lambda a, d, info: reached(a, d, info) * 1j},
            TypeError,
            "can hold, got torch.complex64",
        ),
        (None, {"terminated_fn": reached}, TypeError, "must return bool, got torch.float32"),
        (None, {"goal_key": "count"}, ValueError, "cannot replace the other"),
    ],
)
def test_rows_that_cannot_be_relabelled(change: Any, options: Any, error: Any, text: str) -> None:
    batch = one_episode(5)
    batch["count"] = torch.arange(5)
    buffer = buffer_of(hindsight("final", **options))
    buffer.extend(batch if change is None else batch.exclude(change))
    with pytest.raises(error, match=text):
        buffer[:]


def test_combinations() -> None:
    buffer = buffer_of(hindsight())
    with pytest.raises(ValueError, match="two HindsightTransform"):
        buffer.append_transform(Compose(hindsight()))
    with pytest.raises(ValueError, match="follows trajectories of samples"):
        buffer_of(None).append_transform(hindsight(), invert=True)
    plain = buffer_of(None)
    plain.extend(one_episode(5))
    with pytest.raises(RuntimeError, match="append it before the first extend"):
        plain.append_transform(hindsight())
    members = [buffer_of(None), buffer_of(None)]
    for member in members:
        member.extend(one_episode(5))
    with pytest.raises(ValueError, match="in an ensemble to each member"):
        ReplayBufferEnsemble(*members, batch_size=4, transform=hindsight()).sample()
    with pytest.raises(ValueError, match="flat batch"):
        hindsight()(one_episode(4).view(2, 2))


def test_members_of_an_ensemble() -> None:
    members = [buffer_of(hindsight("final")), buffer_of(hindsight("final"))]
    for number, member in enumerate(members):
        member.extend(one_episode(4 + number, number))
    sample = ReplayBufferEnsemble(*members, batch_size=20).sample()
    assert torch.equal(sample["desired_goal"][..., 2], 4 + sample["achieved_goal"][..., 1])
