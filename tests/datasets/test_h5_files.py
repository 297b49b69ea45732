"""HDF5 files from elsewhere: nothing outside the file is read, nothing is allocated that it does not hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flatroll.export import export, import_h5, read_h5

h5py = pytest.importorskip("h5py")


def rows(number: int = 6) -> TensorDict:
    return TensorDict(
        {
            "a": {"b": torch.arange(number * 3.0).view(number, 3)},
            "nothing": torch.zeros(number, 0),
            "wave": torch.complex(torch.ones(number), torch.zeros(number)),
            "is_init": (torch.arange(number) % 3 == 0)[:, None],
        },
        [number],
    )


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}])
def test_filters_work(options: dict[str, Any], tmp_path: Path) -> None:
    batch = rows(3000)
    export(batch, tmp_path / "rows.h5", "h5", chunk_rows=700, **options)
    again = import_h5(tmp_path / "rows.h5")
    assert (again == batch).all()
    with h5py.File(tmp_path / "rows.h5") as file:
        assert file["a/b"].compression == options.get("compression")
        assert file["_first_rows"][:].tolist() == list(range(0, 3000, 3))


def test_it_is_read_in_pieces(tmp_path: Path) -> None:
    export(rows(7), tmp_path / "rows.h5", "h5")
    parts = list(read_h5(tmp_path / "rows.h5", chunk_rows=3))
    assert [len(part) for part in parts] == [3, 3, 1]
    assert (torch.cat(parts) == rows(7)).all()


def test_a_batch_without_markers_has_no_first_rows(tmp_path: Path) -> None:
    export(rows().exclude("is_init"), tmp_path / "rows.h5", "h5")
    with h5py.File(tmp_path / "rows.h5") as file:
        assert "_first_rows" not in file
    assert len(import_h5(tmp_path / "rows.h5")) == 6


def soft(file: Any, folder: Path) -> None:
    file["other"] = h5py.SoftLink("/x")


def external(file: Any, folder: Path) -> None:
    with h5py.File(folder / "secret.h5", "w") as secret:
        secret["x"] = np.ones(4)
    file["other"] = h5py.ExternalLink(str(folder / "secret.h5"), "/x")


def circle(file: Any, _: Path) -> None:
    folder = file.create_group("folder")
    folder["again"] = folder


def two_names(file: Any, folder: Path) -> None:
    file["other"] = file["x"]


def raw_file(file: Any, folder: Path) -> None:
    (folder / "secret").write_bytes(bytes(32))
    file.create_dataset("other", (4,), "f8", external=[(str(folder / "secret"), 0, 32)])


def virtual(file: Any, folder: Path) -> None:
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource(str(folder / "secret.h5"), "x", (4,))
    file.create_virtual_dataset("other", layout)


def huge(file: Any, folder: Path) -> None:
    file.create_dataset("other", (10**11,), "f4", chunks=(1024,), compression="gzip")


def huge_and_plain(file: Any, folder: Path) -> None:
    file.create_dataset("other", (10**11,), "f4")


def deep(file: Any, folder: Path) -> None:
    file["/".join("d" * 70)] = np.ones(4)


def text(file: Any, folder: Path) -> None:
    file["other"] = ["a", "b", "c", "d"]


def one_value(file: Any, folder: Path) -> None:
    file["other"] = 3.0


def longer(file: Any, folder: Path) -> None:
    file["other"] = np.ones(5)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (soft, "other is a link"),
        (external, "other is a link"),
        (circle, "another name"),
        (two_names, "another name"),
        (raw_file, "is stored in other files"),
        (virtual, "is stored in other files"),
        (huge, "claims 400000000000 bytes"),
        (huge_and_plain, "claims|damaged"),
        (deep, "more than 64 groups"),
        (text, "must hold numbers"),
        (one_value, "single value"),
        (longer, "lengths"),
    ],
)
def test_hostile_files_are_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.ones(4)
        spoil(file, tmp_path)
    with pytest.raises((ValueError, TypeError), match=message):
        import_h5(tmp_path / "rows.h5")


def test_a_bound_on_memory(tmp_path: Path) -> None:
    export(rows(), tmp_path / "rows.h5", "h5")
    with pytest.raises(ValueError, match="more than max_bytes=10"):
        import_h5(tmp_path / "rows.h5", max_bytes=10)
    with h5py.File(tmp_path / "empty.h5", "w"):
        pass
    with pytest.raises(ValueError, match="no columns"):
        import_h5(tmp_path / "empty.h5")
