"""Passes over the buffer: what they hold, in which order, where they end, and what starts a new one."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.buffers import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TrajectoryIndex,
)
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.layout import audit, run_ends


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(capacity: int, batch_size: int | None, seed: int = 0, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=SamplerWithoutReplacement(**options),
        batch_size=batch_size,
        generator=seeded(seed),
    )


# -- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_has_every_row_once(shuffle: bool, drop_last: bool) -> None:
    buffer = numbers(20, 6, shuffle=shuffle, drop_last=drop_last)
    buffer.extend(torch.arange(33))
    orders = []
    for _ in range(3):
        passed = [sample.tolist() for sample in buffer]
        assert [len(sample) for sample in passed] == ([6, 6, 6] if drop_last else [6, 6, 6, 2])
        rows = list(itertools.chain(*passed))
        assert len(set(rows)) == len(rows) and set(rows) <= set(range(13, 33))
        orders.append(rows)
    if shuffle:
        assert orders[0] != orders[1] != orders[2]
    else:
        assert orders == [list(range(13, 33 - 2 * drop_last))] * 3


def test_the_last_sample_of_a_pass_ends_it() -> None:
    buffer = numbers(9, 3)
    buffer.extend(torch.arange(9))
    ended = []
    for _ in range(7):
        buffer.sample()
        ended.append(buffer.sampler.ran_out)
    assert ended == [False, False, True, False, False, True, False]


def test_every_order_is_equally_likely() -> None:
    buffer = numbers(3, 3)
    buffer.extend(torch.arange(3))
    drawn = Counter(tuple(buffer.sample().tolist()) for _ in range(1200))
    assert set(drawn) == set(itertools.permutations(range(3)))
    assert sum((n - 200) ** 2 / 200 for n in drawn.values()) < 25  # 5 degrees of freedom


@pytest.mark.parametrize("shuffle", [False, True])
def test_any_write_starts_a_new_pass(shuffle: bool) -> None:
    """torchrl 0.14 looks at the number of rows only: rows written over old ones in a full buffer go unseen."""
    buffer = numbers(8, 3, shuffle=shuffle)
    buffer.extend(torch.arange(8))
    buffer.sample(), buffer.sample()
    buffer.extend(torch.tensor([8]))
    rows = list(itertools.chain(*(sample.tolist() for sample in buffer)))
    assert sorted(rows) == list(range(1, 9))
    buffer.sample()
    buffer.empty()
    buffer.extend(torch.arange(20, 24))
    assert sorted(itertools.chain(*(sample.tolist() for sample in buffer))) == list(range(20, 24))


def test_samples_of_several_sizes_share_a_pass() -> None:
    buffer = numbers(10, None)
    buffer.extend(torch.arange(10))
    rows = [*buffer.sample(4).tolist(), *buffer.sample(1).tolist(), *buffer.sample(9).tolist()]
    assert sorted(rows) == list(range(10)) and buffer.sampler.ran_out
    dropping = numbers(10, None, drop_last=True)
    dropping.extend(torch.arange(10))
    dropping.sample(4)
    assert not dropping.sampler.ran_out
    assert len(dropping.sample(7)) == 7  # six are left, too few: a new pass


def test_what_cannot_fill_a_batch_is_refused() -> None:
    buffer = numbers(10, 6, drop_last=True)
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer: extend it"):
        buffer.sample()
    buffer.extend(torch.arange(5))
    with pytest.raises(
        RuntimeError,
        match=r"drop_last=True leaves .*5 rows, fewer than the 6 of a batch. Use drop_last=False",
    ):
        buffer.sample()
    buffer.extend(torch.arange(5))
    assert len(buffer.sample()) == 6


@pytest.mark.parametrize("compact", [False, True])
def test_rows_are_runs_of_their_own_and_keep_their_next_observation(world: Any, compact: bool) -> None:
    writers = world.writers(2, seed=1)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(50, compact_obs=compact),
        sampler=SamplerWithoutReplacement(),
        batch_size=7,
        generator=seeded(),
    )
    for i in range(30):
        buffer.extend(world.to_batch(world.windows(writers, [(i % 2, i % 4 + 1)])))
    stored, seen = buffer[:], []
    for _ in range(8):
        sample, info = buffer.sample(return_info=True)
        seen += info["index"].tolist()
        assert bool(sample["is_init"].all()) and bool(run_ends(sample).all())
        assert [str(f) for f in audit(sample) if f.severity == "error"] == []
        for key in set(stored.keys(True, True)) - {"is_init"}:
            assert torch.equal(sample[key], stored[key][info["index"]]), key
    assert sorted(seen) == list(range(50))


def test_rows_in_order_keep_their_marks_and_runs(world: Any) -> None:
    """Unshuffled samples are stretches of the stored data: runs go on where no id, mark or window says otherwise."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=8
    )
    steps = [*world.episode(0, 0, 13), *world.episode(0, 1, 6), *world.episode(1, 0, 5)]
    for i in range(0, 24, 6):
        buffer.extend(world.to_batch(steps[i : i + 6]))
    expected = world.to_batch(steps[4:])
    for i, sample in enumerate(buffer):
        assert bool((sample == expected[8 * i : 8 * i + 8]).all())
        assert torch.equal(run_ends(sample), run_ends(expected[8 * i : 8 * i + 8]))


def test_a_pass_goes_on_after_load_state_dict() -> None:
    first, second = numbers(30, 4), numbers(30, 4, seed=9)
    first.extend(torch.arange(41))
    first.sample(), first.sample()
    second.load_state_dict(first.state_dict())
    rest = [[sample.tolist() for sample in buffer] for buffer in (first, second)]
    assert rest[0] == rest[1] and sum(map(len, rest[0])) == 22


def test_items_of_a_list_and_steps_of_lanes() -> None:
    words = ReplayBuffer(storage=ListStorage(5), sampler=SamplerWithoutReplacement(), batch_size=2)
    words.extend(["a", "b", "c"])
    assert sorted(itertools.chain(*words)) == ["a", "b", "c"]
    lanes = ReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=SamplerWithoutReplacement(), batch_size=5
    )
    lanes.extend(TensorDict({"x": torch.arange(12).view(3, 4)}, [3, 4]))
    infos = [lanes.sample(return_info=True)[1]["index"] for _ in range(3)]
    assert sorted(map(tuple, torch.cat(infos).tolist())) == [(t, e) for t in range(4) for e in range(3)]


def test_prefetched_passes_end_where_they_end() -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=3
    )
    buffer.extend(torch.arange(10))
    for _ in range(4):
        assert sorted(torch.cat(list(buffer)).tolist()) == list(range(10))


# -- slices ------------------------------------------------------------------------------------------------------


def written(world: Any, capacity: int, seed: int, writers: int, longest: int, rounds: int) -> tuple[Any, Any]:
    """An index of interleaved windows that has wrapped, and its model."""
    index, model = TrajectoryIndex(capacity), world.Model(capacity)
    crew = world.writers(writers, seed=seed, longest=longest)
    for i in range(rounds):
        steps = world.windows(crew, [(i % writers, i % 7 + 1), ((i + 1) % writers, 1)])[-capacity:]
        index.write(Fragments.read(world.to_batch(steps), BoundaryKeys()))
        model.extend(steps)
    return index, model


@examples(60)
@given(
    capacity=st.integers(1, 90),
    seed=st.integers(0, 10**6),
    writers=st.integers(1, 4),
    longest=st.sampled_from([1, 5, 40]),
    rounds=st.integers(1, 40),
    length=st.integers(1, 9),
)
def test_places_of_a_pass(
    world: Any, capacity: int, seed: int, writers: int, longest: int, rounds: int, length: int
) -> None:
    """Against the list: which rows a pass takes, in slices of one trajectory each, in storage order."""
    index, model = written(world, capacity, seed, writers, longest, rounds)
    generator = seeded(seed)
    for by, strict, shuffle in itertools.product(("trajectory", "start"), (False, True), (False, True)):
        check_places(index, model, length, by, strict, shuffle, generator)


def check_places(
    index: Any, model: Any, length: int, by: str, strict: bool, shuffle: bool, generator: torch.Generator
) -> None:
    chains = list(model.trajectories().values())
    usable = [chain for chain in chains if len(chain) >= (length if strict else 1)]
    options: Any = {"by": by, "strict": strict, "shuffle": shuffle, "generator": generator}
    if not usable:
        with pytest.raises(RuntimeError, match=f"no stored trajectory has {length} consecutive rows"):
            index.slice_partition(length, **options)
        return
    starts, lengths = index.slice_partition(length, **options)
    draw = index.slices_from(starts, lengths)
    assert torch.equal(draw.lasts - draw.firsts + 1, lengths)
    assert bool((index.numbers(starts, index.head).diff() > 0).all())
    slices = [t.tolist() for t in draw.slots.split(lengths.tolist())]
    by_chain: dict[int, list[list[int]]] = {}
    for rows in slices:
        (of,) = (i for i, chain in enumerate(chains) if rows[0] in chain)
        first = chains[of].index(rows[0])
        assert chains[of][first : first + len(rows)] == rows  # one trajectory, consecutive rows
        by_chain.setdefault(of, []).append(rows)
    assert len(by_chain) == len(usable)
    for of, parts in by_chain.items():
        chain = chains[of]
        joined = list(itertools.chain(*sorted(parts, key=lambda part: chain.index(part[0]))))
        first = chain.index(joined[0])
        assert chain[first : first + len(joined)] == joined  # no row twice, no gap
        if by == "trajectory":
            assert [len(part) for part in parts] == [min(length, len(chain))]
        elif strict:
            assert {len(part) for part in parts} == {length} and len(parts) == len(chain) // length
            assert shuffle or first == 0
        else:
            sizes = [len(part) for part in sorted(parts, key=lambda part: chain.index(part[0]))]
            assert joined == chain and max(sizes) <= length and set(sizes[1:-1]) <= {length}
            assert len(sizes) == 1 or len(chain) > length
            assert shuffle or sizes[:-1] == [length] * (len(sizes) - 1)


@pytest.mark.parametrize("strict", [False, True])
def test_slices_of_a_pass_begin_anywhere(world: Any, strict: bool) -> None:
    """By trajectory: every legal start at the same rate; by start: every phase of the cutting."""
    index, model = written(world, 60, 3, 3, 30, 40)
    generator, length, passes = seeded(), 4, 3000
    legal = model.starts(length, strict)
    chains = [chain for chain in model.trajectories().values() if len(chain) >= (length if strict else 1)]
    drawn: Counter[int] = Counter()
    for _ in range(passes):
        drawn.update(index.slice_partition(length, strict=strict, generator=generator)[0].tolist())
    assert set(drawn) == set(legal)
    chi2 = freedom = 0.0
    for chain in chains:
        starts = [slot for slot in chain if slot in legal]
        expected = passes / len(starts)
        chi2 += sum((drawn[slot] - expected) ** 2 / expected for slot in starts)
        freedom += len(starts) - 1
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5 + 8

    long = max(chains, key=len)
    phases = len(long) % length + 1 if strict else length
    drawn.clear()
    for _ in range(passes):
        places = index.slice_partition(length, by="start", strict=strict, generator=generator)[0].tolist()
        drawn[min(p for p in map(long.index, set(places) & set(long)) if p or strict or phases == 1)] += 1
    if strict:  # the first slice begins at the phase
        expected_at = dict.fromkeys(range(phases), passes / phases)
    else:  # row 0 begins a slice, too, so the first one after it tells the phase
        expected_at = {phase or length: passes / phases for phase in range(phases)}
    assert set(drawn) == set(expected_at)
    assert (
        sum((drawn[p] - n) ** 2 / n for p, n in expected_at.items())
        < phases - 1 + 4 * (2 * phases) ** 0.5 + 8
    )


def sliced(
    world: Any, lengths: list[int], batch_size: int | None, seed: int = 0, **options: Any
) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(2000, compact_obs=options.pop("compact", False)),
        sampler=SliceSamplerWithoutReplacement(**{"fill": False} | options),
        batch_size=batch_size,
        generator=seeded(seed),
    )
    buffer.extend(world.to_batch([s for e, n in enumerate(lengths) for s in world.episode(0, e, n)]))
    return buffer


def slices(sample: TensorDict) -> list[tuple[int, int, int]]:
    """(trajectory, first step, rows) of each slice."""
    ends = run_ends(sample).nonzero()[:, 0].tolist()
    firsts = [0, *(i + 1 for i in ends[:-1])]
    return [
        (int(sample["collector", "traj_ids"][i]), int(sample["step_count"][i]), j - i + 1)
        for i, j in zip(firsts, ends, strict=True)
    ]


def test_one_slice_of_each_trajectory_per_pass_in_full_batches(world: Any) -> None:
    """``strict_length`` leaves out short trajectories before the draw, and the shuffled order stays shuffled."""
    lengths = [2, 30] * 20 + [3] * 30
    buffer = sliced(world, lengths, 40, slice_len=5, strict_length=True)
    orders = []
    for _ in range(3):
        passed = [slices(sample) for sample in buffer]
        assert [len(found) for found in passed] == [8, 8, 4]
        order = [traj for traj, _, _ in itertools.chain(*passed)]
        assert sorted(order) == list(range(1, 40, 2)) and order != sorted(order)
        assert {rows for _, _, rows in itertools.chain(*passed)} == {5}
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]


def test_a_pass_by_start_has_every_row(world: Any) -> None:
    """An epoch over 2 x 500 rows is all of them."""
    buffer = sliced(world, [500, 500, 7], 100, slice_len=10, by="start")
    sizes = set()
    for _ in range(3):
        samples = list(buffer)
        rows = torch.cat(
            [torch.stack([s["collector", "traj_ids"], s["step_count"][:, 0]], 1) for s in samples]
        )
        assert len(rows) == 1007 and len(rows.unique(dim=0)) == 1007
        assert {len(slices(sample)) for sample in samples[:-1]} == {10}
        assert not torch.equal(rows, rows.unique(dim=0))
        sizes |= {rows for found in map(slices, samples) for _, _, rows in found}
    assert 10 in sizes and len(sizes) > 2


def test_drop_last_leaves_out_what_does_not_fill_a_batch(world: Any) -> None:
    buffer = sliced(world, [6] * 11, None, num_slices=4, drop_last=True)
    buffer.batch_size = 12
    assert [len(slices(sample)) for sample in buffer] == [4, 4]
    few = sliced(world, [6] * 3, 12, num_slices=4, drop_last=True)
    with pytest.raises(RuntimeError, match="a pass has 3 slices, fewer than the 4 of a batch"):
        few.sample()
    assert len(slices(sliced(world, [6] * 3, 12, num_slices=4).sample())) == 3


def test_slices_in_the_order_they_were_stored(world: Any) -> None:
    buffer = sliced(world, [6, 3, 4], 8, slice_len=4, by="start", shuffle=False)
    wanted = [[(0, 0, 4), (0, 4, 2)], [(1, 0, 3), (2, 0, 4)]]
    for _ in range(2):
        assert [slices(sample) for sample in buffer] == wanted
    strict = sliced(world, [6, 3, 4], 8, slice_len=4, by="start", shuffle=False, strict_length=True)
    assert [slices(sample) for sample in strict] == [[(0, 0, 4), (2, 0, 4)]]
    by_trajectory = sliced(world, [6, 3, 4], 8, slice_len=4, shuffle=False)
    assert [[traj for traj, _, _ in slices(sample)] for sample in by_trajectory] == [[0, 1], [2]]


def test_a_write_starts_a_new_pass_of_slices(world: Any) -> None:
    buffer = sliced(world, [9] * 6, 9, slice_len=3)
    buffer.sample()
    buffer.extend(world.to_batch(world.episode(1, 0, 9)))
    trajs = [traj for sample in buffer for traj, _, _ in slices(sample)]
    assert sorted(trajs) == [0, 1, 2, 3, 4, 5, 1000]
    buffer.sample(9)
    assert len(slices(buffer.sample(6))) == 2  # the pass goes on
    assert len(slices(buffer.sample(9))) == 2 and buffer.sampler.ran_out


def test_another_length_starts_a_new_pass(world: Any) -> None:
    buffer = sliced(world, [9] * 6, None, num_slices=3)
    assert {rows for _, _, rows in slices(buffer.sample(9))} == {3}
    assert {rows for _, _, rows in slices(buffer.sample(12))} == {4}
    assert not buffer.sampler.ran_out
    buffer.sample(12)
    assert buffer.sampler.ran_out


@pytest.mark.parametrize("compact", [False, True])
def test_slices_are_marked_and_padded_as_those_of_the_slice_sampler(world: Any, compact: bool) -> None:
    lengths = [3, 8, 5]
    options: Any = {"slice_len": 4, "pad_output": True}
    once = sliced(world, lengths, 12, compact=compact, **options)
    again = ReplayBuffer(
        storage=LazyTensorStorage(100, compact_obs=compact), sampler=SliceSampler(**options), batch_size=12
    )
    again.extend(once[:])
    sample, usual = once.sample(), again.sample()
    assert set(sample.keys(True, True)) == set(usual.keys(True, True))
    assert torch.equal(sample["is_init"].view(3, 4), torch.tensor([[True, False, False, False]]).expand(3, 4))
    mask = sample["collector", "mask"]
    assert sorted(mask.view(3, 4).sum(1).tolist()) == [3, 4, 4]
    real = sample[mask]
    assert torch.equal(real["next", "observation"], real["observation"] + torch.tensor([0, 0, 1]))
    assert torch.equal(real["next", "done"][:, 0], run_ends(real))


def test_a_pass_of_slices_goes_on_after_load_state_dict(world: Any) -> None:
    first, second = (sliced(world, [20] * 9, 15, seed, slice_len=5, by="start") for seed in (0, 7))
    first.sample(), first.sample()
    second.load_state_dict(first.state_dict())
    rest = [[slices(sample) for sample in buffer] for buffer in (first, second)]
    assert rest[0] == rest[1] != []


def test_errors_name_the_class_and_the_way_out(world: Any) -> None:
    with pytest.raises(TypeError, match="SliceSamplerWithoutReplacement needs num_slices or slice_len"):
        SliceSamplerWithoutReplacement()
    with pytest.raises(ValueError, match="batch_size=10 is not divisible by slice_len=4"):
        sliced(world, [9], 10, slice_len=4)
    with pytest.raises(
        RuntimeError, match=r"no stored trajectory has 10 consecutive rows, the longest has 9: .*strict"
    ):
        sliced(world, [9, 4], 10, slice_len=10, strict_length=True).sample()
    empty = ReplayBuffer(
        storage=LazyTensorStorage(9), sampler=SliceSamplerWithoutReplacement(slice_len=3), batch_size=3
    )
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer: extend it"):
        empty.sample()
    with pytest.raises(TypeError, match="span"):
        SliceSamplerWithoutReplacement(slice_len=3, span=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="replacement"):
        SliceSampler(slice_len=3, replacement=False)  # type: ignore[call-arg]
