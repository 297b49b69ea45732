"""What leaves as NumPy, pandas or Arrow comes back bit by bit: markers, nested keys, images, every dtype."""

import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from flatroll.export import (
    from_arrow,
    from_numpy,
    from_pandas,
    import_pandas,
    import_parquet,
    to_arrow,
    to_numpy,
    to_pandas,
)
from flatroll.layout import audit

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
]


def through_parquet(batch: TensorDict) -> TensorDict:
    parquet = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(to_arrow(batch), file)
    return from_arrow(parquet.read_table(io.BytesIO(file.getvalue())))


def through_arrow(batch: TensorDict) -> TensorDict:
    pytest.importorskip("pyarrow")
    return from_arrow(to_arrow(batch))


def through_pandas(batch: TensorDict, **options: Any) -> TensorDict:
    pytest.importorskip("pandas")
    return from_pandas(to_pandas(batch, **options))


def through_arrays_alone(batch: TensorDict) -> TensorDict:
    return through_pandas(batch, split=1)


def through_files(batch: TensorDict) -> TensorDict:
    file = io.BytesIO()
    np.savez(file, **to_numpy(batch))  # type: ignore[arg-type]
    return from_numpy(np.load(io.BytesIO(file.getvalue())))


def through_numpy(batch: TensorDict) -> TensorDict:
    return from_numpy(to_numpy(batch))


ROUTES = [
    through_numpy,
    through_files,
    through_pandas,
    through_arrays_alone,
    through_arrow,
    through_parquet,
]
each_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)


def bits(column: torch.Tensor) -> bytes:
    return column.contiguous().numpy().tobytes()


def check_same(batch: TensorDict, again: TensorDict) -> None:
    assert again.batch_size == batch.batch_size
    assert list(again.keys(True, True)) == list(batch.keys(True, True))
    for key in batch.keys(True, True):
        old, new = batch.get(key), again.get(key)
        assert (new.dtype, new.shape) == (old.dtype, old.shape), key
        assert bits(new) == bits(old), key


@pytest.fixture
def rich(batch: TensorDict) -> TensorDict:
    """The 14 rows of the fixture, with an image, a matrix, a deeper nesting and floats of every kind."""
    torch.manual_seed(0)
    batch = batch.clone()
    batch["pixels"] = torch.randint(0, 256, (14, 3, 8, 8), dtype=torch.uint8)
    batch["agents", "arm", "pose"] = torch.randn(14, 2, 3)
    batch["odd"] = torch.tensor([float("nan"), float("inf"), -0.0, 0.1, 1e-45] * 2 + [1.0] * 4)
    batch["one"] = torch.randn(14, 1, 1)
    return batch


@each_route
def test_a_batch_comes_back_bit_by_bit(route: Callable[[TensorDict], TensorDict], rich: TensorDict) -> None:
    again = route(rich)
    check_same(rich, again)
    assert audit(again.exclude("odd")) == []
    again["pixels"].zero_()  # its memory can be written to


@pytest.mark.cover(2)
@each_route
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7)], ids=str)
def test_every_dtype_and_shape(
    route: Callable[[TensorDict], TensorDict], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values = torch.randint(0, 256, (6, *shape, dtype.itemsize), dtype=torch.uint8)
    values = (values[..., 0] % 2).bool() if dtype is torch.bool else values.view(dtype)[..., 0]
    batch = TensorDict({"a": values, "next": {"a": values.flip(0)}}, [6])
    check_same(batch, route(batch))


@each_route
def test_no_rows_and_views(route: Callable[[TensorDict], TensorDict], rich: TensorDict) -> None:
    check_same(rich[:0], route(rich[:0]))
    check_same(rich[3:11:2], route(rich[3:11:2]))


def test_complex_numbers_and_entries_without_numbers(batch: TensorDict) -> None:
    batch["wave"] = torch.randn(14, 2, dtype=torch.complex64)
    batch["nothing"] = torch.zeros(14, 0)
    check_same(batch, through_numpy(batch))
    again = through_pandas(batch)
    check_same(batch, again.select(*batch.keys(True, True)))
    pytest.importorskip("pyarrow")
    with pytest.raises(TypeError, match=r"'wave' is complex64.*view_as_real"):
        to_arrow(batch)
    with pytest.raises(TypeError, match="'nothing' has rows without numbers"):
        to_arrow(batch.exclude("wave"))


def test_numpy_shares_memory_and_gradients_stay_behind() -> None:
    value = torch.zeros(3, requires_grad=True)
    arrays = to_numpy(TensorDict({"a": torch.zeros(3), "b": value}, [3]))
    again = from_numpy(arrays)
    arrays["a"][0] = 5
    assert again["a"][0] == 5 and not again["b"].requires_grad
    frozen = np.zeros(3)
    frozen.setflags(write=False)
    from_numpy({"a": frozen})["a"] += 1
    assert frozen.sum() == 0
    assert from_numpy({"a": np.arange(3)[::-1], "b": np.arange(3, dtype=">i4")})["b"].tolist() == [0, 1, 2]
    lazy = lazy_stack([TensorDict({"a": torch.tensor(i)}) for i in range(3)])
    assert to_numpy(lazy)["a"].tolist() == [0, 1, 2]


def test_a_frame_is_what_pandas_users_expect(rich: TensorDict) -> None:
    pytest.importorskip("pandas")
    frame = to_pandas(rich)
    assert list(frame.columns[:4]) == ["observation[0]", "observation[1]", "observation[2]", "action"]
    assert "agents.arm.pose[1,2]" in frame.columns and frame["pixels"][0].shape == (3, 8, 8)
    assert frame["next.done"].dtype == bool and frame["next.reward"].dtype == np.float32
    sums = frame.groupby("collector.traj_ids")["next.reward"].sum()
    assert sums.to_dict() == {0: 3.0, 1: 1.5, 100: 9.0, 101: 3.0}
    some = from_pandas(frame[frame["collector.traj_ids"] == 100])
    check_same(rich[7:10], some)
    pandas = importlib.import_module("pandas")
    twice = from_pandas(pandas.concat([frame, frame]))
    check_same(torch.cat([rich, rich]), twice)
    frame["pixels"][0][:] = 0
    assert rich["pixels"][0].any()  # the frame's images are its own


def test_without_the_record_flags_and_rewards_are_columns(batch: TensorDict) -> None:
    pandas = pytest.importorskip("pandas")
    text = to_pandas(batch).to_csv(index=False)
    check_same(batch.double(), from_pandas(pandas.read_csv(io.StringIO(text))).double())
    pyarrow = pytest.importorskip("pyarrow")
    table = to_arrow(batch)
    bare = pyarrow.table({name: table[name] for name in table.column_names})
    check_same(batch, from_arrow(bare))


@pytest.mark.parametrize("change", [to_numpy, to_pandas, to_arrow])
def test_what_cannot_be_exported_is_refused_by_name(change: Callable[..., Any], batch: TensorDict) -> None:
    if change is not to_numpy:
        pytest.importorskip("pandas" if change is to_pandas else "pyarrow")
    with pytest.raises(ValueError, match=r"batch size \[N\], got \[2, 7\]"):
        change(batch.reshape(2, 7))
    with pytest.raises(TypeError, match=r"'half' is torch\.bfloat16"):
        change(TensorDict({"half": torch.zeros(2, dtype=torch.bfloat16)}, [2]))
    with pytest.raises(TypeError, match=r"entry 'task' holds .*batch.exclude\('task'\)"):
        change(TensorDict({"task": ["x", "y"]}, [2]))
    dotted = TensorDict({"a": torch.zeros(2), "next": {"a.b": torch.zeros(2)}}, [2])
    with pytest.raises(ValueError, match=r"'a.b'\) has '.' in its name: pass another separator"):
        change(dotted)
    assert to_numpy(dotted, separator="/")["next/a.b"].shape == (2,)
    check_same(dotted, from_numpy(to_numpy(dotted, separator="/"), separator="/"))


@pytest.mark.parametrize(
    ("columns", "error", "text"),
    [
        ({"a": np.zeros(3), "b": np.zeros(2)}, ValueError, "one row for each row"),
        ({"a": np.zeros(())}, ValueError, "one row for each row"),
        ({"a": np.array(["x", "y"])}, TypeError, "'a' must hold numbers or bools, got <U1"),
        ({"a": np.zeros(2), "a.b": np.zeros(2)}, ValueError, "prefixes of other entries' names"),
        ({"a.b": np.zeros(2), "a": np.zeros(2)}, ValueError, "prefixes of other entries' names"),
        ({"a.b.c": np.zeros(2), "a.b": np.zeros(2)}, ValueError, "prefixes of other entries' names"),
    ],
)
def test_arrays_that_are_no_batch(columns: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        from_numpy(columns)
    assert from_numpy({}).batch_size == torch.Size([0])


def test_frames_that_are_no_batch(rich: TensorDict) -> None:
    pandas = pytest.importorskip("pandas")
    frame = to_pandas(rich)
    with pytest.raises(
        ValueError, match=r"'observation' needs its 3 columns .*: observation\[1\] is missing"
    ):
        from_pandas(frame.drop(columns="observation[1]"))
    with pytest.raises(ValueError, match=r"observation\[0\] is missing"):
        from_pandas(pandas.DataFrame({"observation[1]": [1.0]}))
    with pytest.raises(TypeError, match="column 'name' holds texts, row 0 has 'x': leave it out"):
        from_pandas(pandas.DataFrame({"name": ["x", "y"]}))
    with pytest.raises(TypeError, match=r"column 'name' must hold numbers.*, row 1 has None"):
        from_pandas(pandas.DataFrame({"name": [1, None]}, dtype=object))
    with pytest.raises(ValueError, match="unique names"):
        from_pandas(pandas.DataFrame([[1, 2]], columns=["a", "a"]))
    ragged = pandas.DataFrame({"a": [np.zeros(2), np.zeros(3)]})
    with pytest.raises(ValueError, match=r"column 'a' must have one shape: row 1 has \[3\], row 0 has \[2\]"):
        from_pandas(ragged)
    with pytest.raises(TypeError, match=r"column 'a' must hold numbers.*, row 1 has \[1, \[2\]\]"):
        from_pandas(pandas.DataFrame({"a": [[1, 2], [1, [2]]]}))
    mixed = pandas.DataFrame({"a": [[1, 2], [0.5, 1.5]]})
    with pytest.raises(
        ValueError, match="column 'a' must have one dtype: row 1 has float64, row 0 has int64"
    ):
        from_pandas(mixed)
    mixed["a"] = [np.asarray(cell, float) for cell in mixed["a"]]  # as the error says
    assert from_pandas(mixed)["a"].tolist() == [[1, 2], [0.5, 1.5]]
    with pytest.raises(ValueError, match="would be read as a part"):
        to_pandas(TensorDict({"a[0]": torch.zeros(2)}, [2]))


def test_tables_that_are_no_batch() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="column 'a' has 1 missing values"):
        from_arrow(pyarrow.table({"a": [1, None, 3]}))
    for kind in (pyarrow.string(), pyarrow.large_string()):
        words = pyarrow.table({"a": pyarrow.array(["x", "y"], kind), "b": [1, 2]})
        with pytest.raises(TypeError, match=r"column 'a' holds texts .*, table\.drop_columns\(\['a'\]\)"):
            from_arrow(words)
        assert from_arrow(words.drop_columns(["a"]))["b"].tolist() == [1, 2]
    with pytest.raises(TypeError, match=r"column 'a' holds texts \(list<"):
        from_arrow(pyarrow.table({"a": [["x"], ["y"]]}))
    with pytest.raises(TypeError, match=r"column 'a' must hold numbers, bools or lists of them, got struct"):
        from_arrow(pyarrow.table({"a": [{"x": 1}]}))
    with pytest.raises(ValueError, match="lists of one length: one in row 2 has 3 values, the first has 2"):
        from_arrow(pyarrow.table({"a": [[1, 2], [3, 4], [5, 6, 7]]}))
    with pytest.raises(ValueError, match="lists of one length: one in row 1 has 1 values, the first has 2"):
        from_arrow(pyarrow.table({"a": [[[1, 2], [3, 4]], [[5], [6]]]}))
    with pytest.raises(ValueError, match="column 'a' has 1 missing values, the first in row 1"):
        from_arrow(pyarrow.table({"a": [[1, 2], None]}))
    with pytest.raises(ValueError, match="column 'a' has 2 missing values, the first in row 2"):
        from_arrow(pyarrow.table({"a": [[1, 2], [3, 4], [None, None]]}))
    with pytest.raises((TypeError, ValueError), match="column 'a'"):
        from_arrow(pyarrow.table({"a": pyarrow.array([1, 2], pyarrow.timestamp("s"))}))
    with pytest.raises(ValueError, match="unique names"):
        from_arrow(pyarrow.Table.from_arrays([[1], [2]], names=["a", "a"]))
    pieces = pyarrow.concat_tables([to_arrow(from_numpy({"a": np.arange(6).reshape(3, 2)}))] * 2)
    assert from_arrow(pieces.slice(1, 4))["a"].tolist() == [[2, 3], [4, 5], [0, 1], [2, 3]]


LISTS: dict[str, list[Any]] = {
    "one deep": [[1.5, 2.0], [3.0, 4.0], [5.0, 6.0]],
    "two deep": [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [11, 12]]],
    "bools": [[True, False, True], [False, False, True], [True, True, True]],
    "of one": [[1], [2], [3]],
}


@pytest.mark.parametrize("what", LISTS)
def test_lists_of_one_length_are_columns(what: str, tmp_path: Path) -> None:
    """As pandas, pyarrow and Hugging Face's data sets write them."""
    pandas = pytest.importorskip("pandas")
    pyarrow = pytest.importorskip("pyarrow")
    right = np.array(LISTS[what])
    rows = {"a": LISTS[what], "n": [1, 2, 3]}
    made = [from_arrow(pyarrow.table(rows)), from_arrow(pyarrow.table(rows).slice(0, 3))]
    wide = pyarrow.table(rows)
    wide = wide.set_column(0, "a", wide["a"].cast(pyarrow.large_list(wide["a"].type.value_type)))
    made += [from_arrow(wide), from_pandas(pandas.DataFrame(rows))]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    made += [import_parquet(tmp_path / "rows.parquet"), import_pandas(tmp_path / "rows.parquet")]
    for batch in made:
        found = batch["a"].numpy()
        assert (found.dtype, found.shape) == (right.dtype, right.shape)
        assert np.array_equal(found, right) and batch["n"].tolist() == [1, 2, 3]
    part = from_arrow(pyarrow.table(rows).slice(1, 2))
    assert np.array_equal(part["a"].numpy(), right[1:])


def test_columns_of_hugging_face_data_sets() -> None:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        {
            "state": datasets.Sequence(datasets.Value("float32")),
            "fixed": datasets.Sequence(datasets.Value("int64"), length=2),
            "frame": datasets.Array2D((2, 3), "uint8"),
            "next.reward": datasets.Value("float32"),
        }
    )
    values = {
        "state": [[0.5, 1.0], [1.5, 2.0]],
        "fixed": [[1, 2], [3, 4]],
        "frame": np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
        "next.reward": [1.0, 2.0],
    }
    batch = from_arrow(datasets.Dataset.from_dict(values, features=kinds).data.table)
    assert batch["state"].tolist() == values["state"] and batch["fixed"].tolist() == values["fixed"]
    assert batch["frame"].dtype is torch.uint8 and batch["frame"].tolist() == values["frame"].tolist()
    assert batch["next", "reward"].tolist() == [[1.0], [2.0]]


def test_arrow_tensors_of_one_shape_are_columns() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    values = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    table = pyarrow.table({"a": pyarrow.FixedShapeTensorArray.from_numpy_ndarray(values)})
    assert np.array_equal(from_arrow(table)["a"].numpy(), values)


def test_row_groups_that_differ_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    with parquet.ParquetWriter(
        tmp_path / "rows", pyarrow.schema({"a": pyarrow.list_(pyarrow.int64())})
    ) as file:
        file.write_table(pyarrow.table({"a": [[1, 2], [3, 4]]}))
        file.write_table(pyarrow.table({"a": [[5, 6, 7]]}))
    with pytest.raises(ValueError, match=r"entry 'a' is .*\[3\]\) from row 2 on, before it was .*\[2\]\)"):
        import_parquet(tmp_path / "rows")


@pytest.mark.parametrize(
    ("change", "package", "extra"),
    [(to_pandas, "pandas", "pandas"), (to_arrow, "pyarrow", "arrow"), (from_arrow, "pyarrow", "arrow")],
)
def test_a_missing_package_names_its_extra(
    change: Callable[..., Any], package: str, extra: str, batch: TensorDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=rf'{package}, which is not installed: pip install "flatroll\[{extra}\]"'
    ):
        change(batch)
