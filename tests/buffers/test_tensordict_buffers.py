"""The replay buffer for tensordicts and with priorities: what samples say, and how priorities come back."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)


def numbers(first: int, count: int) -> TensorDict:
    return TensorDict({"n": torch.arange(first, first + count)}, [count])


def prioritized(capacity: int = 10, **options: Any) -> TensorDictPrioritizedReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    given = {"storage": LazyTensorStorage(capacity), "alpha": 1.0, "beta": 1.0, "eps": 0.0, "batch_size": 64}
    return TensorDictPrioritizedReplayBuffer(generator=generator, **(given | options))


def drawn(buffer: ReplayBuffer) -> set[int]:
    return set(buffer.sample()["n"].tolist())


# -- what samples carry ----------------------------------------------------------------------------------------


def test_samples_say_where_their_rows_stand() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(7), batch_size=16)
    buffer.extend(numbers(0, 10))
    sample, info = buffer.sample(return_info=True)
    assert torch.equal(sample["index"], info["index"]) and sample["index"].dtype is torch.int64
    assert torch.equal(buffer[:]["n"][sample["index"]], sample["n"])
    assert isinstance(buffer.writer, TensorDictRoundRobinWriter)
    assert "index" not in buffer[:]  # positions are not stored
    assert buffer.stats()["bytes_per_row"] == 8


@pytest.mark.parametrize(
    ("sampler", "names"),
    [
        (RandomSampler(), {"index"}),
        (SliceSampler(slice_len=2), {"index"}),
        (PrioritizedSampler(9, 1.0, 1.0), {"index", "priority_weight", "index_generation"}),
        (PrioritizedSliceSampler(9, 1.0, 1.0, slice_len=2), {"index", "priority_weight", "index_generation"}),
    ],
)
def test_transforms_see_marks_and_positions_and_the_schema_is_constant(
    world: Any, sampler: Any, names: set[str]
) -> None:
    """Entries of the info and the sampler's marks are there before transforms, in every sample."""
    seen: list[set[Any]] = []

    def look(td: Any) -> Any:
        seen.append(set(td.keys(True, True)))
        return td

    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(9), sampler=sampler, transform=look, batch_size=8
    )
    for episode in range(5):
        buffer.extend(world.to_batch(world.episode(0, episode, 4)))
        sample = buffer.sample()
        assert names | {"is_init", ("next", "done")} <= seen[-1] == set(sample.keys(True, True))
        assert len({frozenset(keys) for keys in seen}) == 1
        assert torch.equal(buffer.storage.get(sample["index"])["observation"], sample["observation"])
        if "index_generation" in names:
            assert (sample["index_generation"] * 9 + sample["index"] < 4 * (episode + 1)).all()
            assert sample["priority_weight"].dtype is torch.float32


def test_positions_in_several_dimensions() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=6)
    n = torch.arange(12).reshape(3, 4)
    buffer.extend(TensorDict({"n": n}, [3, 4]))
    sample = buffer.sample()
    assert sample["index"].shape == (6, 2)
    assert torch.equal(n[sample["index"][:, 1], sample["index"][:, 0]], sample["n"])


def test_positions_of_whole_trajectories() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=3)
    buffer.extend(TensorDict({"n": torch.arange(8).reshape(4, 2)}, [4, 2]))
    sample = buffer.sample()
    assert sample["index"].shape == sample.batch_size == torch.Size([3, 2])
    assert torch.equal(sample["index"] * 2 + torch.tensor([0, 1]), sample["n"])
    assert sample.reshape(-1).batch_size == torch.Size([6])


def test_only_tensordicts_are_taken() -> None:
    for storage in (LazyTensorStorage(5), ListStorage(5)):
        buffer = TensorDictReplayBuffer(storage=storage, writer=RoundRobinWriter())
        with pytest.raises(TypeError, match="TensorDictReplayBuffer takes tensordicts, got Tensor"):
            buffer.add(torch.zeros(2))
    with pytest.raises(TypeError, match="takes tensordicts, got Tensor: ReplayBuffer takes anything"):
        TensorDictReplayBuffer(storage=TensorStorage(torch.zeros(3)))


def test_samples_can_be_stored_again() -> None:
    """What samples carry on top is left out, so neither rows nor schema change."""
    buffer, other = prioritized(10, batch_size=4), prioritized(10, batch_size=4)
    buffer.extend(numbers(0, 5))
    for _ in range(3):
        sample = buffer.sample()
        before = sample.clone()
        other.extend(sample)
        buffer.extend(sample)
        assert bool((sample == before).all()) and sample.keys() == before.keys()
    assert set(other[:].keys()) == set(buffer[:].keys()) == {"n"}
    buffer[sample["index"]] = sample.replace(n=sample["n"] + 100)
    assert (buffer[sample["index"]]["n"] >= 100).all()
    dataset = TensorDictReplayBuffer(storage=TensorStorage(sample), batch_size=4)
    assert torch.equal(dataset[:]["n"], sample["n"]) and len(dataset) == 4
    assert set(dataset[:].keys()) == {"n"}


# -- priorities ------------------------------------------------------------------------------------------------


def test_a_sample_takes_its_priorities_back() -> None:
    buffer = prioritized()
    buffer.extend(numbers(0, 10))
    sample = buffer.sample()
    sample["td_error"] = (sample["n"] == 3).float()
    buffer.update_tensordict_priority(sample)
    buffer.update_tensordict_priority(
        TensorDict({"index": torch.arange(10), "td_error": torch.eye(10)[3]}, [10])
    )
    assert drawn(buffer) == {3}


def test_a_batch_with_priorities_sets_them() -> None:
    buffer = prioritized()
    batch = numbers(0, 6)
    batch["td_error"] = torch.tensor([[0.0, 0], [0, 2], [0, 0], [1, 2], [0, 0], [0, 0]])  # reduced by max
    buffer.extend(batch)
    counts = Counter(buffer.sample(4000)["n"].tolist())
    assert set(counts) == {1, 3} and 1800 < counts[1] < 2200
    buffer.add(batch[1].update({"n": torch.tensor(7)}))
    assert drawn(buffer) == {1, 3, 7}
    later = prioritized(4)
    later.extend(batch)  # more rows than there is room for
    assert drawn(later) == {3}


def test_a_bad_priority_stores_nothing() -> None:
    buffer = prioritized()
    buffer.extend(numbers(0, 2).set("td_error", torch.ones(2)))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"batch\['td_error'\] must be finite and not negative"):
            buffer.extend(numbers(2, 3).set("td_error", torch.tensor([1.0, wrong, 1.0])))
    assert len(buffer) == 2
    plain = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4)
    )  # without priorities it is an entry like others
    assert plain.extend(numbers(0, 2).set("td_error", torch.tensor([-1.0, 2.0]))).tolist() == [0, 1]


def test_priorities_of_rows_overwritten_since_are_left_out() -> None:
    """The peer gives them to the rows that stand there now."""
    buffer = prioritized(6)
    buffer.extend(numbers(0, 6))
    sample = buffer.sample()
    buffer.extend(numbers(6, 3))  # slots 0, 1, 2
    sample["td_error"] = (sample["index"] != 4).float() * 1e6
    buffer.update_tensordict_priority(sample)
    found = buffer.sample(5000)
    weights = dict(zip(found["n"].tolist(), found["priority_weight"].tolist(), strict=True))
    assert 4 not in weights and {3, 5} <= set(weights)
    assert all(weights[n] == 1.0 for n in {6, 7, 8} & set(weights))
    assert weights[3] == pytest.approx(1e-6)
    blind = sample.exclude("index_generation")  # on the caller's head
    blind["td_error"] = (sample["index"] == 0).float()
    buffer.update_tensordict_priority(blind)
    assert 6 in drawn(buffer) and not {7, 8} & drawn(buffer)


@pytest.mark.parametrize("shape", [(64,), (8, 8), (2, 4, 8)])
def test_samples_may_be_reshaped(shape: tuple[int, ...]) -> None:
    buffer = prioritized()
    buffer.extend(numbers(0, 10))
    sample = buffer.sample().reshape(shape)
    sample["td_error"] = (sample["n"] == 5).float()[..., None].expand(*shape, 3)
    buffer.update_tensordict_priority(sample)
    rest = torch.arange(10)[torch.isin(torch.arange(10), sample["n"].flatten(), invert=True)]
    buffer.update_priority(rest, 0.0)
    assert drawn(buffer) == {5}
    one = sample.reshape(-1)[0]
    buffer.update_tensordict_priority(one.set("td_error", torch.tensor(9.0)))
    assert drawn(buffer) == {5, int(one["n"])}


def test_priorities_in_several_dimensions() -> None:
    buffer = prioritized(12, storage=LazyTensorStorage(12, ndim=2))
    n = torch.arange(12).reshape(3, 4)
    buffer.extend(TensorDict({"n": n, "td_error": (n == 6).float()}, [3, 4]))
    assert drawn(buffer) == {6}
    sample = buffer.sample()
    index = torch.tensor([[0, 0], [2, 1]])  # n = 0 and n = 6
    rows = TensorDict({"index": index, "td_error": torch.tensor([[1.0], [0.0]])}, [2])
    buffer.update_tensordict_priority(rows)
    assert drawn(buffer) == {0} and sample["index"].shape == (64, 2)


def test_a_trajectory_has_one_priority() -> None:
    buffer = prioritized(6, reduction="mean")
    error = torch.tensor([[0.0, 0], [1, 3], [2, 2]])
    buffer.extend(TensorDict({"n": torch.arange(6).reshape(3, 2), "td_error": error[..., None]}, [3, 2]))
    found = buffer.sample(4000)
    assert set(found["n"][:, 0].tolist()) == {2, 4} and (found["priority_weight"] == 1).all()
    first = found[found["n"][:, 0] == 2][0]
    buffer.update_tensordict_priority(first.set("td_error", torch.tensor([[8.0], [0.0]])))
    found = buffer.sample(4000)
    assert set(found["priority_weight"][:, 0].tolist()) == {0.5, 1.0}
    buffer.update_tensordict_priority(found.reshape(40, 100, 2).set("td_error", torch.zeros(40, 100, 2) + 1))
    assert (buffer.sample()["priority_weight"] == 1).all()
    with pytest.raises(ValueError, match="several items of the buffer along its last 1 batch dimensions"):
        buffer.update_tensordict_priority(found.reshape(-1))
    with pytest.raises(ValueError, match=r"data has batch size \[\], items have 1"):
        buffer.update_tensordict_priority(found[0, 0])


def test_slices_take_their_priorities_back(world: Any) -> None:
    sampler = PrioritizedSliceSampler(40, 1.0, 1.0, 0.0, slice_len=4, strict_length=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=400)
    buffer.extend(world.to_batch(world.episode(0, 0, 30)))
    for _ in range(2):
        sample = buffer.sample()
        sample["td_error"] = (sample["step_count"] == 7).float()
        buffer.update_tensordict_priority(sample)
    buffer.update_priority(torch.arange(30), (torch.arange(30) == 7).float())
    assert set(buffer.sample()["step_count"].flatten().tolist()) == {7, 8, 9, 10}


def test_what_is_missing_is_named() -> None:
    buffer = prioritized(priority_key=("losses", "td"))
    buffer.extend(numbers(0, 4))
    sample = buffer.sample()
    with pytest.raises(KeyError, match=r"data has no entry \('losses', 'td'\): .* \(priority_key\)"):
        buffer.update_tensordict_priority(sample)
    sample["losses", "td"] = torch.ones(64)
    buffer.update_tensordict_priority(sample)
    with pytest.raises(KeyError, match=r"data has no entry 'index'"):
        buffer.update_tensordict_priority(sample.exclude("index"))
    with pytest.raises(TypeError, match="takes tensordicts, got dict"):
        buffer.update_tensordict_priority({"index": 0})  # type: ignore[arg-type]
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"priority\[\d+\] is (-1|nan)"):
            buffer.update_tensordict_priority(sample.set(("losses", "td"), torch.full((64,), wrong)))
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    plain.extend(numbers(0, 4))
    with pytest.raises(TypeError, match="RandomSampler has no priorities"):
        plain.update_tensordict_priority(plain.sample().set("td_error", torch.ones(2)))


def test_priorities_of_data_of_any_kind() -> None:
    for storage, data in (
        (ListStorage(5), ["a", None, 3]),
        (LazyTensorStorage(5), torch.arange(3)),
        (LazyTensorStorage(5), (torch.arange(3), torch.zeros(3, 2))),
    ):
        buffer = PrioritizedReplayBuffer(alpha=1.0, beta=0.5, eps=0.0, storage=storage, batch_size=8)
        rows = buffer.extend(data)
        buffer.update_priority(rows, torch.tensor([0.0, 1.0, 0.0]))
        _, info = buffer.sample(return_info=True)
        assert info["index"].tolist() == [1] * 8 and info["priority_weight"].tolist() == [1.0] * 8
        buffer.update_priority(info["index"], 2.0, info["index_generation"])
    assert isinstance(PrioritizedReplayBuffer(alpha=1, beta=1).storage, ListStorage)
    with pytest.raises(TypeError, match="sampler"):
        PrioritizedReplayBuffer(alpha=1, beta=1, sampler=RandomSampler())  # type: ignore[call-arg]


def test_a_state_goes_on_with_priorities_and_positions() -> None:
    buffer, other = prioritized(6), prioritized(6)
    for first in range(0, 20, 4):
        buffer.extend(numbers(first, 4))
        sample = buffer.sample()
        buffer.update_tensordict_priority(sample.set("td_error", sample["n"].float()))
    other.load_state_dict(copy.deepcopy(buffer.state_dict()))
    for _ in range(3):
        mine, theirs = buffer.sample(), other.sample()
        assert bool((mine == theirs).all()) and mine.keys() == theirs.keys()
        buffer.update_tensordict_priority(mine.set("td_error", mine["n"].float()))
        other.update_tensordict_priority(theirs.set("td_error", theirs["n"].float()))


def test_prefetched_samples_carry_the_same() -> None:
    buffer = prioritized(10, batch_size=4, prefetch=2)
    buffer.extend(numbers(0, 10))
    for _ in range(10):
        sample = buffer.sample()
        assert torch.equal(sample["n"], sample["index"])
        buffer.update_tensordict_priority(sample.set("td_error", torch.ones(4)))


def test_items_of_a_list_carry_the_same() -> None:
    """Those of one form are stacked, others come as a list; what is stored stays as it is."""
    buffer = prioritized(storage=ListStorage(10), batch_size=8)
    buffer.extend([TensorDict({"n": torch.tensor(i), "td_error": torch.tensor(i == 2.0)}) for i in range(4)])
    sample = buffer.sample()
    assert sample["n"].tolist() == sample["index"].tolist() == [2] * 8
    buffer.update_tensordict_priority(
        sample.set("td_error", torch.zeros(8)).set("index", sample["index"] * 0 + 1)
    )
    buffer.update_tensordict_priority(sample[0].set("index", torch.tensor(2)))
    buffer.update_tensordict_priority(
        sample[1].set("index", torch.tensor(3)).set("td_error", torch.tensor(1.0))
    )
    assert set(buffer.sample()["n"].tolist()) == {3}
    assert set(buffer[3].keys()) == {"n", "td_error"}


def test_trajectories_of_any_length_carry_the_same() -> None:
    buffer = prioritized(storage=ListStorage(10), batch_size=8)
    buffer.extend([TensorDict({"td_error": torch.full((n, 1), float(n > 1))}, [n]) for n in (1, 2, 3)])
    sample = buffer.sample(100)
    assert isinstance(sample, list) and {len(item) for item in sample} == {2, 3}
    for item in sample:
        assert item["index"].tolist() == [len(item) - 1] * len(item)
    buffer.update_tensordict_priority(
        next(item for item in sample if len(item) == 2).set("td_error", torch.zeros(2, 1))
    )
    assert buffer.sample().batch_size == torch.Size([8, 3])
