"""Samples beside writers: what another thread overwrites while it is read is drawn again, and nothing else."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import scaled
from tensordict import TensorDict

from flatroll.buffers import (
    LazyTensorStorage,
    ListStorage,
    MultiStepTransform,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SliceSampler,
)
from flatroll.layout import audit
from flatroll.layout.keys import MASK

CAPACITY = 120


def batch_of(first: int, count: int, length: int = 1000) -> TensorDict:
    """Rows ``first ... first + count - 1`` of a stream of episodes of ``length`` rows."""
    n = torch.arange(first, first + count)
    done = (n % length == length - 1)[:, None]
    after = {
        "observation": n + 1,
        "reward": n[:, None].float(),
        "done": done,
        "terminated": done.clone(),
        "truncated": torch.zeros_like(done),
    }
    ids = {"traj_ids": n // length}
    return TensorDict(
        {"observation": n, "is_init": (n % length == 0)[:, None], "next": after, "collector": ids}, [count]
    )


class Planted:
    """A buffer that is written to between a draw and its read: read number i calls ``writes[i]`` first."""

    def __init__(self, buffer: ReplayBuffer, length: int = 1000) -> None:
        self.buffer = buffer
        self.length = length
        self.written = 0
        self.writes: list[int] = []
        self.reads: list[int] = []
        self.extend(buffer.storage.max_size)

        read = buffer.storage.read_rows

        def late(slots: Any, *args: Any, **options: Any) -> Any:
            self.reads.append(len(slots))
            if self.writes:
                self.extend(self.writes.pop(0))
            return read(slots, *args, **options)

        buffer.storage.read_rows = late  # type: ignore[method-assign]

    def extend(self, count: int) -> None:
        if count:
            self.buffer.extend(batch_of(self.written, count, self.length))
            self.written += count

    def sample(self, *writes: int) -> tuple[Any, dict[str, Any]]:
        self.writes = list(writes)
        self.reads.clear()
        sample, info = self.buffer.sample(return_info=True)
        return sample, info


def planted(
    sampler: Sampler | None = None,
    batch_size: int = 60,
    *,
    length: int = 1000,
    compact: bool = False,
    seed: int = 0,
    **options: Any,
) -> Planted:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, compact_obs=compact),
        sampler=sampler,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    return Planted(buffer, length)


@pytest.mark.parametrize("compact", [False, True])
def test_only_the_rows_that_were_overwritten_are_drawn_again(compact: bool) -> None:
    undisturbed, _ = planted(compact=compact).sample()
    before = undisturbed["observation"]

    world = planted(compact=compact)
    sample, info = world.sample(30)  # rows 0 ... 29 are overwritten between the draw and the read
    after = sample["observation"]
    # A compact storage kept the next observation of the newest row apart; row 120 holds it now.
    lost = (before < 30) | ((before == 119) & compact)

    assert 0 < lost.sum() < 60
    assert world.reads == [60, int(lost.sum())]
    assert torch.equal(after[~lost], before[~lost])
    assert (after >= 30).all() and (after < 150).all()
    assert torch.equal(sample["next", "observation"], after + 1)
    assert torch.equal(world.buffer[info["index"]]["observation"], after)


@pytest.mark.parametrize("compact", [False, True])
def test_only_the_slices_that_were_overwritten_are_drawn_again(compact: bool) -> None:
    undisturbed, _ = planted(SliceSampler(slice_len=5), compact=compact).sample()
    before = undisturbed["observation"].view(12, 5)

    world = planted(SliceSampler(slice_len=5), compact=compact)
    sample, info = world.sample(30)
    after = sample["observation"].view(12, 5)
    lost = (before < 30).any(1)

    assert 0 < lost.sum() < 12
    assert world.reads == [60, 5 * int(lost.sum())]
    assert torch.equal(after[~lost], before[~lost])
    assert (after >= 30).all() and (after.diff() == 1).all()
    assert torch.equal(sample["next", "observation"], sample["observation"] + 1)
    assert torch.equal(world.buffer[info["index"]]["observation"], sample["observation"])
    assert sample["is_init"].view(12, 5).tolist() == [[True] + [False] * 4] * 12
    assert sample["next", "truncated"].view(12, 5).tolist() == [[False] * 4 + [True]] * 12


@pytest.mark.parametrize(
    "options", [{}, {"fill": False}, {"pad_output": True}, {"span": 3}, {"by": "start"}], ids=str
)
@pytest.mark.parametrize("compact", [False, True])
def test_slices_of_different_lengths_are_replaced(options: dict[str, Any], compact: bool) -> None:
    """Episodes of 7 rows, slices of 5; the ring and the last slice of a sample cut some."""
    for seed in range(12):
        world = planted(SliceSampler(slice_len=5, **options), 50, length=7, compact=compact, seed=seed)
        sample, info = world.sample(33, 5, 0)
        assert world.reads[0] > world.reads[1]

        real = torch.ones(len(sample), dtype=torch.bool)
        if options.get("pad_output"):
            real = sample[MASK]
            assert len(sample) == 50
            assert torch.equal(sample["is_init"][:, 0], torch.arange(50) % 5 == 0)
        elif "fill" not in options:
            assert len(sample) == 50

        n = sample["observation"]
        assert (n >= 33).all()
        assert torch.equal(sample["next", "observation"], n + 1)
        assert torch.equal(info["index"], n % CAPACITY)
        assert not audit(sample[real])
        # Slices begin where the flags say, and end before the next one begins.
        inside = ~sample["is_init"][:, 0] & real
        at = inside.nonzero()[:, 0]
        assert (n[at] == n[at - 1] + 1).all()
        last = sample["next", "done"][:, 0] & real
        assert torch.equal(last[at - 1], torch.zeros(len(at), dtype=torch.bool))
        assert int(last.sum()) >= int(sample["is_init"].sum())


def test_rows_read_again_are_drawn_again_if_they_are_overwritten_too() -> None:
    world = planted()
    sample, _ = world.sample(40, 40, 40)
    assert len(world.reads) == 4 and sorted(world.reads, reverse=True) == world.reads
    # What was complete when it was read stays, although it was overwritten before the sample was.
    assert sample["observation"].min() < 120
    assert (sample["observation"] >= 40).all()


def test_a_writer_that_overwrites_all_again_and_again_waits_in_the_end() -> None:
    world = planted()
    sample, _ = world.sample(*[CAPACITY] * 8)
    assert world.reads == [60] * 9
    assert (sample["observation"] >= 8 * CAPACITY).all()


def test_an_emptied_buffer_is_drawn_from_anew() -> None:
    world = planted(SliceSampler(slice_len=5))
    read = world.buffer.storage.read_rows

    def late(*args: Any, **options: Any) -> Any:
        world.buffer.storage.read_rows = read  # type: ignore[method-assign]
        world.buffer.empty()
        world.extend(50)
        return read(*args, **options)

    world.buffer.storage.read_rows = late  # type: ignore[method-assign]
    assert (world.buffer.sample()["observation"] >= CAPACITY).all()


def frequencies(world: Planted, samples: int, written: int) -> Counter[int]:
    """Count the ages of the rows of samples, from 0 for the oldest row before the write."""
    counts: Counter[int] = Counter()
    for _ in range(samples):
        oldest = world.written - CAPACITY
        sample, _ = world.sample(written)
        counts.update((sample["observation"] - oldest).tolist())
    return counts


def chi_square(counts: Counter[int], expected: dict[int, float]) -> float:
    total = sum(counts.values())
    assert set(counts) <= set(expected)
    return sum((counts[age] - total * p) ** 2 / (total * p) for age, p in expected.items())


def test_replaced_rows_leave_the_sample_uniform() -> None:
    """A quarter of the rows is overwritten; all rows that were there before and after have the same probability."""
    counts = frequencies(planted(batch_size=400, length=10**6), scaled(quick=60, long=600), 30)
    expected = dict.fromkeys(range(30, 120), 3 / 4 / 90 + 1 / 4 / 120)
    # Rows written after the first draw can only be drawn in the place of others.
    expected |= dict.fromkeys(range(120, 150), 1 / 4 / 120)
    assert abs(sum(expected.values()) - 1) < 1e-12
    assert chi_square(counts, expected) < 119 + 5 * (2 * 119) ** 0.5


def test_replaced_slices_leave_the_sample_uniform() -> None:
    """One episode, slices of 4: 117 starts before, of which those from 30 on survive."""
    counts: Counter[int] = Counter()
    world = planted(SliceSampler(slice_len=4), 400, length=10**6)
    for _ in range(scaled(quick=200, long=2000)):
        oldest = world.written - CAPACITY
        sample, _ = world.sample(30)
        counts.update((sample["observation"][::4] - oldest).tolist())

    lost = 30 / 117
    expected = dict.fromkeys(range(30, 117), 1 / 117 + lost / 117)
    expected |= dict.fromkeys(range(117, 147), lost / 117)
    assert abs(sum(expected.values()) - 1) < 1e-12
    assert chi_square(counts, expected) < 116 + 5 * (2 * 116) ** 0.5


def test_replaced_short_slices_leave_the_sample_uniform_over_trajectories() -> None:
    """Episodes of 2 and 4 rows, slices of 4: lost slices are replaced by as many rows, not by as many slices."""

    def batch(first: int, count: int) -> TensorDict:
        made = batch_of(first, count)
        step = torch.arange(first, first + count) % 6
        done = ((step == 1) | (step == 5))[:, None]
        made["next", "done"] = done
        made["next", "terminated"] = done
        made["is_init"] = ((step == 0) | (step == 2))[:, None]
        made["collector", "traj_ids"] = made["observation"] // 6 * 2 + (step > 1)
        return made

    world = planted(SliceSampler(slice_len=4), 240, length=6)
    world.buffer.empty()
    world.written = 0

    def extend(count: int) -> None:
        if count:
            world.buffer.extend(batch(world.written, count))
            world.written += count

    world.extend = extend  # type: ignore[method-assign]
    world.extend(CAPACITY)

    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(scaled(quick=150, long=1500)):
        oldest = world.written - CAPACITY
        sample, _ = world.sample(30)
        starts = sample["is_init"][:, 0].nonzero()[:, 0]
        rows = sample["observation"][starts] - oldest
        counts.update((age // 6, int(age % 6 > 1)) for age in rows.tolist() if age < CAPACITY)

    # Of the 40 trajectories, 30 survive; each is as likely as the others, be it short or long.
    total = sum(counts.values())
    assert set(counts) == {(number, long) for number in range(5, 20) for long in (0, 1)}
    assert sum((count - total / 30) ** 2 / (total / 30) for count in counts.values()) < 29 + 5 * 58**0.5


def test_importance_weights_belong_to_one_minimum() -> None:
    priority = torch.linspace(1, 3, CAPACITY)

    def prioritized(least: int) -> Planted:
        world = planted(PrioritizedSampler(CAPACITY, alpha=1.0, beta=0.5, eps=0.0))
        priority[least] = 0.5
        world.buffer.update_priority(torch.arange(CAPACITY), priority)
        priority[least] = 1.0
        return world

    for least, again in ((100, False), (10, True)):
        world = prioritized(least)
        sample, info = world.sample(30)
        n = sample["observation"]

        # If the write drops the row of the smallest priority, all rows are drawn again.
        assert world.reads[0] == 60 and (world.reads[1] == 60) is again
        assert (n >= 30).all()
        assert torch.equal(info["index_generation"], n // CAPACITY)

        sampler: Any = world.buffer.sampler
        stored = torch.from_numpy(sampler.priorities.values)[info["index"]]
        smallest = 0.5 if not again else float(sampler.priorities.values[:CAPACITY].min())
        torch.testing.assert_close(info["priority_weight"], (stored / smallest) ** -0.5)


def test_slices_by_priority_keep_weights_and_generations() -> None:
    for seed in range(5):
        sampler = PrioritizedSliceSampler(CAPACITY, alpha=1.0, beta=0.5, eps=0.0, slice_len=5)
        world = planted(sampler, 50, length=7, compact=True, seed=seed)
        world.buffer.update_priority(torch.arange(CAPACITY), 1 + torch.arange(CAPACITY) % 3)
        sample, info = world.sample(33)

        n = sample["observation"]
        assert len(world.reads) == 2 and world.reads[1] < 50
        assert (n >= 33).all() and torch.equal(info["index_generation"], n // CAPACITY)
        assert not audit(sample)

        starts = sample["is_init"][:, 0]
        first = torch.where(starts, torch.arange(50), 0).cummax(0).values
        stored = torch.from_numpy(sampler.priorities.values)[info["index"][first]]
        torch.testing.assert_close(info["priority_weight"], stored**-0.5)


class Odd(RandomSampler):
    """A sampler of one's own, whose rows may depend on one another."""

    def draw(self, ring: Any, batch_size: int, generator: Any, follow: bool) -> Any:
        return super().draw(ring, batch_size, generator, follow)


class Independent(Odd):
    independent = True


def test_an_own_sampler_is_drawn_from_anew_unless_it_says_that_rows_are_independent() -> None:
    for sampler, again in ((Odd(), True), (Independent(), False)):
        world = planted(sampler)
        sample, _ = world.sample(30)
        assert (world.reads[1] == 60) is again
        assert (sample["observation"] >= 30).all()


@pytest.mark.parametrize("compact", [False, True])
def test_rows_ahead_are_those_of_the_rows_that_replace_others(compact: bool) -> None:
    world = planted(compact=compact, transform=MultiStepTransform(n_steps=3, gamma=1.0))
    sample, _ = world.sample(0, 30)  # the second read is that of the rows ahead
    n = sample["observation"]
    steps = sample["steps_to_next_obs"][:, 0]
    assert len(n) == 60 and (n >= 30).all()
    assert torch.equal(sample["next", "observation"], n + steps)
    reward = sum(torch.where(steps > k, n + k, 0) for k in range(3))
    assert torch.equal(sample["next", "reward"][:, 0].long(), reward)


def test_a_reused_pool_entry_is_of_one_slice() -> None:
    """The last row of an open episode gives its entry up when the episode goes on; another episode takes it."""
    world = planted(SliceSampler(slice_len=5), 60, length=50, compact=True)
    sample, _ = world.sample(7, 7)  # cut episodes take entries, and the next write releases them
    assert world.reads[0] == 60 and all(again < 60 for again in world.reads[1:])
    assert torch.equal(sample["next", "observation"], sample["observation"] + 1)


def test_items_of_a_list_are_replaced() -> None:
    buffer = ReplayBuffer(storage=ListStorage(20), batch_size=40, collate_fn=list)
    buffer.extend(list(range(20)))
    read = buffer.storage.read_rows
    reads = []

    def late(slots: Any, *args: Any, **options: Any) -> Any:
        reads.append(len(slots))
        if len(reads) == 1:
            buffer.extend(list(range(20, 26)))
        return read(slots, *args, **options)

    buffer.storage.read_rows = late  # type: ignore[method-assign]
    sample = buffer.sample()
    assert len(reads) == 2 and reads[1] < 40
    assert len(sample) == 40 and set(sample) <= set(range(6, 26))


# --- in threads -------------------------------------------------------------------------------------------------------

#: Rows that each case reads. The long form reads 2 million.
READ = scaled(quick=20_000, long=2_000_000)
ENVS, WINDOW = 4, 64


def coded(turn: int, length: int, frames: bool) -> TensorDict:
    """A window of each env; the observation is its code, (env, episode, step), as numbers or as the bytes of frames."""
    t = (turn * WINDOW + torch.arange(WINDOW)).repeat(ENVS)
    env = torch.arange(ENVS).repeat_interleave(WINDOW)
    step = t % length
    code = env << 56 | (t // length) << 16 | step

    def shown(codes: Any) -> Any:
        if not frames:
            return torch.stack([codes >> 56, codes >> 16 & 0xFFFFFFFFFF, codes & 0xFFFF], 1)
        return codes.view(torch.uint8).view(-1, 1, 8).expand(-1, 20, 8).clone()

    done = (step == length - 1)[:, None]
    flags = {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
    after = {"observation": shown(code + 1), "reward": (code % 1009)[:, None].float(), **flags}
    root = {"observation": shown(code), "action": code * 3, "is_init": (step == 0)[:, None]}
    return TensorDict({**root, "next": after, "collector": {"traj_ids": code >> 16}}, [len(t)])


def code_of(shown: Any) -> Any:
    """The code of each observation, -1 where its parts differ."""
    if shown.ndim == 2:
        return shown[:, 0] << 56 | shown[:, 1] << 16 | shown[:, 2]
    parts = shown.contiguous().view(torch.int64)[..., 0]
    return torch.where((parts == parts[:, :1]).all(1), parts[:, 0], -1)


def wrong_rows(sample: Any, slices: bool) -> int:
    """Count the rows whose entries do not belong together, or which do not follow the row before them."""
    code = code_of(sample["observation"])
    right = sample["action"] == code * 3
    right &= code_of(sample["next", "observation"]) == code + 1
    right &= sample["next", "reward"][:, 0] == (code % 1009).float()
    right &= sample["collector", "traj_ids"] == code >> 16
    if slices:
        inside = ~sample["is_init"][1:, 0]
        right[1:] &= ~inside | (code[1:] == code[:-1] + 1)
    return int((~right).sum())


KINDS: dict[str, tuple[bool, Callable[[], Sampler], int]] = {
    "state rows": (False, RandomSampler, 256),
    "state slices": (False, lambda: SliceSampler(slice_len=16), 512),
    "frame slices": (True, lambda: SliceSampler(slice_len=16), 512),
    "by priority": (False, lambda: PrioritizedSliceSampler(1500, 0.7, 0.5, slice_len=16), 512),
}


@pytest.mark.parametrize("length", [1, 50])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_row_is_wrong_beside_a_writer(kind: str, compact: bool, length: int) -> None:
    """A ring of 1,500 rows, which the writer overwrites again and again while samples are read."""
    frames, make, size = KINDS[kind]
    storage = LazyTensorStorage(1500, compact_obs=compact)
    buffer = ReplayBuffer(storage=storage, sampler=make(), batch_size=size)
    turns = itertools.count()
    for _ in range(8):
        buffer.extend(coded(next(turns), length, frames))

    stop = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            while not stop.is_set():
                buffer.extend(coded(next(turns), length, frames))
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    read = 0
    wrong = 0
    try:
        while read < READ:
            sample = buffer.sample()
            read += len(sample)
            wrong += wrong_rows(sample, size == 512)
    finally:
        stop.set()
        writer.join()

    assert not failed and not wrong
    assert buffer.ring.written > 1500
