"""An HDF5 checkpoint from elsewhere: nothing outside the file is read, nothing is allocated that it does not hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crafted_states import same
from tensordict import TensorDict

from flatroll.buffers import H5StorageCheckpointer, LazyTensorStorage, ReplayBuffer
from flatroll.disk import DamagedFileError

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
        (raw_file, "is stored in other files"),
        (huge, "claims 400000000000 bytes"),
        (deep, "more than 64 groups"),
        (text, "must hold numbers"),
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


def test_strings_on_the_heap_of_an_earlier_form_are_not_read(tmp_path: Path) -> None:
    """HDF5 may read a damaged heap forever: dtypes of columns are bytes of fixed length, or those of the values."""
    buffer, rows = made(), TensorDict({"x": torch.arange(3.0), "flag": torch.ones(3, dtype=torch.bool)}, [3])
    buffer.extend(rows.set("half", torch.ones(3, dtype=torch.bfloat16)))
    buffer.dumps(tmp_path / "new")
    file = tmp_path / "new/checkpoint.h5"
    assert b"GCOL" not in file.read_bytes()
    again = made()
    again.loads(tmp_path / "new")
    assert again[:]["half"].dtype is torch.bfloat16
    for keys in (("x", "flag"), ("x", "flag", "half")):
        buffer, path = made(), tmp_path / str(len(keys))
        buffer.extend(rows.select(*keys))
        buffer.dumps(path)
        with h5py.File(path / "checkpoint.h5", "r+") as h5:

            def as_before(name: str, data: Any) -> None:
                if "dtype" in data.attrs:
                    data.attrs["dtype"] = data.attrs["dtype"].decode()

            h5.visititems(as_before)
        assert b"GCOL" in (path / "checkpoint.h5").read_bytes()  # a sound heap, which must not be read either
        again = made()
        if "half" in keys:
            with pytest.raises(DamagedFileError, match="written by an earlier version"):
                again.loads(path)
        else:
            again.loads(path)
            assert same(again[:], buffer[:])
