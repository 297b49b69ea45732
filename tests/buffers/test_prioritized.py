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
from hypothesis import given, settings
from hypothesis import strategies as st

from flatroll.buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
)


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
    weights: list[float] = sampler._priorities.tree.leaves[: buffer._ring.capacity].tolist()
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
        span = options["span"]
        right = span[1] if isinstance(span, tuple) else span
        self.least = 1 if right is True else max(self.length - right, 1)
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
            numbers |= {"num_slices": 4, "strict_length": self.strict, "span": span}
            sampler: Any = PrioritizedSliceSampler(capacity, self.alpha, 0.5, **numbers)
        else:
            sampler = PrioritizedSampler(capacity + 2, self.alpha, 0.5, **numbers)
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
        elif what == "elsewhere":
            self.go_on_elsewhere(chance.choice(["pickle", "state", "copy"]))
        else:
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
        if sampler._changing or not sampler._priorities.in_step or (self.slices and sampler._least is None):
            return  # the next use starts over
        weights = self.drawable()
        capacity = self.model.capacity
        priorities = sampler._priorities
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
        "span": st.sampled_from([False, False, True, 1, (False, 3)]),
        "within": st.booleans(),
        "compact": st.booleans(),
    }
)


@pytest.mark.parametrize("slices", [False, True])
def test_weights_equal_those_of_a_list(world: Any, slices: bool) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(OPTIONS)
    def walk(options: dict[str, Any]) -> None:
        twins = Twins(world, slices, options)
        for _ in range(60):
            twins.step()

    walk()
