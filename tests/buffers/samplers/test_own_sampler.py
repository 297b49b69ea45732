"""Samplers that users write: what the base asks of them, and that rows are found under every writer."""

from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers import (
    Draw,
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    Ring,
    Sampler,
    SliceSampler,
    TensorDictMaxValueWriter,
)
from flatroll.buffers.samplers.prioritized import PrioritizedSampler
from flatroll.buffers.samplers.without_replacement import SamplerWithoutReplacement


class NewestSampler(Sampler):
    """The newest row, and those before it, one after another."""

    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        version, rows = ring.snapshot()
        slots = ring.slots_by_age(rows - 1 - torch.arange(batch_size), version)
        return Draw(slots, follow=ring.follow(slots) if follow else None, version=version)


def scored(scores: list[float], first: int) -> TensorDict:
    n = torch.arange(first, first + len(scores))
    return TensorDict({"n": n, "score": torch.tensor(scores)}, [len(scores)])


def test_a_sampler_by_age_finds_its_rows_in_a_ring() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), sampler=NewestSampler(), batch_size=3)
    for last in range(3, 14):
        buffer.extend(scored([0.0] * 4, last - 3))
        assert buffer.sample()["n"].tolist() == [last, last - 1, last - 2]
        buffer.extend(scored([0.0], 100))


def test_a_sampler_by_age_finds_its_rows_under_a_writer_that_keeps_the_best() -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(4),
        sampler=NewestSampler(),
        writer=TensorDictMaxValueWriter(rank_key="score"),
        batch_size=3,
    )
    kept: list[tuple[float, int]] = []
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        scores = torch.rand(3, generator=generator).tolist()
        buffer.extend(scored(scores, 3 * step))
        kept = sorted([*kept, *zip(scores, range(3 * step, 3 * step + 3), strict=True)])[-4:]
        newest = sorted((n for _, n in kept), reverse=True)[:3]
        assert buffer.sample(len(newest))["n"].tolist() == newest


def test_ages_cover_all_rows_after_a_failed_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that made room for a write that failed have no age any more."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(4),
        sampler=NewestSampler(),
        writer=TensorDictMaxValueWriter(rank_key="score"),
        batch_size=2,
    )
    buffer.extend(scored([1.0, 2.0, 3.0, 4.0], 0))
    assert buffer.sample(4)["n"].tolist() == [3, 2, 1, 0]

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(buffer.storage, "put", fail)
        buffer.extend(scored([8.0, 9.0], 4))
    assert buffer.sample(2)["n"].tolist() == [3, 2]
    buffer.extend(scored([5.0], 6))
    assert buffer.sample(3)["n"].tolist() == [6, 3, 2]


def test_a_sampler_by_age_gives_next_observations_of_a_compact_storage(world: Any) -> None:
    storage = LazyTensorStorage(30, compact_obs=True)
    buffer = ReplayBuffer(storage=storage, sampler=NewestSampler(), batch_size=8)
    for episode in range(6):
        buffer.extend(world.to_batch(world.episode(0, episode, 9)))
    sample = buffer.sample()
    assert torch.equal(sample["next", "observation"], sample["observation"] + torch.tensor([0, 0, 1]))


def test_a_sampler_without_draw_cannot_be_made() -> None:
    class Half(Sampler):
        def mark(self, columns: Any, draw: Draw) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract"):
        Sampler()  # type: ignore[abstract]


class Counting(RandomSampler):
    """Counts what is written."""

    def __init__(self) -> None:
        self.rows = 0

    def entered(self, ring: Ring, first: int, rows: int) -> None:
        self.rows += rows


class Declared(Counting):
    """The same, which says that no draw depends on it."""

    stateful = False


def test_a_sampler_says_what_it_remembers() -> None:
    kinds: list[type[Sampler]] = [RandomSampler, SliceSampler, NewestSampler, Counting, Declared]
    kinds += [PrioritizedSampler, SamplerWithoutReplacement]
    found = Counter(kind.__name__ for kind in kinds if kind.stateful)
    assert set(found) == {"Counting", "PrioritizedSampler", "SamplerWithoutReplacement"}
    assert [kind.needs_index for kind in (RandomSampler, SliceSampler)] == [False, True]
    sampler = Counting()
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler)
    buffer.extend(torch.arange(3))
    assert sampler.rows == 3
    for kind, refused in ((Counting, True), (Declared, False)):
        shared = ReplayBuffer(storage=LazyMemmapStorage(4), sampler=kind())
        shared.extend(torch.arange(3))
        if refused:
            with pytest.raises(
                RuntimeError, match="the buffer has a Counting, which other processes cannot see"
            ):
                shared.__getstate__()["storage"].__getstate__()
        else:
            assert shared.__getstate__()["storage"].__getstate__()


def test_a_sampler_told_of_rows_in_order_does_not_go_with_a_writer_that_keeps_the_best() -> None:
    with pytest.raises(TypeError, match="Counting overrides claimed or entered"):
        ReplayBuffer(
            storage=LazyTensorStorage(4),
            sampler=Counting(),
            writer=TensorDictMaxValueWriter(rank_key="score"),
        )


def test_ages_are_those_of_the_rows(generator: torch.Generator) -> None:
    ring = Ring(5)
    numbers: list[int] = []
    slots: dict[int, int] = {}
    for rows in torch.randint(0, 6, (40,), generator=generator).tolist():
        first = ring.claim(rows)
        ring.publish(rows)
        numbers += range(first, first + rows)
        slots |= {number: number % 5 for number in numbers}
        stored: Tensor = ring.slots_by_age(torch.arange(len(ring)))
        assert stored.tolist() == [slots[number] for number in numbers[-5:]] == ring.stored().tolist()
