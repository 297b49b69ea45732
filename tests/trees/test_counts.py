"""Counts of states, and the sampler that prefers rare ones."""

from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.layout import audit
from flatroll.trees import CountSampler, StateCounter, count_states, first_of_state


def cells(*numbers: int) -> TensorDict:
    return TensorDict({"cell": torch.tensor(numbers)}, [len(numbers)])


def test_counts_against_a_counter() -> None:
    counted, counter = Counter(), StateCounter(["cell"])
    for seed in range(5):
        batch = cells(*torch.randint(9, (30,), generator=torch.Generator().manual_seed(seed)).tolist())
        counted.update(batch["cell"].tolist())
        assert counter.add(batch.reshape(5, 6)).flatten().tolist() == [
            counted[c] for c in batch["cell"].tolist()
        ]
        alone = Counter(batch["cell"].tolist())
        assert count_states(batch, "cell").tolist() == [alone[c] for c in batch["cell"].tolist()]
        assert batch[first_of_state(batch, "cell")]["cell"].tolist() == list(alone)
    assert counter.count(cells(3, 77)).tolist() == [counted[3], 0]
    assert StateCounter("cell").count(cells(3)).tolist() == [0]
    assert count_states(cells(), "cell").tolist() == first_of_state(cells(), "cell").tolist() == []
    with pytest.raises(KeyError, match="'observation'"):
        count_states(cells(1))


def share(buffer: ReplayBuffer, cell: int) -> float:
    return float((buffer.sample(4000)["cell"] == cell).double().mean())


def test_states_are_drawn_equally_often() -> None:
    generator = torch.Generator().manual_seed(0)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100), sampler=CountSampler("cell"), batch_size=4, generator=generator
    )
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    buffer.extend(cells(*[1] * 60, *[2] * 30, *[3] * 10))
    assert [share(buffer, cell) for cell in (1, 2, 3)] == pytest.approx([1 / 3] * 3, abs=0.03)
    buffer.extend(cells(*[4] * 60))  # over the rows of cell 1
    assert [share(buffer, cell) for cell in (1, 2, 3, 4)] == pytest.approx([0, *[1 / 3] * 3], abs=0.03)
    buffer[:60] = cells(*[2] * 60)
    buffer.mark_update(torch.arange(60))
    assert [share(buffer, cell) for cell in (2, 3, 4)] == pytest.approx([0.5, 0.5, 0], abs=0.03)


def test_power() -> None:
    for power, expected in ((0.0, 0.8), (0.5, 2 / 3), (1.0, 0.5)):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(100),
            sampler=CountSampler("cell", power),
            batch_size=4,
            generator=torch.Generator().manual_seed(1),
        )
        buffer.extend(cells(*[7] * 80, *[8] * 20))
        assert share(buffer, 7) == pytest.approx(expected, abs=0.03)
    with pytest.raises(ValueError, match="power"):
        CountSampler("cell", -1.0)


def test_single_rows_of_trajectories(make_rollout) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=CountSampler(), batch_size=64)
    buffer.extend(make_rollout())
    sample = buffer.sample()
    assert sample["is_init"].all() and not [
        finding for finding in audit(sample) if finding.severity == "error"
    ]
    other = ReplayBuffer(storage=LazyTensorStorage(10), sampler=CountSampler("cells"), batch_size=4)
    other.extend(cells(1, 2))
    with pytest.raises(KeyError, match="no entry 'cells'; they have 'cell'"):
        other.sample()


def test_a_restored_buffer_is_weighed_anew() -> None:
    def buffer_of(*numbers: int) -> ReplayBuffer:
        made = ReplayBuffer(storage=LazyTensorStorage(10), sampler=CountSampler("cell"), batch_size=400)
        made.extend(cells(*numbers))
        return made

    buffer, other = buffer_of(1, 1, 1, 1, 2), buffer_of(1, 2, 2, 2, 2)
    buffer.sample()
    buffer.load_state_dict(other.state_dict())
    assert share(buffer, 1) == pytest.approx(0.5, abs=0.05)
