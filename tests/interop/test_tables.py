"""Parquet, Arrow and HDF5 files, read without flatroll."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interop_rows import same
from tensordict import TensorDict

from flatroll.export import export
from flatroll.layout.export import to_numpy, to_pandas

# What one row of these columns is in a table: a number, or a list.
FLAT = [
    "observation",
    "arm.angle",
    "arm.level",
    "action",
    "is_init",
    "step_count",
    "next.reward",
    "next.done",
]


def check_lists(rows: TensorDict, read: dict[str, list[Any]]) -> None:
    """Compare columns that a library gave as Python's numbers and lists."""
    columns = to_numpy(rows)
    assert list(read) == list(columns)
    for name, column in columns.items():
        same(column.reshape(-1), np.array(read[name], column.dtype).reshape(-1))


def test_pyarrow(rows: TensorDict, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    ipc = pytest.importorskip("pyarrow.ipc")
    dataset = pytest.importorskip("pyarrow.dataset")
    export(rows, tmp_path / "rows.parquet", "parquet", chunk_rows=3)
    export(rows, tmp_path / "rows.arrow", "arrow", chunk_rows=3)
    check_lists(rows, parquet.read_table(tmp_path / "rows.parquet").to_pydict())
    check_lists(rows, ipc.open_file(str(tmp_path / "rows.arrow")).read_all().to_pydict())
    found = dataset.dataset(tmp_path / "rows.parquet").to_table(filter=dataset.field("action") > 2)
    assert found["action"].to_pylist() == rows["action"][rows["action"] > 2].tolist()


def test_polars(rows: TensorDict, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    export(rows, tmp_path / "rows.parquet", "parquet", chunk_rows=3)
    export(rows, tmp_path / "rows.arrow", "arrow", chunk_rows=3)
    for frame in (
        polars.read_parquet(tmp_path / "rows.parquet"),
        polars.read_ipc(tmp_path / "rows.arrow"),
    ):
        check_lists(rows, frame.to_dict(as_series=False))
        columns = to_numpy(rows)
        same(columns["action"], frame["action"].to_numpy())
        same(columns["observation"], frame["observation"].to_numpy())
    ends = polars.scan_parquet(tmp_path / "rows.parquet").filter(polars.col("next.done")).collect()
    assert ends.height == int(rows["next", "done"].sum())


def test_datasets(rows: TensorDict, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    export(rows, tmp_path / "rows.parquet", "parquet", chunk_rows=3)
    read = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    check_lists(rows, read.to_dict())
    tensors = read.with_format("torch")[:]
    for name in FLAT:
        column = to_numpy(rows)[name].reshape(len(rows), -1)
        wanted = (
            column.astype(np.float32) if column.dtype.kind == "f" else column
        )  # datasets makes all floats of one kind
        np.testing.assert_array_equal(tensors[name].numpy().reshape(len(rows), -1), wanted)


def test_pandas(rows: TensorDict, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    export(rows, tmp_path / "frame.parquet", "pandas", chunk_rows=3)
    export(rows, tmp_path / "rows.parquet", "parquet", chunk_rows=3)
    export(rows, tmp_path / "rows.arrow", "arrow", chunk_rows=3)
    frame, wanted = pandas.read_parquet(tmp_path / "frame.parquet"), to_pandas(rows)
    assert list(frame) == list(wanted)
    for name in wanted:
        assert frame[name].dtype == wanted[name].dtype
        for old, new in zip(wanted[name], frame[name], strict=True):
            same(np.reshape(old, -1), np.reshape(new, -1))
    for frame in (
        pandas.read_parquet(tmp_path / "rows.parquet"),
        pandas.read_feather(tmp_path / "rows.arrow"),
    ):
        same(rows["action"], frame["action"])
        same(rows["observation"], np.stack(frame["observation"]))


def test_h5py(rows: TensorDict, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    export(rows, tmp_path / "rows.h5", "h5", chunk_rows=3, compression="gzip")
    found: dict[str, Any] = {}
    with h5py.File(tmp_path / "rows.h5", "r") as file:
        file.visititems(lambda name, item: found.update({name: item[:]} if hasattr(item, "shape") else {}))
    first_rows = found.pop("_first_rows")
    columns = to_numpy(rows, separator="/")
    assert set(found) == set(columns)
    for name, column in columns.items():
        same(column, found[name])
    same(np.array([0, 4, 5]), first_rows)
