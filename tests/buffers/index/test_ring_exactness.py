"""The ring test: capacity 20, a truncation every 7 steps, 47 adds. Peers lose rows or next observations here."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import Draw, LazyTensorStorage, ReplayBuffer, Ring, SliceSampler, TensorStorage

CAPACITY, EVERY, ADDS = 20, 7, 47


def row(env: int, count: int) -> TensorDict:
    """Step ``count`` of an env: its observation says env, episode, step, and the final one is no reset."""
    episode, step = divmod(count, EVERY)
    obs = torch.tensor([[env, episode, step]], dtype=torch.float32)
    end = torch.tensor([[step == EVERY - 1]])
    after = {
        "observation": obs + torch.tensor([0.0, 0.0, 1.0]),
        "reward": torch.ones(1, 1),
        "done": end,
        "truncated": end.clone(),
        "terminated": torch.zeros(1, 1, dtype=torch.bool),
    }
    root = {"observation": obs, "is_init": torch.tensor([[step == 0]]), "next": after}
    return TensorDict({**root, "collector": {"traj_ids": torch.tensor([env * 1000 + episode])}}, [1])


def rows_of(buffer: ReplayBuffer, draws: int) -> set[tuple[int, ...]]:
    """The rows in many samples, every next observation of which is checked."""
    seen: set[tuple[int, ...]] = set()
    for _ in range(draws):
        sample = buffer.sample()
        wrong = sample["next", "observation"] != sample["observation"] + torch.tensor([0.0, 0.0, 1.0])
        assert not wrong.any()
        seen |= {tuple(values) for values in sample["observation"].int().tolist()}
    return seen


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("envs", [1, 5])
@pytest.mark.parametrize("sampler", [None, SliceSampler(slice_len=1), SliceSampler(slice_len=4)])
def test_all_rows_are_reachable_and_no_next_observation_is_wrong(
    compact: bool, envs: int, sampler: Any
) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, compact_obs=compact),
        sampler=sampler,
        batch_size=64,
        generator=torch.Generator().manual_seed(0),
    )
    made = []
    for count in range(ADDS):
        batch = torch.cat([row(env, count) for env in range(envs)])
        buffer.extend(batch)
        made += [tuple(values) for values in batch["observation"].int().tolist()]
        assert len(buffer) == min(CAPACITY, len(made))
    assert rows_of(buffer, 40) == set(made[-CAPACITY:])
    assert {tuple(values) for values in buffer[:]["observation"].int().tolist()} == set(made[-CAPACITY:])


@pytest.mark.parametrize("compact", [False, True])
def test_the_same_in_memory_of_the_caller(compact: bool) -> None:
    first = torch.cat([row(0, count) for count in range(CAPACITY)])
    buffer = ReplayBuffer(
        storage=TensorStorage(first, compact_obs=compact), sampler=SliceSampler(slice_len=3), batch_size=60
    )
    assert len(buffer) == CAPACITY and rows_of(buffer, 20) == {
        (0, c // EVERY, c % EVERY) for c in range(CAPACITY)
    }
    for count in range(CAPACITY, ADDS):
        buffer.extend(row(0, count))
    assert rows_of(buffer, 40) == {(0, c // EVERY, c % EVERY) for c in range(ADDS - CAPACITY, ADDS)}
    slot = int(buffer.extend(row(0, ADDS))[0])
    assert slot == ADDS % CAPACITY and torch.equal(first["observation"][slot], row(0, ADDS)["observation"][0])


class WrittenToMeanwhile(Ring):
    """A ring to which another process writes two rounds of rows between any two reads of its counters."""

    @property
    def head(self) -> int:
        return self.read("head")

    @property
    def written(self) -> int:
        return self.read("written")

    def read(self, name: str) -> int:
        value, first = int(self._state[name][0]), int(self._state["written"][0])
        self._state["head"], self._state["written"] = first + self.capacity, first + 2 * self.capacity
        return value


@pytest.mark.parametrize("rows", [1, 5, 10, 13])
def test_slots_used_while_another_process_writes(rows: int) -> None:
    """All slots that were used before are counted, and none that does not exist, however the counters move."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    for value in range(rows):
        buffer.add(torch.tensor(value))
    ring = WrittenToMeanwhile(10)
    ring._state[:] = buffer.ring._state
    assert min(rows, 10) <= ring.used <= 10
    ring._state[:] = buffer.ring._state
    buffer.ring = ring
    assert len(buffer[:]) == 10


@pytest.mark.parametrize("rows", [1, 5, 10, 13])
def test_ages_of_a_snapshot_while_another_process_writes(rows: int) -> None:
    """Every age of the snapshot has its slot, though all rows of it are given up before they are looked for."""
    plain = Ring(10)
    for _ in range(rows):
        plain.claim(1)
        plain.publish(1)
    ring = WrittenToMeanwhile(10)
    ring._state[:] = plain._state
    version, stored = ring.snapshot()
    head = max(0, rows - 10)
    assert version == (head, 0) and min(rows, 10) <= stored <= 10
    slots = ring.slots_by_age(torch.arange(stored), version)
    assert slots.tolist() == [(head + age) % 10 for age in range(stored)]
    assert not ring.unchanged_since(Draw(slots, version=version))


def test_a_snapshot_goes_on_when_rows_are_given_up() -> None:
    ring = Ring(8)
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer"):
        ring.snapshot()
    ring.claim(8)
    ring.publish(8)
    version, rows = ring.snapshot()
    ring.claim(3)  # another process begins to write
    newest = torch.tensor([rows - 1])
    with pytest.raises(IndexError, match=r"no stored row has age 7: ages are 0 \(the oldest\) to 4"):
        ring.slots_by_age(newest)
    slots = ring.slots_by_age(newest, version)
    assert slots.tolist() == [7] and ring.unchanged_since(Draw(slots, version=version))
    oldest = ring.slots_by_age(torch.tensor([2]), version)
    assert oldest.tolist() == [2] and not ring.unchanged_since(Draw(oldest, version=version))
    with pytest.raises(IndexError, match=r"no stored row has age 8: ages are 0 \(the oldest\) to 7"):
        ring.slots_by_age(torch.tensor([rows]), version)
    with pytest.raises(IndexError, match="no stored row has age -1"):
        ring.slots_by_age(torch.tensor([-1]), version)
