"""Rows are gathered into pieces and written: whatever next observations are views of, what was given comes back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.buffers.columns.column import differ
from flatroll.datasets import BaseDatasetExperienceReplay, convert
from flatroll.datasets.folders import gather
from flatroll.layout.export import from_numpy, to_numpy


def episode(number: int, length: int, kind: str) -> dict[str, Any]:
    """An episode's arrays by dotted name; ``kind`` says what its next observations are."""
    seen = np.random.default_rng(number).normal(size=(length + 1, 2))
    following = seen[1:]
    if kind == "copy":
        following = following.copy()
    if kind == "n-step":
        following = seen[np.minimum(np.arange(length) + 3, length)]
    return {
        "observation": seen[:length],
        "step": np.arange(length),
        "collector.traj_ids": np.full(length, number),
        "next.observation": following,
        "next.done": np.arange(length)[:, None] == length - 1,
    }


@pytest.mark.parametrize("kinds", ["vvvvvv", "vvcvvv", "cvvvvv", "nvvvnv", "vnnnnn"])
@pytest.mark.parametrize(
    ("piece_rows", "form"), [(1, "arrays"), (3, "tensordict"), (4, "arrays"), (100, "arrays")]
)
def test_what_was_given_comes_back(kinds: str, form: str, piece_rows: int, tmp_path: Path) -> None:
    named = {"v": "view", "c": "copy", "n": "n-step"}
    lengths = [4, 1, 3, 5, 2, 1]
    arrays = [
        episode(i, length, named[kind]) for i, (length, kind) in enumerate(zip(lengths, kinds, strict=True))
    ]
    batches: list[Any] = [from_numpy(one) for one in arrays] if form == "tensordict" else arrays
    whole = torch.cat([from_numpy(one) for one in arrays])
    row_bytes = whole[:1].bytes() - (16 if kinds[0] == "v" else 0)
    assert convert(batches, tmp_path / "set", segment_bytes=piece_rows * row_bytes) == len(whole)
    rows: Any = BaseDatasetExperienceReplay(tmp_path / "set")[:]
    for name, column in to_numpy(whole).items():
        assert np.array_equal(to_numpy(rows)[name], column), name
    assert len(list((tmp_path / "set").glob("*.rows"))) == -(-len(whole) // piece_rows)


def test_views_are_neither_copied_nor_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compared = []

    def counted(left: Any, right: Any) -> Any:
        compared.append(len(left))
        return differ(left, right)

    monkeypatch.setattr("flatroll.datasets.folders.differ", counted)
    monkeypatch.setattr("flatroll.buffers.storages.next_pool.differ", counted)
    monkeypatch.setattr("flatroll.buffers.storages.continuity.differ", counted)
    convert([episode(i, 50, "view") for i in range(4)], tmp_path / "views")
    assert sum(compared) < 10  # the last rows of episodes
    pieces = gather([episode(i, 50, "view") for i in range(4)], 1 << 20)
    assert [set(piece.tails) for piece in pieces] == [{"observation"}]
    convert([episode(i, 50, "copy") for i in range(4)], tmp_path / "copies")
    assert sum(compared) > 200


def test_episodes_that_no_marker_parts_but_their_next_observations(tmp_path: Path) -> None:
    """Done is the only marker, and the source says it in the middle of a batch, and not at its end."""
    arrays = [episode(i, 6, "view") for i in range(3)]
    for one in arrays:
        del one["collector.traj_ids"]
        one["next.done"] = np.arange(6)[:, None] == 2
    whole = torch.cat([from_numpy(one) for one in arrays])
    convert(arrays, tmp_path / "set")
    rows: Any = BaseDatasetExperienceReplay(tmp_path / "set")[:]
    assert torch.equal(rows["next", "observation"], whole["next", "observation"])
    tails = [piece.following(torch.tensor([2, 5, 17]))["observation"] for piece in gather(arrays, 1 << 20)]
    assert torch.equal(tails[0], whole["next", "observation"][[2, 5, 17]])


@pytest.mark.parametrize("kind", ["view", "copy"])
def test_rows_that_no_marker_parts_are_kept_as_they_are(kind: str, tmp_path: Path) -> None:
    """Nobody could say where their trajectories begin."""
    arrays = [episode(i, 4, kind) for i in range(3)]
    for one in arrays:
        del one["collector.traj_ids"], one["next.done"]
    convert(arrays, tmp_path / "set")
    rows: Any = BaseDatasetExperienceReplay(tmp_path / "set")[:]
    whole = torch.cat([from_numpy(one) for one in arrays])
    assert torch.equal(rows["next", "observation"], whole["next", "observation"])


def test_sources_may_change_their_arrays_behind_a_batch(tmp_path: Path) -> None:
    shared = episode(0, 4, "view")

    def reused() -> Any:
        for number in range(5):
            shared["observation"][...] = number
            shared["next.observation"][-1] = number + 0.5
            shared["collector.traj_ids"][...] = number
            yield shared

    convert(reused(), tmp_path / "set")
    rows: Any = BaseDatasetExperienceReplay(tmp_path / "set")[:]
    assert rows["observation"][:, 0].tolist() == np.repeat(np.arange(5.0), 4).tolist()
    assert rows["next", "observation"][3::4, 0].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"x": np.zeros(2)}, r"batch 1: 'x' is float64 \[\] per row, before it was int64 \[\]"),
        ({"x": np.zeros((2, 3), int)}, r"\[3\] per row"),
        ({"y": np.zeros(2, int)}, "batch 1 must have the same entries"),
        ({"x": torch.zeros(2, dtype=torch.int64)}, "batch 1: 'x' is torch.int64"),
        (TensorDict({"x": torch.zeros(2, 2)}, [2, 2]), "batch 1 must be flat"),
    ],
)
def test_batches_that_differ(second: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        convert([{"x": np.arange(3)}, second], tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_what_is_no_view_is_copied() -> None:
    """Each begins where a view of the next rows would begin."""
    held = torch.arange(8.0)
    numbers = held.to(torch.complex64) * (1 + 1j)
    imaginary = numbers.conj().imag  # torch notes that it is negative, in the same memory
    for root, following in [
        (held[:3], held[1::2][:3]),
        (held[:3], held[1:4].double()),
        (numbers[:3], numbers[1:4].conj()),
        (numbers.imag[:3], imaginary[1:4]),
    ]:
        (piece,) = gather([{"observation": root, ("next", "observation"): following}], 1 << 20)
        assert torch.equal(piece.columns["next", "observation"], following)


def test_rows_that_go_on_are_no_cuts() -> None:
    """Batches end where the source had them end; a trajectory that goes on there is not cut."""
    seen = torch.arange(7.0)
    bounds = [(0, 2), (2, 5), (5, 6)]
    batches: Any = [
        {"observation": seen[a:b], ("next", "observation"): seen[a + 1 : b + 1]} for a, b in bounds
    ]
    batches[2] = {"observation": seen[:1], ("next", "observation"): seen[1:2]}
    (piece,) = gather(batches, 1 << 20)
    assert piece.ends.tolist() == [1, 4, 5] and piece.cuts().nonzero().view(-1).tolist() == [4]


def test_columns_of_one_batch_fit_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the same number of rows"):
        convert([{"x": np.arange(3), "y": np.arange(2)}], tmp_path / "set")
    with pytest.raises(ValueError, match="the same number of rows"):
        convert([{"x": torch.tensor(3)}], tmp_path / "set")
    with pytest.raises(TypeError, match="'x' must hold numbers or bools"):
        convert([{"x": np.array(["a"])}], tmp_path / "set")


def test_dtypes_byte_orders_gradients_and_empty_batches(tmp_path: Path) -> None:
    big = {"x": np.arange(3, dtype=">f4"), "y": np.arange(6, dtype=np.uint16).reshape(3, 2)[:, ::-1]}
    convert([big, {"x": np.zeros(0, ">f4"), "y": np.zeros((0, 2), np.uint16)}, big], tmp_path / "arrays")
    rows: Any = BaseDatasetExperienceReplay(tmp_path / "arrays")[:]
    assert rows["x"].tolist() == [0, 1, 2] * 2 and rows["y"].tolist() == [[1, 0], [3, 2], [5, 4]] * 2
    half: TensorDictBase = TensorDict({"x": torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)}, [3])
    convert([half, half], tmp_path / "tensors")
    rows = BaseDatasetExperienceReplay(tmp_path / "tensors")[:]
    assert rows["x"].dtype is torch.bfloat16 and rows["x"].shape == (6, 2) and not rows["x"].requires_grad
