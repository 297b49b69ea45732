"""Prioritized rows and slices: against a list of priorities, and what they must refuse, ignore and mark."""

import copy
import math
import pickle
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    TrajectoryIndex,
)
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.buffers.index.ring import Ring


def buffer_of(sampler: Any, rows: int = 10, capacity: int = 10, size: int = 1, seed: int = 0) -> ReplayBuffer:
    """A buffer that holds the numbers ``0 ... rows - 1``."""
    generator = torch.Generator().manual_seed(seed)
    storage = LazyTensorStorage(capacity)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=size, generator=generator)
    if rows:
        buffer.extend(torch.arange(rows))
    return buffer


def leaves(buffer: ReplayBuffer) -> list[float]:
    """Weight of each slot."""
    sampler: Any = buffer.sampler
    weights: list[float] = sampler.priorities.tree.leaves[: buffer.ring.capacity].tolist()
    return weights


def chi_square(counts: Counter[int], weights: dict[int, float]) -> float:
    """In standard deviations from its mean."""
    total, drawn = sum(weights.values()), sum(counts.values())
    assert set(counts) <= {slot for slot, weight in weights.items() if weight > 0}
    expected = {slot: drawn * weight / total for slot, weight in weights.items() if weight > 0}
    assert min(expected.values()) > 5
    statistic = sum((counts[slot] - e) ** 2 / e for slot, e in expected.items())
    freedom = len(expected) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


# -- against a list --------------------------------------------------------------------------------------------------


class Twins:
    """A buffer and a dict of priorities, written and updated alike; weights must agree at every step."""

    def __init__(self, world: Any, slices: bool, options: dict[str, Any]) -> None:
        self.world, self.slices = world, slices
        self.random = random.Random(options["seed"])
        self.length, self.strict, self.within = options["length"], options["strict"], options["within"]
        cut = min(options["cut"], self.length - 1)
        self.least = self.length - cut
        self.writers = world.writers(options["writers"], options["seed"], longest=options["longest"])
        capacity = options["capacity"]
        self.model = world.Model(capacity)
        self.priority: dict[int, float] = {}
        self.ever, self.alpha = 1.0, 0.5
        numbers: dict[str, Any] = {
            "eps": 0.0,
            "dtype": torch.double,
            "max_priority_within_buffer": self.within,
        }
        if slices:
            numbers |= {"num_slices": 4, "strict_length": self.strict, "span": (False, cut)}
            sampler: Any = PrioritizedSliceSampler(capacity, self.alpha, 0.5, fill=False, **numbers)
        else:
            sampler = PrioritizedSampler(capacity + 2, self.alpha, 0.5, **numbers)
        self.hooks = options["hooks"] or self.within
        if not self.hooks:  # rows that the sampler is not told of
            sampler.claimed = sampler.entered = lambda *_: None
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(capacity, compact_obs=options["compact"]),
            sampler=sampler,
            batch_size=4 * self.length,
            generator=torch.Generator().manual_seed(options["seed"]),
        )

    def step(self) -> None:
        """One operation by chance, and a comparison."""
        chance = self.random
        writer, rows = chance.randrange(len(self.writers)), chance.randint(1, 9)
        what = chance.choices(
            ["extend", "lanes", "fail", "update", "sample", "alpha", "elsewhere", "empty"],
            [10, 4, 3, 8, 8, 1, 1, 0.3],
        )[0]
        if what == "extend":
            windows = [(chance.randrange(len(self.writers)), chance.randint(1, 9)) for _ in range(rows // 2)]
            self.extend(self.windows([(writer, rows), *windows]))
        elif what == "lanes":
            self.extend(self.windows([(w, 1) for w in range(len(self.writers))] * rows))
        elif what == "fail":
            self.extend_fails(writer, rows)
        elif what == "update":
            self.update(chance.randrange(10**6), chance.randint(0, 30), chance.choice([0.1, 5.0]))
        elif what == "sample":
            self.sample()
        elif what == "alpha":
            self.set_alpha(chance.choice([0.0, 0.5, 1.0]))
        elif what == "elsewhere" and self.hooks:
            self.go_on_elsewhere(chance.choice(["pickle", "state", "copy"]))
        elif what == "empty":
            self.empty()
        self.weights_agree()

    def windows(self, lengths: list[tuple[int, int]]) -> list[Any]:
        steps: list[Any] = self.world.windows(self.writers, [(w % len(self.writers), n) for w, n in lengths])
        return steps

    def drop(self, rows: int) -> None:
        """What claiming ``rows`` rows gives up."""
        while len(self.model.rows) > self.model.capacity - min(rows, self.model.capacity):
            self.model.rows.popleft()
        self.priority = {slot: p for slot, p in self.priority.items() if slot in self.model.slots()}

    def extend(self, steps: list[Any]) -> None:
        self.drop(len(steps))
        default = max(self.priority.values(), default=1.0) if self.within else self.ever
        slots = self.buffer.extend(self.world.to_batch(steps))
        self.model.extend(steps)
        self.priority |= dict.fromkeys(slots.tolist(), default)

    def extend_fails(self, writer: int, rows: int) -> None:
        """After the claim: the rows to overwrite are gone, no new ones came."""
        if not self.model.rows:
            return
        storage: Any = self.buffer.storage
        writers = copy.deepcopy(self.writers)
        batch = self.world.to_batch(self.windows([(writer, rows)]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "write", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                self.buffer.extend(batch)
        self.writers = writers  # they did not get that far
        self.drop(rows)

    def update(self, seed: int, count: int, top: float) -> None:
        """Stored rows, some of them twice, some of an older generation, and -1."""
        rng = np.random.default_rng(seed)
        written, capacity = self.model.written, self.model.capacity
        slots = rng.integers(-1, min(written, capacity), count) if written else np.zeros(0, np.int64)
        oldest = written - len(self.model.rows)
        rows = oldest + (slots - oldest) % capacity
        generation = rows // capacity - (rng.random(len(slots)) < 0.3)
        priority = top * rng.random(len(slots)) * (rng.random(len(slots)) < 0.8)
        given = torch.from_numpy(generation) if seed % 2 else None
        self.buffer.update_priority(torch.from_numpy(slots), torch.from_numpy(priority), given)
        for slot, row, old, value in zip(slots, rows, generation, priority, strict=True):
            if slot in self.priority and (given is None or row // capacity == old):
                self.priority[int(slot)] = float(value)
                self.ever = max(self.ever, float(value))

    def set_alpha(self, alpha: float) -> None:
        sampler: Any = self.buffer.sampler
        sampler.alpha = self.alpha = alpha

    def go_on_elsewhere(self, way: str) -> None:
        sampler: Any = self.buffer.sampler
        if way == "pickle":
            self.buffer = pickle.loads(pickle.dumps(self.buffer))
        elif way == "copy":
            self.buffer = copy.deepcopy(self.buffer)
        else:
            fresh = copy.deepcopy(sampler)
            fresh.emptied()
            for _ in range(2):
                fresh.load_state_dict(sampler.state_dict())
            self.buffer.sampler = fresh

    def empty(self) -> None:
        self.buffer.empty()
        for writer in self.writers:
            writer.episode, writer.step = writer.episode + 1, 0
        capacity = self.model.capacity
        before = -(-self.model.written // capacity) * capacity
        self.model = self.world.Model(capacity, before)
        self.priority, self.ever = {}, 1.0

    def drawable(self) -> dict[int, float]:
        """Weight of each row that may be drawn, alone or as the start of a slice."""
        starts = self.model.slots()
        if self.slices:
            starts = self.model.starts(self.least, self.strict)
        return {slot: self.priority[slot] ** self.alpha for slot in starts}

    def sample(self) -> None:
        weights = self.drawable()
        if not sum(weights.values()):
            with pytest.raises(RuntimeError, match=r"empty|no stored trajectory|all priorities are 0"):
                self.buffer.sample()
            return
        sample, info = self.buffer.sample(return_info=True)
        slots, stored = info["index"].tolist(), self.model.slots()
        expected = self.world.to_batch([stored[slot] for slot in slots])
        assert torch.equal(sample["observation"], expected["observation"])
        assert torch.equal(sample["next", "observation"], expected["next", "observation"])
        oldest = self.model.written - len(stored)
        generation = [
            (oldest + (slot - oldest) % self.model.capacity) // self.model.capacity for slot in slots
        ]
        assert info["index_generation"].tolist() == generation
        following, first, least = self.model.next_slot(), 0, min(w for w in weights.values() if w)
        init, done = torch.zeros(2, len(slots), 1, dtype=torch.bool)
        for _ in range(4 if self.slices else 4 * self.length):
            assert weights[slots[first]] > 0
            last, init[first] = first, True
            for _ in range(self.length - 1 if self.slices else 0):
                if following[slots[last]] < 0:
                    break
                last += 1
                assert following[slots[last - 1]] == slots[last]
            done[last] = self.slices
            given = info["priority_weight"][first : last + 1]
            weight = (weights[slots[first]] / least) ** -0.5
            assert given.tolist() == pytest.approx([weight] * len(given), rel=1e-6)
            first = last + 1
        assert first == len(slots)
        assert torch.equal(sample["is_init"], init | expected["is_init"])
        assert torch.equal(sample["next", "done"], done | expected["next", "done"])
        assert torch.equal(
            sample["next", "truncated"],
            (done & ~expected["next", "terminated"]) | expected["next", "truncated"],
        )

    def weights_agree(self) -> None:
        sampler: Any = self.buffer.sampler
        if sampler._changing or not sampler.priorities.in_step or (self.slices and sampler._least is None):
            return  # the next use starts over
        if not self.hooks:
            sampler._catch_up(self.buffer.ring)
        weights = self.drawable()
        capacity = self.model.capacity
        priorities = sampler.priorities
        assert np.flatnonzero(priorities.drawable).tolist() == sorted(weights)
        assert leaves(self.buffer) == [weights.get(slot, 0.0) for slot in range(capacity)]
        assert priorities.values[:capacity].tolist() == [self.priority.get(s, 0.0) for s in range(capacity)]
        top = max(self.priority.values(), default=1.0) if self.within else self.ever
        assert sampler.default_priority == top
        assert priorities.tree.least == min((w for w in weights.values() if w), default=math.inf)


OPTIONS = st.fixed_dictionaries(
    {
        "capacity": st.integers(1, 60),
        "writers": st.integers(1, 5),
        "longest": st.sampled_from([1, 4, 12, 40]),
        "seed": st.integers(0, 10**6),
        "length": st.integers(1, 7),
        "strict": st.booleans(),
        "cut": st.sampled_from([0, 0, 1, 3, 6]),
        "hooks": st.booleans(),
        "within": st.booleans(),
        "compact": st.booleans(),
    }
)


@pytest.mark.parametrize("slices", [False, True])
def test_weights_equal_those_of_a_list(world: Any, slices: bool) -> None:
    @examples(20, derandomize=True)
    @given(OPTIONS)
    def walk(options: dict[str, Any]) -> None:
        twins = Twins(world, slices, options)
        for _ in range(60):
            twins.step()

    walk()


# -- drawing ---------------------------------------------------------------------------------------------------------


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    buffer = buffer_of(PrioritizedSampler(30, 0.6, 0.4), rows=41, capacity=30, size=5000)
    priority = torch.rand(30, generator=torch.Generator().manual_seed(3))
    buffer.update_priority(torch.arange(30), priority)
    counts: Counter[int] = Counter()
    for _ in range(20):
        counts.update(buffer.sample(return_info=True)[1]["index"].tolist())
    weights = {slot: (p + 1e-8) ** 0.6 for slot, p in enumerate(priority.tolist())}
    assert abs(chi_square(counts, weights)) < 4


@pytest.mark.parametrize("strict", [False, True])
def test_slices_are_drawn_in_proportion_to_the_priority_of_their_first_row(world: Any, strict: bool) -> None:
    """Interleaved writers, a ring that wrapped, trajectories shorter than a slice."""
    sampler = PrioritizedSliceSampler(40, 1.0, 1.0, eps=0.0, slice_len=4, strict_length=strict)
    generator = torch.Generator().manual_seed(0)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(40), sampler=sampler, batch_size=4000, generator=generator
    )
    writers, model = world.writers(3, 5, longest=9), world.Model(40)
    for _ in range(12):
        steps = world.windows(writers, [(0, 2), (1, 3), (2, 1), (0, 1)])
        buffer.extend(world.to_batch(steps))
        model.extend(steps)
    priority = 0.05 + torch.rand(40, generator=generator)
    buffer.update_priority(torch.arange(40), priority)
    legal = model.starts(4, strict)
    assert strict or min(legal.values()) < 4
    counts: Counter[int] = Counter()
    for _ in range(20):
        sample, info = buffer.sample(return_info=True)
        counts.update(info["index"][sample["is_init"].flatten() & sample_starts(sample)].tolist())
    assert abs(chi_square(counts, {slot: float(priority[slot]) for slot in legal})) < 4


def sample_starts(sample: Any) -> torch.Tensor:
    """Rows after which a done row stands."""
    done = sample["next", "done"].flatten()
    return torch.cat([torch.ones(1, dtype=torch.bool), done[:-1]])


def test_new_rows_have_the_highest_priority_ever() -> None:
    buffer = buffer_of(PrioritizedSampler(10, 1.0, 0.0, eps=0.0), rows=4)
    assert leaves(buffer)[:5] == [1, 1, 1, 1, 0]
    buffer.update_priority(torch.arange(4), torch.tensor([0.5, 0.25, 4.0, 0.125]))
    buffer.update_priority(torch.tensor([2]), 2.0)
    buffer.extend(torch.arange(2))
    assert leaves(buffer)[:7] == [0.5, 0.25, 2, 0.125, 4, 4, 0]
    buffer.empty()
    buffer.extend(torch.arange(1))
    assert leaves(buffer)[:2] == [1, 0]


def test_new_rows_have_the_highest_priority_stored() -> None:
    sampler = PrioritizedSampler(4, 1.0, 0.0, eps=0.0, max_priority_within_buffer=True)
    buffer = buffer_of(sampler, rows=2, capacity=4)
    buffer.update_priority(torch.arange(2), torch.tensor([0.5, 0.25]))
    buffer.extend(torch.arange(2))
    assert leaves(buffer) == [0.5, 0.25, 0.5, 0.5]
    buffer.update_priority(torch.tensor([0, 2, 3]), torch.tensor([8.0, 0.125, 0.125]))
    buffer.extend(torch.arange(1))  # in place of the 8
    assert leaves(buffer) == [0.25, 0.25, 0.125, 0.125]
    buffer.extend(torch.arange(4))
    assert leaves(buffer) == [1, 1, 1, 1]  # none was left


def test_weights_are_relative_to_the_least_of_the_rows_that_can_be_drawn(world: Any) -> None:
    """The last row of each trajectory starts no slice: its small priority must not count."""
    sampler = PrioritizedSliceSampler(6, 1.0, 1.0, eps=0.0, slice_len=2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=200)
    buffer.extend(world.to_batch(world.episode(0, 0, 3) + world.episode(0, 1, 3)))
    buffer.update_priority(torch.arange(6), torch.tensor([2.0, 4.0, 1e-6, 2.0, 4.0, 1e-6]))
    sample, info = buffer.sample(return_info=True)
    expected = {0: 1.0, 1: 0.5, 3: 1.0, 4: 0.5}
    index, weight = info["index"].view(-1, 2), info["priority_weight"].view(-1, 2)
    assert set(index[:, 0].tolist()) == set(expected)
    assert all(w.tolist() == [expected[int(i[0])]] * 2 for i, w in zip(index, weight, strict=True))
    assert sample["is_init"].view(-1, 2).tolist() == [[True, False]] * 100
    assert sample["next", "done"].view(-1, 2).tolist() == [[False, True]] * 100


def test_rows_that_are_being_overwritten_are_not_drawn(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for sampler in (PrioritizedSampler(10, 1.0, 1.0), PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2)):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=200)
        buffer.extend(world.to_batch(world.episode(0, 0, 10)))
        buffer.sample()
        buffer.update_priority(torch.arange(3), 1e9)
        storage: Any = buffer.storage
        write, seen = storage.write, []

        def look(*given: Any, buffer: Any = buffer, write: Any = write, seen: list[int] = seen) -> None:
            seen += buffer.sample(return_info=True)[1]["index"].tolist()
            buffer.update_priority(torch.arange(3), 1e9)  # of rows that are gone
            write(*given)

        monkeypatch.setattr(storage, "write", look)
        buffer.extend(world.to_batch(world.episode(0, 1, 3)))
        assert set(seen) == set(range(3, 10))
        assert leaves(buffer)[0] == leaves(buffer)[1] != leaves(buffer)[4]


def test_updates_of_rows_overwritten_since_are_ignored() -> None:
    """Priorities of overwritten rows do not go to the new ones."""
    buffer = buffer_of(PrioritizedSampler(4, 1.0, 1.0, eps=0.0), rows=4, capacity=4, size=50)
    _, info = buffer.sample(return_info=True)
    buffer.extend(torch.arange(2))
    buffer.update_priority(info["index"], torch.full((50,), 7.0), info["index_generation"])
    assert leaves(buffer) == [1, 1, 7, 7]
    buffer.update_priority(torch.tensor([0]), 3.0)  # without generation: the row that stands there
    assert leaves(buffer) == [3, 1, 7, 7]
    generation = buffer.sample(return_info=True)[1]
    newer = dict(zip(generation["index"].tolist(), generation["index_generation"].tolist(), strict=True))
    assert {newer[i] for i in newer if i < 2} <= {1} and {newer[i] for i in newer if i > 1} <= {0}


def test_one_row() -> None:
    for sampler in (PrioritizedSampler(1, 0.7, 0.5), PrioritizedSampler(3, 0.7, 0.5)):
        buffer = buffer_of(sampler, rows=0, capacity=1, size=3)
        for value in range(5):
            buffer.extend(torch.tensor([value]))
            buffer.update_priority(0, 0.0)
            sample, info = buffer.sample(return_info=True)
            assert sample.tolist() == [value] * 3
            assert info["priority_weight"].tolist() == [1.0] * 3
            assert info["index_generation"].tolist() == [value] * 3


def test_priorities_that_are_all_0() -> None:
    buffer = buffer_of(PrioritizedSampler(10, 0.7, 0.5), size=1000)
    buffer.update_priority(torch.arange(10), 0.0)
    sample, info = buffer.sample(return_info=True)
    assert set(sample.tolist()) == set(range(10)) and set(info["priority_weight"].tolist()) == {1.0}
    buffer = buffer_of(PrioritizedSampler(10, 0.7, 0.5, eps=0.0), size=1000)
    buffer.update_priority(torch.arange(10), 0.0)
    with pytest.raises(RuntimeError, match="all priorities are 0 and so is eps"):
        buffer.sample()
    buffer.update_priority(torch.tensor([4]), 1e-30)
    assert set(buffer.sample().tolist()) == {4}


def test_alpha_0_is_uniform_and_keeps_the_priorities() -> None:
    """Priorities far from 0 stay apart."""
    buffer = buffer_of(PrioritizedSampler(4, 0.0, 1.0, eps=0.0), rows=4, capacity=4, size=100)
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 4.0, 9.0, 16.0]))
    assert leaves(buffer) == [1, 1, 1, 1]
    sampler: Any = buffer.sampler
    sampler.alpha, sampler.beta = 0.5, 2.0
    _, info = buffer.sample(return_info=True)
    assert leaves(buffer) == [1, 2, 3, 4]
    assert torch.equal(info["priority_weight"], (info["index"] + 1.0) ** -2)


@pytest.mark.parametrize("with_generator", [False, True])
def test_the_torch_seed_decides(with_generator: bool) -> None:
    """Draws come from the buffer's generator, not from NumPy's global one."""

    def drawn(seed: int, other: int) -> list[int]:
        np.random.seed(other)
        torch.manual_seed(other if with_generator else seed)
        buffer = buffer_of(PrioritizedSampler(10, 0.7, 0.5), size=20, seed=seed)
        if not with_generator:
            buffer.generator = None
        numbers: list[int] = torch.cat([buffer.sample(), buffer.sample()]).tolist()
        return numbers

    assert drawn(1, 2) == drawn(1, 3) != drawn(2, 3)


# -- slices: what the peer gets wrong ---------------------------------------------------------------------------------


def test_another_batch_size_draws_slices_of_another_length(world: Any) -> None:
    """Slices of another length do not cross trajectories."""
    sampler = PrioritizedSliceSampler(100, 1.0, 1.0, num_slices=4, cache_values=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler)
    buffer.extend(world.to_batch([s for e in range(4) for s in world.episode(0, e, 25)]))
    for size in (8, 80, 4, 100):
        for _ in range(10):
            where = buffer.sample(size)["observation"].view(4, size // 4, 3)
            assert (where[:, :, 1] == where[:, :1, 1]).all()
            assert (where[:, 1:, 2] - where[:, :-1, 2] == 1).all()


def test_a_sample_that_fails_changes_nothing(world: Any) -> None:
    sampler = PrioritizedSliceSampler(20, 1.0, 1.0, num_slices=2, strict_length=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    buffer.extend(world.to_batch(world.episode(0, 0, 5) + world.episode(0, 1, 7)))
    buffer.sample(4)
    before = leaves(buffer)
    with pytest.raises(RuntimeError, match="no stored trajectory has 9 consecutive rows, the longest has 7"):
        buffer.sample(18)
    with pytest.raises(ValueError, match="divisible"):
        buffer.sample(5)
    buffer.sample(4)
    assert leaves(buffer) == before


def test_init_key_none_leaves_what_the_env_said(world: Any) -> None:
    sampler = PrioritizedSliceSampler(5, 1.0, 1.0, slice_len=2, init_key=None, truncated_key=None)
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=20)
    buffer.extend(world.to_batch(world.episode(0, 0, 5)))
    sample = buffer.sample()
    assert torch.equal(sample["is_init"], sample["step_count"] == 0)
    assert torch.equal(sample["next", "done"], sample["step_count"] == 4)


def test_span_lets_slices_end_early(world: Any) -> None:
    lengths = {}
    for span in (False, (False, 1), True):
        sampler = PrioritizedSliceSampler(6, 0.0, 1.0, slice_len=3, strict_length=True, span=span)
        buffer = ReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=300)
        buffer.extend(world.to_batch(world.episode(0, 0, 6)))
        done = buffer.sample()["next", "done"].flatten().nonzero().flatten()
        lengths[span] = set(torch.diff(done, prepend=torch.tensor([-1])).tolist())
    assert lengths == {False: {3}, (False, 1): {2, 3}, True: {1, 2, 3}}
    with pytest.raises(ValueError, match=r"span\[0\] must be False"):
        PrioritizedSliceSampler(6, 0.0, 1.0, slice_len=3, span=(1, 1))


def test_slices_need_an_index() -> None:
    sampler = PrioritizedSliceSampler(4, 1.0, 1.0, slice_len=2)
    ring = Ring(4)
    with pytest.raises(RuntimeError, match="empty"):
        sampler.draw(ring, 4, None, False)
    ring.claim(2)
    ring.publish(2)
    with pytest.raises(TypeError, match="PrioritizedSliceSampler draws from a TrajectoryIndex, got Ring"):
        sampler.draw(ring, 4, None, False)


# -- updates ---------------------------------------------------------------------------------------------------------


def test_index_and_priority_may_have_any_form() -> None:
    forms: list[tuple[Any, Any]] = [
        (torch.tensor([1, 3]), torch.tensor([2.0, 5.0])),
        (torch.tensor([[1], [3]]), torch.tensor([[2.0], [5.0]])),
        (torch.tensor([1, 3]), torch.tensor([[2.0], [5.0]])),
        (torch.tensor([[1], [3]]), torch.tensor([2.0, 5.0])),
        (torch.tensor([[1, 3]], dtype=torch.int32), torch.tensor([[2, 5]])),
        (torch.tensor([1, -1, 3, -1]), torch.tensor([2.0, torch.nan, 5.0, -1.0], requires_grad=True)),
        (torch.tensor([3, 3, 1, 3]), torch.tensor([9.0, 1.0, 2.0, 5.0], dtype=torch.float64)),
    ]
    buffer = buffer_of(PrioritizedSampler(4, 1.0, 1.0, eps=0.0), rows=4, capacity=4)
    for index, priority in forms:
        buffer.update_priority(torch.arange(4), 1.0)
        buffer.update_priority(index, priority)
        assert leaves(buffer) == [1, 2, 1, 5]
    buffer.update_priority(2, 7.0)
    buffer.update_priority(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    buffer.update_priority(torch.tensor([]), 3.0)
    assert leaves(buffer) == [1, 2, 7, 5]
    buffer.update_priority(torch.tensor([0, 1]), 4.0)
    assert leaves(buffer) == [4, 4, 7, 5]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("max", [4.0, 6.0]), ("min", [1.0, 0.5]), ("mean", [2.5, 2.5]), ("median", [2, 1])],
)
def test_several_priorities_of_a_row_become_one(reduction: str, expected: list[float]) -> None:
    buffer = buffer_of(PrioritizedSampler(2, 1.0, 1.0, 0.0, reduction=reduction), rows=2, capacity=2)
    priority = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.5, 1.0, 2.5, 6.0]])
    for several in (priority, priority.view(2, 2, 2)):
        buffer.update_priority(torch.arange(2), several)
        assert leaves(buffer) == expected


@pytest.mark.parametrize(
    ("index", "priority", "error", "text"),
    [
        ([0, 1, 2], [1.0, torch.nan, -1.0], ValueError, r"priority\[1\] is nan"),
        ([0, 1, 2], [1.0, 2.0, -0.5], ValueError, r"priority\[2\] is -0.5"),
        ([0, 1], [torch.inf, 1.0], ValueError, r"priority\[0\] is inf"),
        ([0], [1e39], ValueError, r"priority\[0\] is 1e\+39: .* that torch.float32 can hold"),
        (
            [0, 10],
            [1.0, 1.0],
            IndexError,
            r"index\[1\] is 10, where no row has been stored: the buffer has 7 rows",
        ),
        (
            [0, 7],
            [1.0, 1.0],
            IndexError,
            r"index\[1\] is 7, where no row has been stored: the buffer has 7 rows",
        ),
        ([-2, 0], [1.0, 1.0], IndexError, r"index\[0\] is -2"),
        ([0, 1, 2], [1.0, 1.0], ValueError, r"one entry per index, got \[2\] for 3"),
        ([0, 1, 2], [], ValueError, r"one entry per index, got \[0\] for 3"),
        ([0.0, 1.0], [1.0, 1.0], TypeError, "index must be integers, got torch.float32"),
        ([True, False], [1.0, 1.0], TypeError, "index must be integers, got torch.bool"),
    ],
)
def test_bad_updates_change_nothing(index: Any, priority: Any, error: type[Exception], text: str) -> None:
    buffer = buffer_of(PrioritizedSampler(10, 1.0, 1.0), rows=7)
    before = leaves(buffer)
    with pytest.raises(error, match=text):
        buffer.update_priority(torch.tensor(index), torch.tensor(priority, dtype=torch.float64))
    assert leaves(buffer) == before
    sampler: Any = buffer.sampler
    assert sampler.default_priority == 1.0


def test_bad_generations() -> None:
    buffer = buffer_of(PrioritizedSampler(10, 1.0, 1.0))
    with pytest.raises(ValueError, match="generation must have 2 entries, like index, got 1"):
        buffer.update_priority(torch.arange(2), 1.0, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"generation must be integers, got torch.float32"):
        buffer.update_priority(torch.arange(2), 1.0, torch.zeros(2))


def test_mark_update_gives_the_priority_of_new_rows() -> None:
    buffer = buffer_of(PrioritizedSampler(3, 1.0, 1.0, eps=0.0), rows=3, capacity=3)
    buffer.update_priority(torch.arange(3), torch.tensor([0.5, 3.0, 0.25]))
    sampler: Any = buffer.sampler
    sampler.mark_update(buffer.ring, torch.tensor([0]))
    assert leaves(buffer) == [3, 3, 0.25]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"alpha": -0.1}, "alpha must be a number of at least 0 and below 1e.06, got -0.1"),
        ({"beta": -1}, "beta must be a number of at least 0, got -1"),
        ({"alpha": math.nan}, "alpha must be"),
        ({"beta": math.inf}, "beta must be"),
        ({"eps": -1e-8}, "eps must be"),
        ({"max_capacity": 0}, "max_capacity must be an integer of at least 1, got 0"),
        ({"max_capacity": 2.0}, "max_capacity must be"),
        ({"reduction": "sum"}, "reduction must be 'max', 'min', 'median' or 'mean', got 'sum'"),
        ({"dtype": torch.float16}, "dtype must be torch.float32 or torch.float64, got torch.float16"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PrioritizedSampler(**{"max_capacity": 10, "alpha": 0.7, "beta": 0.5} | arguments)
    with pytest.raises(ValueError, match=text):
        PrioritizedSliceSampler(**{"max_capacity": 10, "alpha": 0.7, "beta": 0.5, "slice_len": 2} | arguments)


def test_numbers_that_may_be_set_are_checked() -> None:
    buffer = buffer_of(PrioritizedSampler(10, 1.0, 1.0, dtype=torch.double))
    sampler: Any = buffer.sampler
    buffer.update_priority(0, torch.tensor(1e200, dtype=torch.double))
    for name, value, text in (
        ("alpha", -1.0, "alpha must be"),
        ("beta", -1.0, "beta must be"),
        ("alpha", 2.0, "weights too large: priorities up to 1e\\+200"),
    ):
        with pytest.raises(ValueError, match=text):
            setattr(sampler, name, value)
    assert (sampler.alpha, sampler.beta) == (1.0, 1.0)
    assert repr(sampler) == "PrioritizedSampler(alpha=1.0, beta=1.0, eps=1e-08, reduction='max')"


def test_a_buffer_larger_than_max_capacity_is_refused() -> None:
    buffer = buffer_of(PrioritizedSampler(9, 1.0, 1.0), rows=0)
    with pytest.raises(ValueError, match="max_capacity=9 is less than the buffer's 10 rows"):
        buffer.extend(torch.arange(3))


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2])
def test_loaded_state_draws_the_same(world: Any, times: int) -> None:

    def made() -> ReplayBuffer:
        sampler = PrioritizedSliceSampler(20, 0.7, 0.5, slice_len=3)
        generator = torch.Generator().manual_seed(0)
        return ReplayBuffer(
            storage=LazyTensorStorage(20), sampler=sampler, batch_size=30, generator=generator
        )

    buffer, other = made(), made()
    writer = world.writers(1, 0)
    for _ in range(4):
        buffer.extend(world.to_batch(world.windows(writer, [(0, 8)])))
        _, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], 3 * torch.rand(len(info["index"])))
    sampler, loaded = buffer.sampler, other.sampler
    assert isinstance(sampler, PrioritizedSampler) and isinstance(loaded, PrioritizedSampler)
    sampler.beta = 0.25
    state = buffer.state_dict()
    for _ in range(times):
        other.load_state_dict(state)
    assert loaded.default_priority == sampler.default_priority > 1
    for _ in range(3):
        (left, said), (right, heard) = buffer.sample(return_info=True), other.sample(return_info=True)
        assert all(torch.equal(said[key], heard[key]) for key in said)
        assert torch.equal(left["observation"], right["observation"])
    assert leaves(buffer) == leaves(other)


def test_state_that_does_not_fit_is_refused() -> None:
    state = buffer_of(PrioritizedSampler(10, 1.0, 1.0)).sampler.state_dict()
    for other in (PrioritizedSampler(9, 1.0, 1.0), PrioritizedSampler(10, 1.0, 1.0, dtype=torch.double)):
        with pytest.raises(ValueError, match=r"the state has 10 priorities of torch.float32"):
            other.load_state_dict(state)


def test_interrupted_change_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = buffer_of(PrioritizedSampler(10, 1.0, 1.0, eps=0.0))
    sampler: Any = buffer.sampler

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for method in ("fill", "put", "weigh_all"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sampler.priorities, method, interrupted)
            sampler.alpha = 2.0 if method == "weigh_all" else sampler.alpha
            if method == "put":
                buffer.update_priority(0, 1.0)
            else:
                buffer.extend(torch.arange(2))
    assert len(buffer) == 8  # two rows were given up, and none came
    sample, info = buffer.sample(1000, return_info=True)
    assert set(info["index"].tolist()) == set(range(2, 10)) == set(sample.tolist())
    assert leaves(buffer) == [0, 0] + [1] * 8


def test_rows_written_before_the_sampler_came(world: Any) -> None:
    index, model = TrajectoryIndex(17), world.Model(17)
    writers = world.writers(2, 1)
    sampler = PrioritizedSliceSampler(17, 1.0, 1.0, slice_len=3, strict_length=True)
    for _ in range(9):
        steps = world.windows(writers, [(0, 3), (1, 4)])
        index.write(Fragments.read(world.to_batch(steps), BoundaryKeys()))
        model.extend(steps)
        draw = sampler.draw(index, 30, None, follow=False)
        assert draw.firsts is not None
        assert set(draw.slots[draw.firsts].tolist()) <= set(model.starts(3, strict=True))
        assert np.flatnonzero(sampler.priorities.drawable).tolist() == sorted(model.starts(3, strict=True))


@pytest.mark.parametrize("rows", [0, 10])
def test_slices_of_a_ring_without_rows(world: Any, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A sample between the claim of all rows and their publication looks at no fragment that is gone."""
    sampler = PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=3)
    generator = torch.Generator().manual_seed(2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=30, generator=generator)
    steps = world.episode(1, 0, 10)
    if rows:
        buffer.extend(world.to_batch(steps))

    def full(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="cannot sample from an empty buffer"):
            buffer.sample()
        raise OSError

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(buffer.storage, "write", full)
        buffer.extend(world.to_batch(steps))
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer"):
        buffer.sample()
    buffer.extend(world.to_batch(steps))
    assert set(buffer.sample()["step_count"].flatten().tolist()) == set(range(10))


@pytest.mark.parametrize("make", [PrioritizedSampler, PrioritizedSliceSampler])
def test_stats_count_the_priorities(make: Any) -> None:
    sampler = make(64, alpha=0.7, beta=0.5) if make is PrioritizedSampler else make(64, 0.7, 0.5, slice_len=4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), sampler=sampler, batch_size=8)
    plain = ReplayBuffer(storage=LazyTensorStorage(64), sampler=SliceSampler(slice_len=4), batch_size=8)
    done = torch.zeros(32, 1, dtype=torch.bool)
    batch = TensorDict({"is_init": torch.arange(32)[:, None] == 0, "next": {"done": done}}, [32])
    for each in (buffer, plain):
        each.extend(batch)
    index = plain.stats()["bytes"] - plain.storage.nbytes if make is PrioritizedSliceSampler else 0
    # At least a priority of 4 bytes and a weight for each row.
    assert sampler.nbytes >= 64 * 8
    assert buffer.stats()["bytes"] == buffer.storage.nbytes + index + sampler.nbytes
