"""What a resumed `preprocess` goes on from, and its processes that are started anew."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.datasets import BaseDatasetExperienceReplay, convert
from flatroll.datasets.preprocess import _fingerprint


def make(path: Path) -> BaseDatasetExperienceReplay:
    batches = [TensorDict({"x": torch.arange(4.0) + 4 * number}, [4]) for number in range(4)]
    convert(batches, path, segment_bytes=16)
    return BaseDatasetExperienceReplay(path, batch_size=4)


class Add:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        return rows.set("x", rows["x"] + self.value)


def closure(value: Any) -> Callable[[Any], Any]:
    return lambda rows: rows.set("x", rows["x"] + value)


def default(value: Any) -> Callable[[Any], Any]:
    def function(rows: Any, value: Any = value) -> Any:
        return rows.set("x", rows["x"] + value)

    return function


def keyword(value: Any) -> Callable[[Any], Any]:
    def function(rows: Any, *, value: Any = value) -> Any:
        return rows.set("x", rows["x"] + value)

    return function


def within(value: Any) -> Callable[[Any], Any]:
    inner = closure(value)
    return lambda rows: inner(rows)


def add(rows: Any, value: Any) -> Any:
    return rows.set("x", rows["x"] + value)


def of_the_module(value: Any) -> Callable[[Any], Any]:
    """A function that reads a number of its module."""
    scope: dict[str, Any] = {"VALUE": value, "__name__": "script"}
    exec("def fn(rows):\n    return rows.set('x', rows['x'] + VALUE)", scope)
    return scope["fn"]  # type: ignore[no-any-return]


def linear(value: Any) -> torch.nn.Module:
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(layer.weight, value)
    torch.nn.init.constant_(layer.bias, 0.0)
    return layer


MAKERS: list[Callable[[Any], Any]] = [
    closure,
    default,
    keyword,
    within,
    Add,
    of_the_module,
    lambda value: partial(add, value=value),
    lambda value: Add(value).__call__,
    lambda value: closure(torch.full((1,), value)),
    lambda value: closure(np.array([1.0, value])),
    lambda value: closure({"deep": [Path(f"/data/{value}")]}),
    lambda value: closure({value, "b", "c"}),
    lambda value: closure(linear(value)),
]


@pytest.mark.parametrize("maker", MAKERS)
def test_a_function_is_known_by_what_it_holds(maker: Callable[[Any], Any]) -> None:
    assert _fingerprint(maker(1.0)) == _fingerprint(maker(1.0)) != _fingerprint(maker(2.0))


def test_what_cannot_be_compared_is_like_nothing() -> None:
    lock = threading.Lock()
    assert _fingerprint(closure(lock)) != _fingerprint(closure(lock))
    ring: list[Any] = [1.0]
    ring.append(ring)
    assert _fingerprint(closure(ring)) == _fingerprint(closure(ring))
    assert _fingerprint(closure(1)) != _fingerprint(closure(True)) != _fingerprint(closure("1"))
    assert _fingerprint(closure(torch.zeros(2, 1))) != _fingerprint(closure(torch.zeros(1, 2)))
    # Alike but for the name of the method.
    assert _fingerprint(closure(lambda x: x.abs())) != _fingerprint(closure(lambda x: x.neg()))


def test_pieces_of_other_data_are_not_mixed_in(tmp_path: Path) -> None:
    """The first call is stopped behind two of four pieces; the second one's closure has another number."""
    data = make(tmp_path / "set")

    def adds(offset: float, stop: int) -> Callable[[Any], Any]:
        held, log = Add(offset), tmp_path / "calls"

        def function(rows: TensorDictBase) -> TensorDictBase:
            with open(log, "a") as file:
                file.write("x")
            if log.stat().st_size == int((tmp_path / "stop").read_text()):
                raise OSError("stopped")
            return held(rows)

        (tmp_path / "stop").write_text(str(stop))
        return function

    for stop, pieces in [
        (3, 2),
        (5, 3),
    ]:  # the same function goes on: its third call is of the third piece again
        with pytest.raises(OSError, match="stopped"):
            data.preprocess(adds(100.0, stop), dest=tmp_path / "new")
        assert len(list((tmp_path / ".new.parts").glob("[0-9]*"))) == pieces
    changed = data.preprocess(adds(200.0, 99), dest=tmp_path / "new")
    assert changed[:]["x"].tolist() == [200.0 + number for number in range(16)]
    assert (tmp_path / "calls").stat().st_size == 5 + 4


def test_stacks_that_are_none_any_more(tmp_path: Path) -> None:
    """On disk a frame of a stack stands once; a function may make other arrays of each stack."""
    frames = torch.arange(9.0)[:, None].expand(9, 2)
    stacks = torch.stack([frames[:-1], frames[1:]], 1)
    rows = TensorDict(
        {"observation": stacks, "collector": {"traj_ids": torch.zeros(8, dtype=torch.int64)}}, [8]
    )
    convert([rows], tmp_path / "set", frame_stack={"observation": 2})
    data = BaseDatasetExperienceReplay(tmp_path / "set")
    assert torch.equal(data[:]["observation"], stacks)
    sums = data.preprocess(
        lambda rows: rows.set("observation", rows["observation"].sum((1, 2))), dest=tmp_path / "sums"
    )
    assert torch.equal(sums[:]["observation"], stacks.sum((1, 2)))
    changed = data.preprocess(lambda rows: rows.set("observation", rows["observation"].flip(1)))
    assert torch.equal(changed[:]["observation"], stacks.flip(1))


def test_a_process_that_is_spawned(tmp_path: Path) -> None:
    """It imports everything anew, which takes most of the time; the function comes with its closure."""
    data, offset = make(tmp_path / "set"), torch.tensor(5.0)
    changed = data.preprocess(
        lambda rows: rows.set("x", rows["x"] + offset), num_workers=1, dest=tmp_path / "new"
    )
    assert changed[:]["x"].tolist() == [5.0 + number for number in range(16)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "set"]
