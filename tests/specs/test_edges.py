"""Dtypes, devices, copies and shapes at the edges."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from flatroll.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    OutsideSpecError,
    Stacked,
    StackedComposite,
    Unbounded,
    UnboundedDiscrete,
    as_spec,
    check_no_exclusive_keys,
    consolidate_spec,
)

DTYPES = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float64]
#: Specs whose values are made of zeros and ones, of each dtype.
MAKE: dict[str, Any] = {
    "bounded": lambda dtype: Bounded(0, 1, (2,), dtype=dtype),
    "unbounded": lambda dtype: Unbounded((2,), dtype=dtype),
    "categorical": lambda dtype: Categorical(2, (2,), dtype=dtype),
    "masked": lambda dtype: Categorical(2, (2,), dtype=dtype, mask=[False, True]),
    "one-hot": lambda dtype: OneHot(2, dtype=dtype),
    "multi": lambda dtype: MultiCategorical([2, 2], dtype=dtype),
    "multi one-hot": lambda dtype: MultiOneHot([2, 2], dtype=dtype),
    "binary": lambda dtype: Binary(2, dtype=dtype),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_each_dtype(make: Any, dtype: torch.dtype) -> None:
    spec = make(dtype)
    noise = torch.tensor([7.0, -3.0, torch.nan, 0.4])[: spec.shape[-1]]
    for value in (spec.rand((50,)), spec.zero(), spec.one((3,)), spec.project(noise)):
        assert value.dtype is dtype and spec.is_in(value) and spec.problem(value) is None and value in spec
    assert torch.equal(spec.encode(spec.to_numpy(spec.one().double())), spec.one()) or "one-hot" in repr(spec)
    assert spec.to(torch.float32).to(dtype) == spec and spec == spec.clone()
    if not isinstance(spec, Unbounded):
        outside = (
            torch.ones(4).to(dtype)[: spec.shape[-1]]
            if "OneHot" in repr(spec)
            else torch.full((2,), 2).to(dtype)
        )
        assert dtype is torch.bool or not spec.is_in(outside)


def test_bounds_are_exact() -> None:
    spec = Bounded(5, 2**63 + 1, (1,), dtype=torch.uint64)
    inside, outside = (torch.tensor([2**63 + k], dtype=torch.uint64) for k in (1, 2))
    assert (
        spec.is_in(inside)
        and not spec.is_in(outside)
        and torch.equal(spec.project(outside).long(), inside.long() - 1)
    )
    assert spec.zero().tolist() == [5] and spec.cardinality() == 2**63 - 3
    with pytest.raises(ValueError, match="cannot hold high=-1"):
        Bounded(0, -1, (1,), dtype=torch.uint64)
    whole = Bounded(-(2**63), 2**63 - 1, (1,), dtype=torch.int64)
    assert whole.project(torch.tensor([1e30])).item() > 2**62 and whole.project(
        torch.tensor([-1e30])
    ).item() == -(2**63)
    assert Bounded(0.5, 0.75, (1,)).project(torch.tensor([3])).item() == 0.75
    with pytest.raises(ValueError, match="real dtype"):
        Bounded(0, 1, (1,), dtype=torch.complex64)
    assert Unbounded((2,), dtype=torch.complex64).is_in(Unbounded((2,), dtype=torch.complex64).rand())


def test_categories_in_floats_are_whole() -> None:
    for spec in (Categorical(3, (1,), dtype=torch.float32), MultiCategorical([3], dtype=torch.float32)):
        assert not spec.is_in(torch.tensor([1.5])) and spec.project(torch.tensor([1.4])).tolist() == [1.0]
        assert "got 1.5" in str(spec.problem(torch.tensor([1.5])))
    assert not Binary(1, dtype=torch.float32).is_in(torch.tensor([0.5]))
    with pytest.raises(ValueError, match="cannot hold the categories 0 to 4999"):
        Categorical(5000, dtype=torch.float16)


def test_counts() -> None:
    assert (
        Categorical(spaces.Discrete(3).n).n == 3
        and OneHot(np.int32(3)).n == 3
        and Binary(torch.tensor(2)).n == 2
    )  # type: ignore[arg-type]
    for make in (
        lambda: Binary(0),
        lambda: Categorical(True),
        lambda: Categorical(2.0),  # type: ignore[arg-type]
        lambda: MultiCategorical([2.5, 3.0]),
        lambda: OneHot(2, dtype=torch.complex64),
    ):
        with pytest.raises(ValueError):
            make()


def test_a_wrong_width_is_not_broadcast() -> None:
    assert not Unbounded((1,)).is_in(torch.zeros(3)) and not Unbounded((-1, 1)).is_in(torch.zeros(5, 4))
    assert not Bounded(0, 1, (1, 3)).is_in(torch.zeros(2, 3)) and Bounded(0, 1, (3,)).is_in(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="expand the spec for a batch"):
        Unbounded((3,)).encode(np.zeros((2, 3)))
    assert (
        Unbounded((1, 3)).encode([1.0, 2.0, 3.0]).shape == (1, 3) and Categorical(3).encode([2]).shape == ()
    )
    with pytest.raises(OutsideSpecError, match="without changing it"):
        Unbounded((1,)).encode(1e39)
    assert Unbounded((1,)).encode(float("inf")).item() == torch.inf


def test_a_spec_owns_its_parameters() -> None:
    low, mask, counts = torch.zeros(2), np.array([True, False]), torch.tensor([2, 3])
    bounded, masked, multi = Bounded(low, 1.0), Categorical(2, mask=mask), MultiCategorical(counts)
    low += 1
    mask[:] = False
    counts += 5
    assert (
        bounded.low.tolist() == [0, 0] and masked.mask is not None and masked.mask.tolist() == [True, False]
    )
    assert multi.nvec.tolist() == [2, 3]
    for spec in (OneHot(3, mask=[True, False, True]), Categorical(3, mask=[True, False, True])):
        others = [spec.to(torch.float32), spec.clone(), spec.expand(2, *spec.shape), copy.copy(spec).clone()]
        for other in [*others, spec.to_categorical_spec().clone(), spec.to_one_hot_spec().clone()]:
            other.update_mask(None)
        assert spec.mask is not None and spec.mask.tolist() == [True, False, True]
    flags = OneHot(3, mask=[True, False, True])
    flags.to_categorical_spec().update_mask(None)
    assert flags.mask is not None
    for name, value in (("shape", (3,)), ("dtype", torch.int8), ("device", "cpu")):
        with pytest.raises(AttributeError, match=f"{name} of a BoundedContinuous cannot be set"):
            setattr(bounded, name, value)


STACKS: dict[str, Any] = {
    "stacked": torch.stack([Bounded(0, 1, (2,)), Bounded(0, 2, (2,))]),  # type: ignore[list-item]
    "composite": Composite(a=Bounded(0, 1, (2,)), b=None, c={"d": Categorical(2)}).lock_(),
    "composites": torch.stack(
        [Composite(a=Bounded(0, 1, (2,))), Composite(a=Bounded(0, 1, (3,)), b=Binary(2))]
    ),  # type: ignore[list-item]
    "text": NonTensor((2,), space=spaces.Text(4), batched=True),
}


@pytest.mark.parametrize("spec", [*(make(torch.int8) for make in MAKE.values()), *STACKS.values()], ids=repr)
def test_copies_are_equal_and_no_spec_is_hashed(spec: Any) -> None:
    for twin in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), spec.clone()):
        assert twin == spec and type(twin) is type(spec) and repr(twin) == repr(spec)
    with pytest.raises(TypeError):
        hash(spec)
    assert spec != 3 and spec.to(None) is spec
    assert spec.to("meta").device == torch.device("meta") or isinstance(spec, Composite)


def test_a_value_without_numbers() -> None:
    spec = Bounded(0, 1, (2,))
    assert spec.is_in(torch.zeros(2, device="meta")) is False and "meta" in str(
        spec.problem(torch.zeros(2, device="meta"))
    )


def test_no_rows() -> None:
    for spec in [make(torch.int8) for make in MAKE.values()] + [STACKS["text"], Composite(a=Binary(2))]:
        none = spec.expand(0, *spec.shape)
        assert none.is_in(none.rand()) and none.is_in(none.zero()) and none.rand().shape[0] == 0
    with pytest.raises(ValueError, match="none would be left"):
        STACKS["stacked"][:0]


def test_an_index_makes_no_array_of_the_shape() -> None:
    spec = as_spec(spaces.Box(0, 255, (84, 84, 4), np.uint8), 1000)
    picked = spec[torch.arange(500)]
    assert picked.shape == (500, 84, 84, 4) and picked._frame.untyped_storage().nbytes() == 4
    assert Unbounded((5, -1, -1, -1))[[0, 1]].shape == (2, -1, -1, -1)
    with pytest.raises(ValueError, match="represents -1"):
        Unbounded((16_381,))
    flags = OneHot(3, (5, 4, 3))
    assert flags[..., :2].shape == (5, 2, 3) and flags[:, None, ..., None].shape == (5, 1, 4, 1, 3)
    assert flags[(0, 1), (0, 1)].shape == (2, 3) and flags[range(2)].shape == (2, 4, 3)


def test_composites_take_entries_of_all_their_dims() -> None:
    outer = Composite(a=Composite(b=Composite(x=Unbounded((2, 3)))), shape=(2, 3))
    assert outer["a", "b"].shape == outer["a", "b", "x"].shape == (2, 3)
    with pytest.raises(ValueError, match="belong to one value"):
        Composite(flags=Binary(3, (2, 3)), shape=(2, 3))
    with pytest.raises(ValueError, match="must begin with"):
        Composite(a=Composite(x=Unbounded((3,))), shape=(2,))
    spec = Composite(a=Unbounded((2, 1)), b=None, shape=(2,))
    assert spec.names == [None] and torch.zeros(2) not in spec and ("a", "b") not in spec and ("a",) in spec
    spec.names = ["time"]
    assert spec.rand().names == ["time"] and spec.rand((3,)).names == [None, "time"]
    spec.type_check(spec.rand())
    spec.type_check(torch.zeros(2, 1), "a")
    with pytest.raises(TypeError, match="'a'"):
        spec.type_check(TensorDict({"a": torch.zeros(2, 1).int()}, [2]))
    assert spec.encode({"a": [[1.0], [2.0]], "b": "skipped"})["a"].shape == (2, 1)
    inner = Composite(a=Composite(b=Binary(2))).lock_(recurse=False)
    inner["a", "c"] = Binary(3)  # the nested one is not locked
    with pytest.raises(RuntimeError, match="locked"):
        inner["d"] = Binary(2)
    with pytest.raises(RuntimeError, match="locked"):
        del inner["a"]


def test_stacks_in_stacks() -> None:
    one, two = Bounded(0, 1, (2, 3)), Bounded(0, 2, (2, 3))
    spec: Any = torch.stack([torch.stack([one, two], 1), torch.stack([two, one], 1)], 0)  # type: ignore[list-item]
    value = spec.rand()
    assert isinstance(spec, Stacked) and spec.shape == value.shape == (2, 2, 2, 3) and spec.is_in(value)
    for index in ((0,), (slice(None), 0), (slice(None), slice(None), 1), (1, 1), (1, 0, 1)):
        assert spec[index].is_in(value[index]) and spec[index].shape == value[index].shape
    assert spec.is_in(spec.project(value + 3)) and spec.expand(4, *spec.shape).is_in(spec.rand((4,)))
    text = NonTensor((2,), example_data="x")
    three, four = Composite(s=spec[0], shape=(2,)), Composite(s=spec[1], text=text, shape=(2,))
    both: Any = torch.stack([three, four])  # type: ignore[list-item]
    assert isinstance(both, StackedComposite) and both.is_in(both.rand()) and both["s"].shape == (2, 2, 2, 3)
    assert both[1] is four and both.unbind()[0] is three and both[:, 0].is_in(both.rand()[:, 0])
    both.type_check(both.rand())
    with pytest.raises(KeyError):
        del both["nowhere"]
    words: Any = torch.stack([NonTensor((), example_data=word) for word in "ab"])  # type: ignore[misc]
    assert words.rand().tolist() == ["a", "b"] and words.is_in(words.encode(["u", "v"]))
    pairs: Any = torch.stack([MultiCategorical([2, n], (4, 2)) for n in (2, 3)], 1)  # type: ignore[misc]
    value = pairs.rand()
    assert torch.equal(pairs.encode(pairs.to_numpy(value)), value)
    with pytest.raises(ValueError, match="one class"):
        Stacked(Bounded(0, 1, (1,)), Categorical(2, (1,)), dim=0)


def test_nested_keys_of_stacks() -> None:
    one = Composite(agent=Composite(x=Binary(2)), same=Composite(y=Binary(2)))
    two = Composite(agent=Composite(x=Binary(2), z=UnboundedDiscrete((3,))), same=Composite(y=Binary(2)))
    spec: Any = torch.stack([one, two])  # type: ignore[list-item]
    assert not check_no_exclusive_keys(spec) and check_no_exclusive_keys(spec, recurse=False)
    full: Any = consolidate_spec(spec)
    assert check_no_exclusive_keys(full) and ("agent", "z") in full and full.is_in(full.rand())
    assert ("agent", "z") not in one  # which stays as it is
    spec.update(
        {
            "same": {"y": torch.stack([Binary(2), Binary(2)])},
            "agent": Composite(x=Binary(2, (2, 2)), shape=(2,)),
        }
    )  # type: ignore[list-item]
    merged = Composite(new=Categorical(3, (2,)), shape=(2,))
    spec.update({"same": merged})
    assert one["same"].keys() == ["y", "new"] and spec["same", "new"].n == 3
    dense = torch.stack([Unbounded((2, 5, k)) for k in (6, 7)], 1)  # type: ignore[misc]
    parts = [Composite(a=dense, shape=(2,)), Composite(shape=(2,), device="cpu")]
    filled: Any = consolidate_spec(torch.stack(parts))  # type: ignore[arg-type]
    assert filled["a"].shape == (2, 2, 2, 5, -1)


def test_example_data_cover_all_dims_that_a_spec_has() -> None:
    spec = NonTensor((3, 4), example_data="x")
    assert spec.expand(2, 3, 4) == NonTensor((2, 3, 4), example_data="x") and spec[0].feature_dims == 1
