"""Compact storage gives back what a full one would, bit by bit, and keeps no observation twice."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, RandomSampler, ReplayBuffer, SliceSampler
from flatroll.buffers.columns.column import differ

KINDS = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int32",
    "int64",
    "bool",
    "scalar",
    "dict",
]


def pair(capacity: int, sampler: Any, seed: int = 0) -> tuple[ReplayBuffer, ReplayBuffer]:
    """A full and a compact buffer that draw alike."""
    full, compact = (
        ReplayBuffer(
            storage=LazyTensorStorage(capacity, compact_obs=compact),
            sampler=sampler(),
            batch_size=24,
            generator=torch.Generator().manual_seed(seed),
        )
        for compact in (False, True)
    )
    return full, compact


def assert_bit_equal(left: Any, right: Any) -> None:
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key, value in left.items(True, True):
        other = right[key]
        assert value.dtype == other.dtype and value.shape == other.shape, key
        assert not bool(differ(value, other).any()), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampler", [RandomSampler, lambda: SliceSampler(slice_len=6)], ids=["random", "slice"]
)
def test_samples_are_bit_equal_to_those_of_a_full_storage(world: Any, kind: str, sampler: Any) -> None:
    full, compact = pair(61, sampler)
    writers = world.writers(3, seed=1)
    for i in range(30):
        batch = world.to_batch(world.windows(writers, [(i % 3, i % 7 + 1), ((i + 1) % 3, 3)]), kind)
        full.extend(batch)
        compact.extend(batch)
        assert_bit_equal(full.sample(), compact.sample())
        assert_bit_equal(full[:], compact[:])


@pytest.mark.parametrize("kind", ["float32", "uint8", "uint16", "uint64", "dict"])
@pytest.mark.parametrize("compact", [False, True])
def test_a_compact_batch_with_its_final_is_exact_in_any_storage(world: Any, kind: str, compact: bool) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(50, compact_obs=compact), sampler=SliceSampler(slice_len=6), batch_size=24
    )
    full = ReplayBuffer(storage=LazyTensorStorage(50), sampler=SliceSampler(slice_len=6), batch_size=24)
    writers = world.writers(3, seed=2)
    for i in range(30):
        steps = world.windows(writers, [(i % 3, i % 7 + 1), ((i + 1) % 3, 3)])
        batch = world.to_batch(steps, kind)
        buffer.extend(*world.compacted(batch, steps))
        full.extend(batch)
        assert_bit_equal(buffer[:], full[:].exclude(("next", "step_count")))


def test_ring_of_twenty_is_whole_and_right(world: Any) -> None:
    """Capacity 20, a truncation every 7 steps, 47 adds: all 20 rows reachable, no wrong next observation."""
    for envs in (1, 5):
        for sampler in (RandomSampler(), SliceSampler(slice_len=1, by="start"), SliceSampler(slice_len=4)):
            buffer = ReplayBuffer(
                storage=LazyTensorStorage(20, compact_obs=True),
                sampler=sampler,
                batch_size=20,
                generator=torch.Generator().manual_seed(0),
            )
            streams = [[s for e in range(8) for s in world.episode(w, e, 7)] for w in range(envs)]
            for t in range(47):
                for stream in streams:
                    buffer.add(world.to_batch([stream[t]])[0])
            reached = set()
            for _ in range(60):
                sample, info = buffer.sample(return_info=True)
                reached.update(info["index"].tolist())
                expected = sample["observation"] + torch.tensor([0, 0, 1])
                assert torch.equal(sample["next", "observation"], expected)
            assert reached == set(range(20))


def test_what_the_batch_says_comes_back_whatever_it_is() -> None:
    """Rows in no order at all: every next observation goes to the pool, none is made up."""
    source = torch.Generator().manual_seed(0)
    obs, later = torch.randn(2, 40, 3, generator=source)
    later[::3][:-1] = obs[1::3][:13]  # some of them agree with the next row
    done = torch.zeros(40, dtype=torch.bool)
    batch = TensorDict({"observation": obs, "next": {"observation": later, "done": done}}, [40])
    buffer = ReplayBuffer(storage=LazyTensorStorage(64, compact_obs=True))
    for part in batch.split(7):
        buffer.extend(part)
    assert torch.equal(buffer[:]["next", "observation"], later)
    buffer.extend(batch)  # wraps
    assert torch.equal(buffer[16:40]["next", "observation"], later[16:40])
    assert torch.equal(buffer[40:]["next", "observation"], later[:24])
    assert torch.equal(buffer[:16]["next", "observation"], later[24:])


def test_signed_zeros_and_nan_come_back_bit_by_bit() -> None:
    bits = torch.tensor([0, -(2**31), 0x7FC00000, 0x7FC00001, -0x400000], dtype=torch.int32)
    values = bits.view(torch.float32)
    done = torch.zeros(4, dtype=torch.bool)
    now = values[:4].clone()
    now[1] = 0.0  # equal to -0.0, but not the same bits
    batch = TensorDict({"observation": now, "next": {"observation": values[1:], "done": done}}, [4])
    buffer = ReplayBuffer(storage=LazyTensorStorage(9, compact_obs=True))
    buffer.extend(batch)
    assert torch.equal(buffer[:]["next", "observation"].view(torch.int32), bits[1:])


def test_recurrent_states_and_step_counts_are_kept_once_too(world: Any) -> None:
    steps = world.episode(0, 0, 6)
    batch = world.to_batch(steps)
    batch["recurrent_state"] = torch.arange(6.0)[:, None, None].expand(6, 2, 8).clone()
    batch["next", "recurrent_state"] = batch["recurrent_state"] + 1
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, compact_obs=True))
    buffer.extend(batch)
    assert buffer.storage.bytes_per_row == sum(
        c[:1].numel() * c.element_size()
        for key, c in batch.items(True, True)
        if key not in [("next", "observation"), ("next", "step_count"), ("next", "recurrent_state")]
    )
    assert_bit_equal(buffer[:], batch)


def test_the_pool_holds_one_observation_per_end(world: Any) -> None:
    """64 writers one row at a time: a next observation waits in the pool until its row comes."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(6400, compact_obs=True))
    streams = [world.episode(w, 0, 50) + world.episode(w, 1, 50) for w in range(64)]
    for t in range(100):
        buffer.extend(world.to_batch([s[t] for s in streams]))
    index = buffer.index
    assert index is not None and index.trajectories == 128
    assert index.pool_used == 128
    assert index.pool_size <= 256


def test_unknown_next_observations_are_nan_as_in_the_full_batch(world: Any) -> None:
    """An env that hides final observations: next_known is False, final lacks the row."""
    steps = world.episode(0, 0, 3) + world.episode(0, 1, 3)
    batch = world.to_batch(steps)
    batch["collector", "next_known"] = torch.tensor([True, True, False, True, True, True])
    final = TensorDict(
        {"row": torch.tensor([5]), ("next", "observation"): batch["next", "observation"][5:]}, [1]
    )
    for compact in (False, True):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10, compact_obs=compact))
        buffer.extend(batch.exclude(("next", "observation"), ("next", "step_count")), final=final)
        later = buffer[:]["next", "observation"]
        assert bool(later[2].isnan().all())
        assert torch.equal(later[[0, 1, 3, 4, 5]], batch["next", "observation"][[0, 1, 3, 4, 5]])


def test_batch_larger_than_the_storage_keeps_its_last_rows(world: Any) -> None:
    steps = [s for e in range(5) for s in world.episode(0, e, 7)]
    batch = world.to_batch(steps)
    for extend in (lambda b: b.extend(batch), lambda b: b.extend(*world.compacted(batch, steps))):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10, compact_obs=True))
        assert len(extend(buffer)) == 10
        assert torch.equal(buffer[:]["next", "observation"], batch["next", "observation"][25:])


def test_errors_of_final(world: Any) -> None:
    steps = world.episode(0, 0, 4) + world.episode(0, 1, 4)
    batch = world.to_batch(steps)
    compact, final = world.compacted(batch, steps)
    buffer = ReplayBuffer(storage=LazyTensorStorage(50, compact_obs=True))
    with pytest.raises(ValueError, match=r"compact_obs=True needs .*final=collector.final"):
        buffer.extend(compact)
    with pytest.raises(ValueError, match=r'final needs an int64 entry "row".*got nothing'):
        buffer.extend(compact, final=final.exclude("row"))
    with pytest.raises(ValueError, match="must ascend within the 6 rows of the batch"):
        buffer.extend(compact[:6], final=final)
    with pytest.raises(
        ValueError, match=r"row 3 ends a run, and its next observation is neither in the batch"
    ):
        buffer.extend(compact, final=final[1:])
    with pytest.raises(ValueError, match=r"final\[\('next', 'observation'\)\] is torch.float64"):
        buffer.extend(
            compact, final=final.clone().apply(lambda c: c.double() if c.is_floating_point() else c)
        )
    with pytest.raises(
        ValueError,
        match=r"final has an entry 'reward', expected only 'row' and \('next', <entry of the batch>\)",
    ):
        buffer.extend(compact, final=final.clone().set("reward", torch.zeros(2)))
    with pytest.raises(ValueError, match=r"neither the batch nor its final has one"):
        buffer.extend(compact, final=final.select("row"))
    assert len(buffer) == 0 and not buffer.storage.allocated
    buffer.extend(compact, final=final)
    with pytest.raises(
        ValueError, match=r"the batch has \('next', 'step_count'\), which the first extend did not"
    ):
        buffer.extend(batch)
    other = ReplayBuffer(storage=LazyTensorStorage(50, compact_obs=True))
    other.extend(batch)
    with pytest.raises(
        ValueError,
        match=r"the batch lacks \('next', 'step_count'\), which the first extend had: pass it in the batch or in final",
    ):
        other.extend(compact, final=final)


def test_stats_count_what_is_saved(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 8))
    full, compact = pair(1000, RandomSampler)
    full.extend(batch)
    compact.extend(batch)
    a, b = full.stats(), compact.stats()
    assert (a["rows"], a["capacity"], a["rows_written"], a["bytes_saved"]) == (8, 1000, 8, 0)
    assert "trajectories" not in a and (b["trajectories"], b["open_trajectories"]) == (1, 0)
    assert a["bytes_per_row"] - b["bytes_per_row"] == 3 * 4 + 8
    index = compact.index
    assert index is not None and b["bytes"] == a["bytes"] - b["bytes_saved"] + index.nbytes


def test_pairs_that_no_row_shares_are_kept_as_they_are(world: Any) -> None:
    """Values that a network wrote for both ends of a step differ at every row: no pool entry for each."""
    batch = world.to_batch(world.episode(0, 0, 12))
    batch["state_value"] = torch.arange(12.0)[:, None]
    batch["next", "state_value"] = torch.arange(12.0)[:, None] + 0.5
    buffer = ReplayBuffer(storage=LazyTensorStorage(20, compact_obs=True), sampler=SliceSampler(slice_len=4))
    for part in batch.split(6):
        buffer.extend(part)
    pool = buffer.storage.pool
    assert pool is not None and "state_value" not in pool.pairs and "observation" in pool.pairs
    assert torch.equal(buffer[:]["next", "state_value"], batch["next", "state_value"])
    assert torch.equal(buffer[:]["next", "observation"], batch["next", "observation"])
