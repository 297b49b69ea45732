"""The buffer as a container: what goes in, what comes out, what is refused."""

import copy
import gc
import itertools
import pickle
import threading
from collections import Counter
from typing import Any

import interpreters
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from flatroll.buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SliceSampler,
)
from flatroll.layout import join, split_trajectories


def numbers(first: int, count: int) -> TensorDict:
    n = torch.arange(first, first + count)
    return TensorDict({"n": n, "next": {"n2": n * 2}}, [count])


def test_rows_are_drawn_uniformly_from_a_wrapped_ring() -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(13), batch_size=26_000, generator=torch.Generator().manual_seed(0)
    )
    for first in range(0, 60, 6):
        buffer.extend(numbers(first, 6))
    counts = Counter(buffer.sample()["n"].tolist())
    assert set(counts) == set(range(47, 60))
    assert sum((c - 2000) ** 2 / 2000 for c in counts.values()) < 40  # 12 degrees of freedom


def test_indexing_is_by_position() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(numbers(0, 5))
    buffer.extend(numbers(5, 2))
    assert buffer[:]["n"].tolist() == [5, 6, 2, 3, 4]
    assert buffer[0].batch_size == torch.Size([]) and buffer[-1]["n"].item() == 4
    assert buffer[1:3]["next", "n2"].tolist() == [12, 4]
    assert buffer[[0, 4]]["n"].tolist() == [5, 4]
    assert buffer[torch.tensor([True, False, False, False, True])]["n"].tolist() == [5, 4]
    for wrong in (5, -6, [0, 5]):
        with pytest.raises(IndexError, match=r"is out of range: 5 rows are stored"):
            buffer[wrong]


def test_samples_own_their_memory() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=3)
    batch = numbers(0, 5)
    buffer.extend(batch)
    batch["n"].zero_()  # the storage owns its memory, too
    assert buffer[:]["n"].tolist() == [0, 1, 2, 3, 4]
    kept = [buffer.sample() for _ in range(3)]
    before = [s.clone() for s in kept]
    buffer.extend(numbers(100, 5))
    kept[0]["n"].fill_(-1)
    assert buffer[:]["n"].tolist() == [100, 101, 102, 103, 104]
    assert all(torch.equal(a["n"], b["n"]) for a, b in zip(kept[1:], before[1:], strict=True))
    rows = buffer[:]
    rows["n"].fill_(-1)
    assert buffer[:]["n"].min() >= 100


def test_seeds_make_samples_repeat(world: Any) -> None:
    for sampler in (RandomSampler(), SliceSampler(slice_len=4)):
        draws = []
        for _ in range(2):
            buffer = ReplayBuffer(
                storage=LazyTensorStorage(50),
                sampler=sampler,
                batch_size=8,
                generator=torch.Generator().manual_seed(5),
            )
            buffer.extend(world.to_batch(world.episode(0, 0, 50)))
            draws.append(torch.cat([buffer.sample()["observation"] for _ in range(3)]))
        assert torch.equal(*draws)
        buffer.generator = None
        seeded = []
        for _ in range(2):
            torch.manual_seed(11)
            seeded.append(buffer.sample()["observation"])
        assert torch.equal(*seeded)


def test_info_says_where_rows_stand() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=8)
    buffer.extend(numbers(3, 5))
    sample, info = buffer.sample(return_info=True)
    assert torch.equal(sample["n"], info["index"] + 3)
    assert len(buffer.sample(2)) == 2
    assert [len(s) for s in itertools.islice(buffer, 3)] == [8, 8, 8]


def test_two_buffers_of_one_storage_each_know_their_own_rows(world: Any) -> None:
    storage = LazyTensorStorage(20)
    batch = world.to_batch(world.episode(0, 0, 20))
    ReplayBuffer(storage=storage).extend(batch)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=2), batch_size=4)
    buffer.extend(batch[:6])
    assert len(buffer) == 6 and buffer.sample()["step_count"].max() < 6


def test_notebooks_show_statistics_and_parts(world: Any) -> None:
    """The repr methods of buffers, ensembles, samplers and storages, and what a notebook shows of them."""
    sampler = SliceSampler(slice_len=2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(2000, compact_obs=True), sampler=sampler, batch_size=4)
    assert repr(sampler) == (
        "SliceSampler(slice_len=2, strict_length=False, pad_output=False, span=(False, False), by='trajectory')"
    )
    assert repr(buffer.storage) == "LazyTensorStorage(2000 rows, compact_obs=True)"
    assert "<b>ReplayBuffer: 0 of 2,000 rows</b>" in buffer._repr_html_()
    buffer.extend(world.to_batch(world.episode(0, 0, 20)))
    page, stats = buffer._repr_html_(), buffer.stats()
    assert "<b>ReplayBuffer: 20 of 2,000 rows</b>" in page
    for name in ("bytes", "bytes_per_row", "trajectories"):
        assert f">{name.replace('_', ' ')}</td>" in page and f">{stats[name]:,}</td>" in page
    assert "SliceSampler(slice_len=2" in page and ">4</td>" in page
    both = ReplayBufferEnsemble(buffer, ReplayBuffer())
    assert "member 0" in both._repr_html_() and "20 of 2000 rows" in both._repr_html_()
    assert "bytes" not in ReplayBuffer()._repr_html_()  # of a list they are not known


def test_add_empty_and_repr() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), batch_size=2)
    assert [buffer.add(row) for row in numbers(0, 4)] == [0, 1, 2, 0]
    assert repr(buffer) == "ReplayBuffer(3 of 3 rows, LazyTensorStorage, RandomSampler)"
    buffer.empty()
    assert len(buffer) == 0
    with pytest.raises(
        RuntimeError, match="cannot sample from an empty buffer: extend it with a batch first"
    ):
        buffer.sample()
    assert buffer.extend(numbers(7, 2)).tolist() == [0, 1]
    assert set(buffer.sample()["n"].tolist()) <= {7, 8}
    assert buffer.extend(numbers(0, 0)).tolist() == []


@pytest.mark.parametrize("sampler", [RandomSampler(), SliceSampler(slice_len=2)])
def test_an_empty_buffer_says_so(sampler: Any) -> None:
    with pytest.raises(
        RuntimeError, match="cannot sample from an empty buffer: extend it with a batch first"
    ):
        ReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler, batch_size=2).sample()


def test_lazy_stacks_are_stored_as_they_read(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 6))
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2), batch_size=2)
    buffer.extend(lazy_stack(list(batch)))
    assert bool((buffer[:] == batch).all())


@pytest.mark.parametrize("compact", [False, True])
def test_copies_go_on_by_themselves(world: Any, compact: bool) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20, compact_obs=compact), sampler=SliceSampler(slice_len=4), batch_size=8
    )
    steps = world.episode(0, 0, 30)
    buffer.extend(world.to_batch(steps[:10]))
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        other.extend(world.to_batch(steps[10:]))
        assert (len(buffer), len(other)) == (10, 20)
        assert other.index.longest == 20
        sample = other.sample()
        assert torch.equal(sample["next", "observation"], sample["observation"] + torch.tensor([0, 0, 1]))


def test_a_batch_that_does_not_fit_changes_nothing(world: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=2), batch_size=4)
    good = world.to_batch(world.episode(0, 0, 8))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (good.exclude(("next", "reward")), ValueError, r"lacks the entry \('next', 'reward'\)"),
        (
            good.clone().set("extra", torch.zeros(8)),
            ValueError,
            r"an entry 'extra' that the first extend did not",
        ),
        (
            good.clone().set("observation", torch.zeros(8, 4)),
            ValueError,
            r"batch\['observation'\] is torch.float32 \(4,\) per row, the storage has kept torch.float32 \(3,\)",
        ),
        (
            good.clone().set("observation", torch.zeros(8, 3, dtype=torch.float64)),
            ValueError,
            r"batch\['observation'\] is torch.float64 \(3,\) per row, the storage has kept torch.float32 \(3,\)",
        ),
        (
            good.clone().set("is_init", torch.zeros(8, 1)),
            TypeError,
            r"is_init.*must be bool, got torch.float32",
        ),
        (good.reshape(2, 4), ValueError, r"batch must be flat, \[N\], got \[2, 4\]: batch.reshape\(-1\)"),
        (good[0], ValueError, r"batch has batch size \[\]: use add for one row"),
        (
            {"observation": torch.zeros(8, 3)},
            TypeError,
            "needs tensordict batches, got dict|the storage holds tensordicts, got dict",
        ),
    ]
    for batch, error, text in wrong[4:]:  # before anything is stored, too
        with pytest.raises(error, match=text):
            buffer.extend(batch)
    assert not buffer.storage.allocated
    buffer.extend(good)
    for batch, error, text in wrong:
        with pytest.raises(error, match=text):
            buffer.extend(batch)
        assert len(buffer) == 8 and bool((buffer[:] == good).all())
        index = buffer.index
        assert index is not None and (index.trajectories, index.written) == (1, 8)
    with pytest.raises(ValueError, match=r"add takes one row of batch size \[\], got \[8\]: use extend"):
        buffer.add(good)


def test_a_copy_that_fails_half_way_leaves_no_torn_row(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for sampler in (RandomSampler(), SliceSampler(slice_len=2)):
        storage = LazyTensorStorage(10, compact_obs=True)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=40)
        steps = world.episode(0, 0, 40)
        for i in range(0, 16, 4):
            buffer.extend(world.to_batch(steps[i : i + 4]))

        def interrupt(slot: int, rows: Any, after: Any = None, storage: LazyTensorStorage = storage) -> None:
            storage.columns["observation"].data[slot : slot + 2] = -1
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(storage, "write", interrupt)
            buffer.extend(world.to_batch(steps[16:20]))
        assert len(buffer) == 6
        for _ in range(2):
            assert buffer.sample()["observation"].min() >= 0
            buffer.extend(world.to_batch(steps[20:24]))
        sample = buffer.sample()
        assert torch.equal(sample["next", "observation"], sample["observation"] + torch.tensor([0, 0, 1]))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("capacity", [37, 400])
def test_sampling_while_another_thread_writes(compact: bool, capacity: int) -> None:
    """Every column is a function of one counter: no sample holds a row that was half overwritten."""
    count = 4000
    n = torch.arange(count + 1, dtype=torch.int64)
    wide = n[:, None].expand(-1, 64)
    done = (n[:-1] % 50 == 49)[:, None]
    batch = TensorDict(
        {
            "wide": wide[:-1],
            "narrow": n[:-1] * 3,
            "next": {"wide": wide[1:], "done": done},
            "collector": {"traj_ids": n[:-1] // 50},
        },
        [count],
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(capacity, compact_obs=compact),
        sampler=SliceSampler(slice_len=4),
        batch_size=32,
    )
    buffer.extend(batch[:30])
    parts = batch[30:].split(9)
    writer = threading.Thread(target=lambda: [buffer.extend(part) for part in parts])
    writer.start()
    samples = [buffer.sample() for _ in range(150)]
    writer.join()
    for sample in samples:
        first = sample["wide"][:, :1]
        assert bool((sample["wide"] == first).all())
        assert torch.equal(sample["narrow"], first[:, 0] * 3)
        assert bool((sample["next", "wide"] == first + 1).all())
        starts = sample["is_init"][:, 0]
        assert bool((first[1:, 0][~starts[1:]] == first[:-1, 0][~starts[1:]] + 1).all())
    assert torch.equal(buffer[:]["wide"][:, 0].sort().values, n[-1 - len(buffer) : -1])


def test_a_pool_entry_given_away_while_being_read_is_read_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row drawn stays, but its next observation moves from the pool to the row that continues it."""
    storage = LazyTensorStorage(100, compact_obs=True)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=4), batch_size=4)
    first, other = world.episode(0, 0, 8), world.episode(1, 0, 8)
    buffer.extend(world.to_batch(first[:4]))
    get, calls = storage.read_rows, []

    def late(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:  # between the draw and the copy
            buffer.extend(world.to_batch(first[4:]))
            buffer.extend(world.to_batch(other[:3]))
        return get(*args, **options)

    monkeypatch.setattr(storage, "read_rows", late)
    sample = buffer.sample()
    assert len(calls) == 2
    assert torch.equal(sample["next", "observation"], sample["observation"] + torch.tensor([0, 0, 1]))


@pytest.mark.parametrize("compact", [False, True])
def test_columns_copied_together_and_one_by_one_give_the_same(
    world: Any, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled(buffer: ReplayBuffer) -> Any:
        buffer.generator = torch.Generator().manual_seed(1)
        return buffer.sample()

    storage = LazyTensorStorage(150, compact_obs=compact)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=20), batch_size=40)
    first, second = (world.to_batch(world.episode(0, i, 100)) for i in range(2))
    buffer.extend(first)
    with monkeypatch.context() as patch:
        for limit in ("HUGE_FROM", "_WIDE"):  # as for a large sample of images
            patch.setattr(f"flatroll.kernels.rows.gather.{limit}", 0)
        patch.setattr(torch, "get_num_threads", lambda: 2)
        other = copy.deepcopy(buffer)
        other.extend(second)
        one_by_one = sampled(other)
    buffer.extend(second)
    assert bool((sampled(buffer) == one_by_one).all()) and bool((buffer[:] == other[:]).all())
    moved = copy.deepcopy(buffer)
    buffer.storage.columns["observation"].data.zero_()  # a copy reads its own memory
    assert bool((sampled(moved) == one_by_one).all())


def test_columns_begin_at_cache_lines_and_may_be_empty() -> None:
    storage = LazyTensorStorage(1000)
    dtypes = [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64]
    columns = {str(d): torch.ones(3, 5, dtype=d) for d in dtypes}
    buffer = ReplayBuffer(storage=storage, batch_size=2)
    buffer.extend(TensorDict({**columns, "none": torch.zeros(3, 0)}, [3]))
    for key, column in columns.items():
        assert torch.equal(buffer[:][key], column)
        assert storage.columns[key].data.data_ptr() % 64 == 0
    assert buffer[:]["none"].shape == (3, 0)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="max_size must be an integer of at least 1, got 0"):
        LazyTensorStorage(0)
    with pytest.raises(ValueError, match="ndim must be an integer of at least 1, got 0"):
        LazyTensorStorage(10, ndim=0)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        ReplayBuffer(storage=LazyTensorStorage(10), batch_size=0)
    with pytest.raises(ValueError, match="batch_size must be given"):
        ReplayBuffer(storage=LazyTensorStorage(10)).sample()
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(TypeError, match=r"batch\['name'\] is a \w+: this storage takes tensors only"):
        buffer.extend(TensorDict({"n": torch.zeros(2), "name": "x"}, [2]))


def test_random_sampling_keeps_no_index_and_needs_no_numba() -> None:
    """Plain storage and random rows: extend and sample leave numba alone."""
    import sys

    code = (
        "import sys, torch\n"
        "from tensordict import TensorDict\n"
        "theirs = set(sys.modules)\n"  # torch imports triton by itself where it is installed
        "from flatroll.buffers import LazyTensorStorage, ReplayBuffer\n"
        "b = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)\n"
        "b.extend(TensorDict({'x': torch.zeros(3)}, [3])); b.sample()\n"
        "assert b.index is None\n"
        "print(sorted({'numba', 'envpool', 'ray', 'triton', 'matplotlib'} & (set(sys.modules) - theirs)))\n"
    )
    found = interpreters.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src"}, kind=interpreters.OfLibraries
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("sampler", [RandomSampler(), SliceSampler(slice_len=2)])
def test_a_padded_batch_is_refused_and_its_real_rows_are_not(world: Any, sampler: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 5) + world.episode(0, 1, 2))
    parts = split_trajectories(batch)
    padded = parts.reshape(-1)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
    with pytest.raises(
        ValueError, match=r"3 rows of padding, where batch\[\('collector', 'mask'\)\] is False.*layout.join"
    ):
        buffer.extend(padded)
    assert len(buffer) == 0 and not buffer.storage.allocated
    buffer.extend(padded[padded["collector", "mask"]])
    assert len(buffer) == 7
    other = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
    other.extend(join(parts))
    assert bool((other[:] == batch).all())


@pytest.mark.parametrize("compact", [False, True])
def test_rows_given_up_by_a_failed_write_are_not_read_by_position(
    world: Any, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hole stands in mid-ring: buffer[:] holds the rows on both sides of it, and nothing of it."""
    storage = LazyTensorStorage(10, compact_obs=compact)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    steps = world.episode(0, 0, 40)
    for i in (0, 7):
        buffer.extend(world.to_batch(steps[i : i + 7]))

    def interrupt(slot: int, rows: Any, after: Any = None) -> None:
        storage.columns["observation"].data[slot : slot + 2] = -1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage, "write", interrupt)
        buffer.extend(world.to_batch(steps[14:18]))
    rows = buffer[:]
    assert rows["step_count"][:, 0].tolist() == [10, 11, 12, 13, 8, 9]
    assert torch.equal(rows["next", "observation"], rows["observation"] + torch.tensor([0, 0, 1]))
    assert buffer[-1]["step_count"].item() == 9
    for hole in (4, [0, 5]):
        with pytest.raises(IndexError, match=r"position [45] holds no row: its old row was dropped"):
            buffer[hole]
    buffer.extend(world.to_batch(steps[14:18]))
    assert buffer[:]["step_count"][:, 0].tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 8, 9]


def test_entries_are_written_by_position(world: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(world.to_batch(world.episode(0, 0, 5)))
    for name in ("reward", ("next", "reward")):
        with pytest.raises(
            TypeError, match=r"rows are written by position, got .*reward.*: buffer\[:\] = TensorDict"
        ):
            buffer[name] = torch.zeros(5, 1)
    buffer[:] = TensorDict({"next": {"reward": torch.ones(5, 1)}}, [5])
    assert buffer["next", "reward"].tolist() == [[1.0]] * 5


@pytest.mark.parametrize("compact", [False, True])
def test_final_is_a_tensordict(world: Any, compact: bool) -> None:
    steps = world.episode(0, 0, 5)
    batch, final = world.compacted(world.to_batch(steps), steps)
    buffer = ReplayBuffer(storage=LazyTensorStorage(5, compact_obs=compact))
    with pytest.raises(TypeError, match=r"final must be a tensordict, collector\.final, got dict"):
        buffer.extend(batch, final=final.to_dict())
    buffer.extend(batch, final=final)
    assert len(buffer) == 5


def test_indices_and_states_that_are_none_are_told_so() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(torch.arange(4.0))
    assert buffer[::-1].tolist() == [3, 2, 1, 0] and buffer[3:0:-2].tolist() == [3, 1]
    with pytest.raises(IndexError, match="index 7 is out of range: 4 rows are stored"):
        buffer[7]
    with pytest.raises(TypeError, match=r"rows are indexed by integers, slices and masks, got 1\.5"):
        buffer[1.5]
    with pytest.raises(ValueError, match=r"state is not that of a ReplayBuffer: it lacks \['generator'"):
        buffer.load_state_dict({"a": 1})


def test_a_size_is_no_storage() -> None:
    with pytest.raises(
        TypeError, match=r"storage must be a storage such as LazyTensorStorage\(max_size\), got int"
    ):
        ReplayBuffer(storage=1000)  # type: ignore[arg-type]


def test_what_remembers_rows_belongs_to_one_buffer() -> None:
    """Priorities by position would be those of whichever buffer wrote last."""
    sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
    first = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=2)
    second = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=2)
    first.extend(torch.arange(5))
    with pytest.raises(ValueError, match="PrioritizedSampler already belongs to another buffer"):
        second.extend(torch.arange(5))
    assert len(second) == 0 and set(first.sample(100).tolist()) <= set(range(5))
    del first
    gc.collect()
    second.extend(torch.arange(5))  # nobody else uses it any more


def test_what_remembers_nothing_may_be_shared() -> None:
    sampler, writer = RandomSampler(), RoundRobinWriter()
    for _ in range(2):
        ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, writer=writer).extend(torch.arange(5))
