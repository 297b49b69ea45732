"""Which rows are kept, and where: writers, and the ring of the best rows."""

import copy
import pickle
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.buffers import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    MultiStepTransform,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from flatroll.buffers.index.top_k_ring import RankedRing
from flatroll.disk.state_tree import from_plain


def scored(scores: Any, first: int = 0) -> TensorDict:
    scores = torch.as_tensor(scores)
    n = torch.arange(first, first + len(scores))
    return TensorDict({"n": n, "next": {"reward": scores}}, [len(scores)])


def top(capacity: int, **options: Any) -> ReplayBuffer:
    writer = TensorDictMaxValueWriter()
    return ReplayBuffer(storage=LazyTensorStorage(capacity), writer=writer, batch_size=4, **options)


# -- the best rows ---------------------------------------------------------------------------------------------


@examples(60, derandomize=True)
@given(
    st.integers(1, 6),
    st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=9), min_size=1, max_size=8),
)
def test_the_best_rows_are_kept_as_one_by_one(capacity: int, batches: list[list[int]]) -> None:
    """Of equal ranks the earlier row stays, whether rows come one by one or in batches."""
    whole, single = top(capacity), top(capacity)
    best: list[tuple[int, int]] = []
    first = 0
    for scores in batches:
        rows = whole.extend(scored([float(s) for s in scores], first))
        for i, score in enumerate(scores):
            single.add(scored([float(score)], first + i)[0])
        best += [(score, -(first + i)) for i, score in enumerate(scores)]
        best = sorted(best, reverse=True)[:capacity]
        first += len(scores)
        stored = sorted(-n for _, n in best)
        assert sorted(whole[:]["n"].tolist()) == sorted(single[:]["n"].tolist()) == stored
        kept = rows >= 0
        assert torch.equal(whole[rows[kept]]["n"], first - len(scores) + kept.nonzero().flatten())
        assert len(whole) == len(best) and whole.stats()["rows_written"] == first


def test_rows_fill_the_storage_in_order_and_replace_the_worst() -> None:
    buffer = top(4)
    assert buffer.extend(scored([3.0, 1.0])).tolist() == [0, 1]
    assert buffer.extend(scored([2.0, 4.0], 2)).tolist() == [2, 3]
    assert buffer.extend(scored([1.0, 5.0, 0.0], 4)).tolist() == [-1, 1, -1]
    assert buffer.add(scored([0.5], 7)[0]) == -1 and buffer.add(scored([9.0], 8)[0]) == 2
    assert buffer[:]["n"].tolist() == [0, 5, 8, 3]


@pytest.mark.parametrize(
    ("reduction", "kept"), [("sum", 2), ("mean", 2), ("max", 0), ("min", 1), ("median", 3)]
)
def test_whole_trajectories_are_ranked_by_a_reduction(reduction: str, kept: int) -> None:
    rewards = torch.tensor([[9.0, -9, -9, 0], [2, 2, 2, 2], [8, 8, -7, 0], [3, 3, 3, -7]])
    batch = TensorDict({"next": {"reward": rewards[..., None]}}, [4, 4])
    writer = TensorDictMaxValueWriter(reduction=reduction)
    buffer = ReplayBuffer(storage=LazyTensorStorage(1), writer=writer, batch_size=2)
    for trajectory in batch:
        buffer.add(trajectory)
    assert torch.equal(buffer[0]["next", "reward"], batch[kept]["next", "reward"])
    assert buffer.sample().batch_size == torch.Size([2, 4])


def test_trajectories_of_any_length_in_a_list() -> None:
    buffer = ReplayBuffer(storage=ListStorage(2), writer=TensorDictMaxValueWriter(), batch_size=2)
    rows = buffer.extend([scored([1.0] * length) for length in (3, 1)])
    assert rows.tolist() == [0, 1] and buffer.extend([scored([1.0] * 2)]).tolist() == [1]
    assert sorted(len(item) for item in buffer[:]) == [2, 3]


def test_a_rank_key_of_any_dtype() -> None:
    for column in (
        torch.tensor([3, 1, 2]),
        torch.tensor([True, False, True]),
        torch.tensor([3.0, 1, 2]).half(),
    ):
        writer = TensorDictMaxValueWriter(rank_key="score")
        buffer = ReplayBuffer(storage=LazyTensorStorage(2), writer=writer)
        for row in TensorDict({"score": column}, [3]):
            buffer.add(row)
        assert torch.equal(buffer[:]["score"], column[[0, 2]])


def test_infinite_ranks_are_compared_and_nan_is_refused() -> None:
    buffer = top(2)
    buffer.extend(scored([float("-inf"), float("inf")]))
    assert buffer.extend(scored([0.0], 2)).tolist() == [0]
    with pytest.raises(ValueError, match=r"batch\[\('next', 'reward'\)\] gives item 1 the rank NaN"):
        buffer.extend(scored([9.0, float("nan")], 3))
    assert buffer[:]["n"].tolist() == [2, 1] and len(buffer) == 2
    with pytest.raises(ValueError, match="item 0 the rank NaN"):  # inf - inf
        top(2).extend(scored([[float("inf"), float("-inf")]]))


def test_the_best_rows_are_sampled_uniformly() -> None:
    buffer = top(5, generator=torch.Generator().manual_seed(0))
    for first in range(0, 40, 4):
        buffer.extend(scored(torch.arange(first, first + 4).float() % 13, first))
    counts = Counter(buffer.sample(10_000)["n"].tolist())
    assert set(counts) == {12, 25, 38, 11, 24}  # ranks 12, 12, 12, 11, 11: the first of the three 11s
    assert sum((c - 2000) ** 2 / 2000 for c in counts.values()) < 23  # 4 degrees of freedom


def test_a_pass_without_replacement_takes_each_of_the_best_rows_once() -> None:
    writer = TensorDictMaxValueWriter(rank_key="n")
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(6), sampler=SamplerWithoutReplacement(), writer=writer, batch_size=2
    )
    for first in range(0, 20, 5):
        buffer.extend(scored(torch.zeros(5), first))
        for _ in range(2):
            rows = torch.cat([sample["n"] for sample in buffer])
            assert sorted(rows.tolist()) == list(range(max(0, first - 1), first + 5))


def test_a_failed_write_leaves_rows_that_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that made room are given up, and never read again, whatever was half-written in their place."""
    buffer = top(4)
    buffer.extend(scored([1.0, 2, 3, 4]))
    column = buffer.storage.columns["n"]  # type: ignore[attr-defined]
    put = column.put

    def fail(*_: Any) -> None:
        put(torch.tensor([0]), torch.tensor([99]))
        raise OSError("disk full")

    monkeypatch.setattr(column, "put", fail)
    with pytest.raises(OSError, match="disk full"):
        buffer.extend(scored([9.0, 8.0], 4))
    monkeypatch.undo()
    assert len(buffer) == 2 and sorted(buffer[:]["n"].tolist()) == [2, 3]
    assert set(buffer.sample(50)["n"].tolist()) == {2, 3}
    with pytest.raises(IndexError, match="position 0 holds no row"):
        buffer[0]
    assert sorted(buffer.extend(scored([0.0, 5.0, 6.0], 6)).tolist()) == [-1, 0, 1]
    assert sorted(buffer[:]["n"].tolist()) == [2, 3, 7, 8]


def test_a_row_that_was_replaced_meanwhile_is_drawn_again() -> None:
    ring = RankedRing(3)
    ring.choose(torch.tensor([1.0, 2, 3]))
    ring.publish(3)
    draw = ring.uniform(64, None)
    assert ring.unchanged_since(draw)
    rows, slots = ring.choose(torch.tensor([5.0, 0.0]))
    assert (rows.tolist(), slots.tolist()) == ([0], [0])
    assert not ring.unchanged_since(draw) and set(ring.uniform(64, None).slots.tolist()) == {1, 2}
    after = ring.uniform(64, None)
    ring.publish(1)
    assert (
        not ring.unchanged_since(draw)
        and ring.unchanged_since(after)
        and ring.unchanged_since(ring.uniform(64, None))
    )
    with pytest.raises(TypeError, match="write to it with choose and publish"):
        ring.claim(1)


def test_half_written_rows_are_never_sampled() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), writer=TensorDictMaxValueWriter(), batch_size=8)
    batches = [
        TensorDict({"n": torch.full((4, 500), i), "next": {"reward": torch.full((4,), float(i))}}, [4])
        for i in range(300)
    ]
    buffer.extend(batches[0])
    writer = threading.Thread(target=lambda: [buffer.extend(batch) for batch in batches])
    writer.start()
    while writer.is_alive():
        for sample in (buffer.sample(), buffer[:]):
            assert (sample["n"] == sample["next", "reward"][:, None]).all()
    writer.join()
    assert set(buffer[:]["n"][:, 0].tolist()) == {298, 299}


def test_neighbours_in_the_storage_are_not_taken_for_neighbours_in_time() -> None:
    """Rows 0 and 2 stand side by side; the one after row 0 was not kept."""
    buffer = top(2)
    found: list[Any] = []

    class Ends:
        wants_ends = True

        def forward(self, td: Any, ends: Any = None) -> Any:
            found.append(ends.tolist())
            return td

    buffer.append_transform(Ends())  # type: ignore[arg-type]
    for n, score in enumerate([5.0, 1.0, 6.0]):
        buffer.add(scored([score], n)[0])
    assert buffer[:]["n"].tolist() == [0, 2] and found[-1] == [True, True]
    buffer.add(scored([7.0], 3)[0])
    assert buffer[:]["n"].tolist() == [3, 2] and found[-1] == [True, True]


@pytest.mark.parametrize("copied", ["state", "deepcopy", "pickle"])
def test_a_copy_goes_on_with_the_same_ranks(copied: str) -> None:
    generator = torch.Generator().manual_seed(1)
    buffer = top(5, generator=generator)
    for first in range(0, 30, 3):
        buffer.extend(scored(torch.arange(first, first + 3).float() * 7 % 11, first))
    if copied == "state":
        other = top(5, generator=torch.Generator())
        other.load_state_dict(copy.deepcopy(buffer.state_dict()))
    else:
        other = copy.deepcopy(buffer) if copied == "deepcopy" else pickle.loads(pickle.dumps(buffer))
    for first in range(30, 60, 3):
        batch = scored(torch.arange(first, first + 3).float() * 7 % 13, first)
        assert torch.equal(buffer.extend(batch), other.extend(batch))
        assert torch.equal(buffer[:]["n"], other[:]["n"])
        assert torch.equal(buffer.sample()["n"], other.sample()["n"])


def test_states_keep_numbers_beyond_float_precision() -> None:
    ring = RankedRing(3, first=2**60)
    ring.choose(torch.tensor([1.0, 2.0]))
    ring.publish(2)
    other = RankedRing(3)
    other.load_state_dict(ring.state_dict())
    assert other.numbers(torch.arange(2), 0).tolist() == [2**60, 2**60 + 1] and other.written == 2**60 + 2


def test_a_state_of_another_kind_is_refused() -> None:
    ranked, plain = top(3), ReplayBuffer(storage=LazyTensorStorage(3))
    plain.extend(scored([1.0]))
    with pytest.raises(ValueError, match="a buffer that keeps the latest rows, this one keeps the best"):
        ranked.load_state_dict(plain.state_dict())
    small = top(2)
    small.extend(scored([1.0]))
    with pytest.raises(ValueError, match="a ring of 2 rows, this one has 3"):
        RankedRing(3).load_state_dict(from_plain(small.state_dict()["ring"]))


def test_an_emptied_buffer_begins_anew() -> None:
    buffer = top(3)
    buffer.extend(scored([1.0, 2, 3]))
    buffer.empty()
    assert len(buffer) == 0 and buffer.extend(scored([0.0, -1.0], 3)).tolist() == [0, 1]
    assert buffer[:]["n"].tolist() == [3, 4]


def test_a_given_storage_is_ranked_as_it_stands() -> None:
    writer = TensorDictMaxValueWriter()
    buffer = ReplayBuffer(storage=TensorStorage(scored([4.0, 1.0, 3.0])), writer=writer)
    assert buffer.extend(scored([2.0, 0.0], 3)).tolist() == [1, -1]
    assert buffer[:]["n"].tolist() == [0, 3, 2]


def test_what_does_not_go_with_ranked_rows_is_refused(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 5))
    for options in (
        {"sampler": SliceSampler(slice_len=2)},
        {"storage": LazyTensorStorage(9, compact_obs=True)},
        {"transform": MultiStepTransform(3, 0.9)},
    ):
        made: dict[str, Any] = {"storage": LazyTensorStorage(9), **options}
        buffer = ReplayBuffer(writer=TensorDictMaxValueWriter(), **made)
        with pytest.raises(TypeError, match="keeps the best rows, which do not follow each other"):
            buffer.extend(batch)
    with pytest.raises(ValueError, match=r"reduction must be 'sum', 'max', .*got 'prod'"):
        TensorDictMaxValueWriter(reduction="prod")
    buffer = top(3)
    with pytest.raises(TypeError, match="TensorDictMaxValueWriter takes tensordicts, got Tensor"):
        buffer.extend(torch.zeros(3))
    with pytest.raises(KeyError, match=r"no entry \('next', 'reward'\)"):
        buffer.extend(TensorDict({"n": torch.zeros(2)}, [2]))
    assert len(buffer) == 0


# -- tensordicts only ------------------------------------------------------------------------------------------


def test_the_round_robin_writer_of_tensordicts_takes_nothing_else() -> None:
    for storage in (LazyTensorStorage(3), ListStorage(3)):
        buffer = ReplayBuffer(storage=storage, writer=TensorDictRoundRobinWriter(), sampler=RandomSampler())
        with pytest.raises(TypeError, match=r"takes tensordicts, got (Tensor|int)"):
            buffer.extend([1, 2] if isinstance(storage, ListStorage) else torch.zeros(2))
        assert buffer.extend(list(scored([1.0] * 4))).tolist()[-1] in (0, 2)
        assert len(buffer) == 3
    assert "index" not in buffer[0]  # positions are not data


@pytest.mark.parametrize("storage", [LazyTensorStorage(3), ListStorage(3)])
def test_all_rows_of_a_batch_larger_than_the_storage_are_ranked(storage: Any) -> None:
    buffer = ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter())
    assert buffer.extend(scored([9.0, 1, 5, 2, 8, 5])).tolist() == [0, -1, 1, -1, 2, -1]
    assert buffer.extend(scored([6.0, 0, 0, 0, 7], 6)).tolist() == [-1, -1, -1, -1, 1]
    assert torch.stack([row["n"] for row in buffer[:]]).tolist() == [0, 10, 4]


def test_the_best_items_one_pass_at_a_time() -> None:
    """The example of the reference."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1),
        sampler=SamplerWithoutReplacement(),
        batch_size=1,
        writer=TensorDictMaxValueWriter(rank_key="key"),
    )
    for first, best in ((0, 9), (10, 19), (0, 19)):
        key = torch.arange(first, first + 10)
        buffer.extend(TensorDict({"key": key, "obs": key}, [10]))
        sample = buffer.sample()
        assert sample["obs"].item() == best and sample["index"].item() == 0


def test_parts_that_do_not_go_with_ranked_rows_are_refused() -> None:
    writer = TensorDictMaxValueWriter()
    with pytest.raises(ValueError, match="the storage has ndim=2: use ndim=1"):
        ReplayBuffer(storage=LazyTensorStorage(4, ndim=2), writer=writer)
    with pytest.raises(TypeError, match="PrioritizedSampler keeps priorities in the order of a ring"):
        ReplayBuffer(storage=LazyTensorStorage(4), sampler=PrioritizedSampler(4, 1.0, 1.0), writer=writer)


def test_ranks_are_not_changed_in_place() -> None:
    buffer = top(3)
    buffer.extend(scored([1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="it is what rows are ranked by"):
        buffer[0] = buffer[1]
    buffer[0] = buffer[1].exclude("next")
    assert buffer[:]["n"].tolist() == [1, 1, 2] and buffer[0]["next", "reward"] == 1.0


# -- nothing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [RandomSampler(), SliceSampler(slice_len=2)])
def test_a_dataset_is_there_from_the_start_and_stays(world: Any, sampler: Any) -> None:
    dataset = world.to_batch(world.episode(0, 0, 6))
    before = dataset.clone()
    buffer = ReplayBuffer(
        storage=TensorStorage(dataset), writer=ImmutableDatasetWriter(), sampler=sampler, batch_size=4
    )
    assert len(buffer) == 6 and len(buffer.sample()) == 4
    writes: list[Any] = [
        lambda: buffer.extend(dataset),
        lambda: buffer.add(dataset[0]),
        lambda: buffer.__setitem__(0, dataset[1]),
        buffer.empty,
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match="this dataset is immutable"):
            write()
    assert len(buffer) == 6 and bool((buffer[:] == before).all())
    other = ReplayBuffer(
        storage=LazyTensorStorage(6), writer=ImmutableDatasetWriter(), sampler=copy.deepcopy(sampler)
    )
    with pytest.raises(RuntimeError, match="this dataset is immutable"):
        other.extend(dataset)
    other.load_state_dict(buffer.state_dict())
    assert bool((other[:] == before).all())
