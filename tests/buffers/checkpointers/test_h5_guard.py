"""An HDF5 checkpoint from elsewhere: nothing outside the file is read, nothing is allocated that it does not hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatroll.buffers import H5StorageCheckpointer, LazyTensorStorage, ReplayBuffer

h5py = pytest.importorskip("h5py")


def made() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(8), checkpointer=H5StorageCheckpointer())


def column(file: Any) -> str:
    names: list[str] = []
    file["rows"].visititems(lambda name, value: names.append(f"rows/{name}"))
    return names[0]


def soft(file: Any, folder: Path) -> None:
    name = column(file)
    file.move(name, "other")
    file[name] = h5py.SoftLink("/other")


def external(file: Any, folder: Path) -> None:
    with h5py.File(folder / "secret.h5", "w") as secret:
        secret["x"] = np.ones(8)
    name = column(file)
    del file[name]
    file[name] = h5py.ExternalLink(str(folder / "secret.h5"), "/x")


def external_state(file: Any, folder: Path) -> None:
    with h5py.File(folder / "secret.h5", "w") as secret:
        secret.create_group("x")
    del file["state"]
    file["state"] = h5py.ExternalLink(str(folder / "secret.h5"), "/x")


def circle(file: Any, folder: Path) -> None:
    file["rows"]["again"] = file["rows"]


def raw_file(file: Any, folder: Path) -> None:
    (folder / "secret").write_bytes(bytes(64))
    name = column(file)
    del file[name]
    file.create_dataset(name, (8,), "f8", external=[(str(folder / "secret"), 0, 64)])


def huge(file: Any, folder: Path) -> None:
    name = column(file)
    del file[name]
    file.create_dataset(name, (10**11,), "f4", chunks=(1024,), compression="gzip")


def deep(file: Any, folder: Path) -> None:
    file["rows"]["/".join("d" * 70)] = np.ones(8)


def text(file: Any, folder: Path) -> None:
    del file["json"]
    file["json"] = ["a"]


def later(file: Any, folder: Path) -> None:
    file.attrs["format"] = 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (soft, "is a link"),
        (external, "is a link"),
        (external_state, "is a link"),
        (circle, "another name"),
        (raw_file, "lies in other files"),
        (huge, "claims 400000000000 bytes"),
        (deep, "more than 64 groups"),
        (text, "must be of numbers"),
        (later, "install a later flatroll"),
    ],
)
def test_hostile_files_are_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    buffer = made()
    buffer.extend(torch.arange(8.0))
    buffer.dumps(tmp_path)
    with h5py.File(tmp_path / "checkpoint.h5", "r+") as file:
        spoil(file, tmp_path)
    with pytest.raises(ValueError, match=message):
        buffer.loads(tmp_path)
    assert buffer[:].tolist() == list(range(8))
