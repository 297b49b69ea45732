"""Checkpointers with dumps(storage, path) and loads(storage, path) save and load buffers, wholly or not at all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from flatroll.buffers import (
    DiskStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    StorageCheckpointerBase,
)
from flatroll.disk import Checkpoint


class TorchFile:
    """The two methods, and nothing else."""

    def dumps(self, storage: Any, path: Path) -> None:
        assert path.is_dir() and not list(path.iterdir())
        torch.save(storage.state_dict(), path / "rows.pt")

    def loads(self, storage: Any, path: Path) -> None:
        storage.load_state_dict(torch.load(path / "rows.pt"))


class NumpyFile(StorageCheckpointerBase):
    """A subclass that takes the columns of the state apart."""

    def __init__(self) -> None:  # without the base class's
        self.tree: Any = None

    def dumps(self, storage: Any, path: Path) -> None:
        state = storage.state_dict()
        self.tree = {key: value for key, value in state.items() if key != "columns"}
        values = {str(i): each["values"].numpy() for i, each in enumerate(state["columns"].values())}
        np.savez(path / "rows.npz", **values)
        torch.save([self.tree, list(state["columns"])], path / "tree.pt")

    def loads(self, storage: Any, path: Path) -> None:
        tree, keys = torch.load(path / "tree.pt")
        with np.load(path / "rows.npz") as file:
            columns = {key: {"values": torch.from_numpy(file[str(i)])} for i, key in enumerate(keys)}
        storage.load_state_dict({**tree, "columns": columns})


def rows(first: int, count: int) -> TensorDict:
    numbers = torch.arange(first, first + count + 1.0)[:, None]
    ids = {"traj_ids": torch.full((count,), first)}
    return TensorDict(
        {"observation": numbers[:-1], "next": {"observation": numbers[1:]}, "collector": ids}, [count]
    )


STORAGES: dict[str, Any] = {
    "plain": lambda: LazyTensorStorage(30),
    "compact": lambda: LazyTensorStorage(30, compact_obs=True),
}


def made(checkpointer: Any, storage: str = "plain", sampler: Any = None) -> ReplayBuffer:
    return ReplayBuffer(
        storage=STORAGES[storage](),
        sampler=SliceSampler(slice_len=3) if sampler is None else sampler,
        batch_size=12,
        generator=torch.Generator().manual_seed(0),
        checkpointer=checkpointer,
    )


@pytest.mark.parametrize("kind", [TorchFile, NumpyFile])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_buffer_goes_on_from_its_own_files(kind: Any, storage: str, tmp_path: Path) -> None:
    buffer, other = made(kind(), storage), made(kind(), storage)
    for turn in range(4):  # the ring wraps
        buffer.extend(rows(100 * turn, 11))
        buffer.dumps(tmp_path)
        assert len(list(tmp_path.glob("own-*"))) == min(turn + 1, 2)  # one for each version that is kept
        other.loads(tmp_path)
        assert bool((other[:] == buffer[:]).all())
        assert bool((other.sample() == buffer.sample()).all())
    other.loads(tmp_path, version=3)
    assert len(other) == 30
    with pytest.raises(FileNotFoundError, match="no version 1"):
        other.loads(tmp_path, version=1)


def test_priorities_and_an_empty_buffer(tmp_path: Path) -> None:
    def prioritized() -> ReplayBuffer:
        return made(TorchFile(), sampler=PrioritizedSampler(30, alpha=0.7, beta=0.5))

    empty = prioritized()
    empty.dumps(tmp_path / "empty")
    prioritized().loads(tmp_path / "empty")

    buffer, other = prioritized(), prioritized()
    buffer.extend(rows(0, 20))
    buffer.update_priority(torch.arange(20), torch.rand(20))
    buffer.dumps(tmp_path / "rows")
    other.loads(tmp_path / "rows")
    assert bool((other.sample() == buffer.sample()).all())


def test_items_and_a_whole_run(tmp_path: Path) -> None:
    def items() -> ReplayBuffer:
        return ReplayBuffer(storage=ListStorage(5), batch_size=2, checkpointer=TorchFile())

    buffer, other = items(), items()
    net, other_net = nn.Linear(2, 2), nn.Linear(2, 2)
    buffer.extend(["a", 1, 2.5])
    Checkpoint(tmp_path, buffer=buffer, net=net).save(step=1)
    assert Checkpoint(tmp_path, buffer=other, net=other_net).load() == {"step": 1}
    assert other[:] == ["a", 1, 2.5] and torch.equal(net.weight, other_net.weight)


class Broken(TorchFile):
    def dumps(self, storage: Any, path: Path) -> None:
        super().dumps(storage, path)
        raise OSError("the disk is full")


def test_a_save_that_fails_leaves_the_version_before(tmp_path: Path) -> None:
    buffer, other = made(TorchFile()), made(TorchFile())
    buffer.extend(rows(0, 10))
    buffer.dumps(tmp_path)
    before = sorted(tmp_path.iterdir())
    buffer.storage.checkpointer = Broken()
    buffer.extend(rows(100, 10))
    with pytest.raises(OSError, match="the disk is full"):
        buffer.dumps(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    other.loads(tmp_path)
    assert len(other) == 10


class Other(TorchFile):
    """Gives a state of other rows."""

    def loads(self, storage: Any, path: Path) -> None:
        state = torch.load(path / "rows.pt")
        state["columns"]["observation"]["values"] = torch.zeros(3, 1)
        storage.load_state_dict(state)


class Wrong(TorchFile):
    def loads(self, storage: Any, path: Path) -> None:
        storage.set_rows(torch.load(path / "rows.pt"))


class Forgetful(TorchFile):
    def loads(self, storage: Any, path: Path) -> None:
        return


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    buffer, plain = made(TorchFile()), made(None)
    buffer.extend(rows(0, 10))
    buffer.dumps(tmp_path / "own")
    plain.extend(rows(0, 10))
    plain.dumps(tmp_path / "plain")
    for checkpointer, folder, text in (
        (Other(), "own", "3 values, the index counts 10"),
        (Forgetful(), "own", r"Forgetful.loads\(storage, path\) must call storage.load_state_dict"),
        (Wrong(), "own", r"Wrong.loads\(storage, path\) raised AttributeError\(.*set_rows"),
        (TorchFile(), "plain", "was not written by TorchFile"),
    ):
        other = made(checkpointer)
        other.extend(rows(500, 5))
        with pytest.raises(ValueError, match=text):
            other.loads(tmp_path / folder)
        assert other[:]["observation"].flatten().tolist() == [500, 501, 502, 503, 504]


def test_what_has_no_pair_of_methods_is_refused(tmp_path: Path) -> None:
    class Half(StorageCheckpointerBase):
        def dumps(self, storage: Any, path: Path) -> None:
            raise AssertionError

    buffer = made(Half())
    buffer.extend(rows(0, 5))
    with pytest.raises(TypeError, match="Half must have dump and restore, or dumps and loads"):
        buffer.dumps(tmp_path / "a")
    on_disk = ReplayBuffer(storage=DiskStorage(10, tmp_path / "b"), checkpointer=TorchFile())
    with pytest.raises(TypeError, match="use DiskStorageCheckpointer, its default"):
        on_disk.dumps(tmp_path / "c")
    with pytest.raises(TypeError, match="TorchFile writes its own files and does not accept hooks"):
        made(TorchFile()).register_save_hook(lambda rows, path: rows)
