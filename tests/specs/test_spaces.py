"""Every Gymnasium space becomes a spec and comes back."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from flatroll.specs import Composite, NonTensor, as_space, as_spec

BOXES = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(-1, 1, ()),
    spaces.Box(-np.inf, np.inf, (2,), np.float64),
    spaces.Box(np.array([-np.inf, 0], np.float32), np.array([1, np.inf], np.float32)),
    spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (2,)),
    spaces.Box(0, 1, (2,), np.float16),
    spaces.Box(0, 255, (4, 4, 3), np.uint8),
    spaces.Box(-5, 5, (2,), np.int32),
    spaces.Box(0, 2**16 - 1, (2,), np.uint16),
    spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    spaces.Box(0, 2**63 - 1, (3,), np.int64),
    spaces.Box(0, 2**64 - 1, (2,), np.uint64),
    spaces.Box(3, 2**32 - 1, (2,), np.uint32),
    spaces.Box(-np.inf, np.inf, (2,), np.int32),
    spaces.Box(-np.inf, 7, (2,), np.int64),
]
NUMBERS = [
    *BOXES,
    spaces.Discrete(3),
    spaces.Discrete(3, start=5),
    spaces.Discrete(3, start=-2),
    spaces.MultiDiscrete([3, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 2], [3, 4]]),
    spaces.MultiDiscrete([3, 3], dtype=np.int32),
    spaces.MultiDiscrete([3, 400], dtype=np.uint16),
    spaces.MultiBinary(4),
    spaces.MultiBinary([4]),
    spaces.MultiBinary((2, 2)),
]
if "dtype" in inspect.signature(spaces.Discrete).parameters:  # Gymnasium 1.2.2 or newer
    NUMBERS.append(spaces.Discrete(200, dtype=np.uint8))
NESTED = [
    spaces.Dict(a=spaces.Discrete(2), b=spaces.Dict(c=spaces.Box(0, 1, (2,)))),
    spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))),
    spaces.Dict({"0": spaces.Discrete(2), "1": spaces.Tuple((spaces.Box(0, 1), spaces.MultiBinary(2)))}),
]
OTHERS = [
    spaces.Text(4),
    spaces.Sequence(spaces.Discrete(2)),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(2)),
    spaces.OneOf((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
    spaces.Dict(t=spaces.Text(3), x=spaces.Discrete(2)),
]


@pytest.mark.parametrize("space", NUMBERS + NESTED + OTHERS, ids=str)
def test_a_space_comes_back(space: spaces.Space[Any]) -> None:
    back: Any = as_space(as_spec(space))
    assert back == space and back.dtype == space.dtype and type(back) is type(space)
    if isinstance(space, spaces.Box):
        assert np.array_equal(back.bounded_below, space.bounded_below) and as_spec(back) == as_spec(space)
        assert np.array_equal(back.bounded_above, space.bounded_above)


@pytest.mark.parametrize("space", NUMBERS + NESTED, ids=str)
def test_batch_dims_become_the_batched_space(space: spaces.Space[Any]) -> None:
    spec = as_spec(space, 3)
    assert spec[1] == as_spec(space) and spec.is_in(spec.rand())
    # Gymnasium makes Boxes of batched MultiDiscrete and MultiBinary spaces.
    if not any(part in str(space) for part in ("MultiDiscrete", "MultiBinary")):
        assert as_space(spec) == batch_space(space, 3)


@pytest.mark.parametrize("space", NUMBERS, ids=str)
def test_draws_are_samples_of_the_space(space: spaces.Space[Any]) -> None:
    """About 100,000 calls of `contains` over all of these spaces."""
    drawn = as_spec(space).rand((4000,), generator=torch.Generator().manual_seed(0)).numpy()
    assert drawn.dtype == space.dtype and drawn.shape[1:] == space.shape
    assert all(
        space.contains(value if isinstance(space, spaces.Discrete) else np.asarray(value)) for value in drawn
    )


def as_tree(spec: Any, value: Any) -> Any:
    """A value as the sample of a space."""
    if isinstance(spec, Composite):
        parts = {key: as_tree(spec[key], value.get(key)) for key in spec}
        return tuple(parts.values()) if spec.of_tuple else parts
    made = spec.to_numpy(value)
    return made[()] if made.shape == () else made


@pytest.mark.parametrize("space", NESTED, ids=str)
def test_nested_draws_are_samples_of_the_space(space: spaces.Space[Any]) -> None:
    spec = as_spec(space)
    assert all(space.contains(as_tree(spec, row)) for row in spec.rand((500,)))


def test_whole_numbers_reach_both_ends() -> None:
    spec: Any = as_spec(spaces.Box(-np.inf, 7, (2,), np.int64))
    drawn = spec.rand((10_000,))
    assert drawn.max() == 6 and drawn.min() > -100 and (drawn < 0).any()  # exponential from 7, rounded down
    for space in (spaces.Discrete(7, start=-3), spaces.MultiDiscrete([3, 9], start=[4, -4])):
        drawn = as_spec(space).rand((100_000,)).numpy()
        most = space.start + (space.n if isinstance(space, spaces.Discrete) else space.nvec) - 1
        assert (drawn >= space.start).all() and (drawn <= most).all()
        assert (drawn.min(0) == space.start).all() and (drawn.max(0) == most).all()


@pytest.mark.parametrize("space", OTHERS, ids=str)
def test_other_spaces_are_kept(space: spaces.Space[Any]) -> None:
    spec = as_spec(space, 4)
    drawn = spec.rand(generator=torch.Generator().manual_seed(1))
    assert spec.is_in(drawn) and spec.is_in(spec.zero()) and drawn.batch_size[:1] == (4,)
    if isinstance(spec, NonTensor):
        assert not spec.is_in(object()) and not spec.is_in(torch.zeros(4))
    else:
        assert isinstance(spec, Composite)


def test_masks_and_dims_of_any_length_have_no_space() -> None:
    spec = as_spec(spaces.Discrete(3))
    spec.update_mask([True, False, True])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="mask"):
        as_space(spec)
