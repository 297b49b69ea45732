"""Specs that differ, side by side."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    OneHot,
    OutsideSpecError,
    Stacked,
    StackedComposite,
    TensorSpec,
    Unbounded,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
    make_composite_from_td,
    stack,
)

#: Pairs that differ in their domains, with batch dims [4].
PAIRS: list[tuple[TensorSpec, TensorSpec]] = [
    (Bounded(0, 1, (4, 3)), Bounded(2, 3, (4, 3))),
    (Categorical(2, (4,)), Categorical(2, (4,), start=2)),
    (OneHot(2, (4, 2), mask=[True, False]), OneHot(2, (4, 2), mask=[False, True])),
    (
        Composite(a=Bounded(0, 1, (4, 3)), shape=(4,)),
        Composite(a=Bounded(2, 3, (4, 3)), b=Categorical(2, (4,)), shape=(4,)),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: type(pair[0]).__name__)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_stack_is_its_specs_along_a_dim(pair: tuple[Any, Any], dim: int) -> None:
    if dim == -1 and pair[0].ndim == 2:
        with pytest.raises(IndexError) if isinstance(pair[0], OneHot) else torch.no_grad():
            torch.stack(pair, dim)
        return
    spec = torch.stack(pair, dim)
    at = dim % (pair[0].ndim + 1)
    assert isinstance(spec, Stacked | StackedComposite) and spec.shape[at] == 2
    for value in (spec.rand(), spec.zero(), spec.one(), spec.rand((5,)), spec.rand((2, 3))):
        assert (spec.is_in(value) and value.shape[value.ndim - spec.ndim :][at] == 2) or isinstance(
            spec, Composite
        )
        assert spec.project(value) is not None
    flipped = torch.stack(pair[::-1], dim).rand()
    assert not spec.is_in(flipped) and "part 0" in str(spec.problem(flipped))
    with pytest.raises(OutsideSpecError):
        spec.assert_is_in(flipped)
    if not isinstance(spec, StackedComposite):  # there a key is missing
        assert spec.is_in(spec.project(flipped))
    for one, own in zip(spec.unbind(at), pair, strict=True):
        assert one == own
    assert spec == torch.stack([part.clone() for part in pair], dim) and spec != torch.stack(pair[::-1], dim)
    assert spec.clone() == spec and spec.to(None) is spec


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: type(pair[0]).__name__)
def test_shape_operations_keep_each_spec_in_its_place(pair: tuple[Any, Any]) -> None:
    one, two = pair
    spec = torch.stack([one, two, two], 1)  # [4, 3, ...]
    assert (
        spec[:, 0] == one and spec[2, 1] == two[2] and spec[..., 2].shape == two.shape
        if spec.ndim == 2
        else True
    )
    assert spec[1] == torch.stack([one[1], two[1], two[1]])
    assert spec[:, 1:] == two.unsqueeze(1).expand(4, 2, *two.shape[1:])
    assert spec[:, [2, 0]] == torch.stack([two, one], 1)
    assert spec.unsqueeze(0)[0] == spec and spec.unsqueeze(0).squeeze(0) == spec
    wide = spec.expand(5, *spec.shape)
    assert wide.shape == (5, *spec.shape) and wide[3] == spec and wide[:, :, 0] == one.expand(5, *one.shape)
    assert spec.reshape(2, 2, *spec.shape[1:])[1, 0] == spec[2]
    with pytest.raises(ValueError, match="along one dim"):
        spec.reshape(3, 4, *spec.shape[2:])
    assert spec.flatten(0, 1)[3 * 2 + 1] == two[2]
    outer = Composite(a=spec, shape=(4,))
    assert outer[2]["a"] == spec[2] and outer.expand(3, 4)[1, 2]["a"] == spec[2]
    deeper = Composite(a=spec, shape=(4, 3))
    assert deeper[:, 0]["a"] == one and deeper[1, 2]["a"] == two[1]


def test_sizes_that_differ() -> None:
    spec = torch.stack([Bounded(0, 1, (3,)), Bounded(0, 1, (4,))])
    assert spec.shape == (2, -1)
    value = spec.rand()
    assert value.is_nested and spec.is_in(value) and not spec.is_in(value + 5)
    assert [len(part) for part in spec.to_numpy(value)] == [3, 4]
    assert spec.is_in(spec.encode([torch.zeros(3), torch.ones(4)]))
    assert spec[0].shape == (3,) and spec.unbind(0)[1].shape == (4,)
    with pytest.raises(ValueError, match="unbind"):
        spec.rand((5,))


def test_dtype_cardinality_and_lists() -> None:
    spec = torch.stack([Categorical(2), Categorical(3)])
    assert spec.to(torch.int32).dtype == torch.int32 and spec.cardinality() == 6
    with pytest.raises(ValueError, match="different numbers"):
        spec.enumerate()
    assert torch.stack([Categorical(2), Categorical(2, start=1)]).enumerate().tolist() == [[0, 1], [1, 2]]
    assert spec.encode([1, 2]).tolist() == [1, 2] and spec.to_numpy(torch.tensor([1, 2])).tolist() == [1, 2]
    with pytest.raises(ValueError, match="2 values"):
        spec.encode([1])


def test_what_cannot_be_stacked() -> None:
    one = Bounded(0, 1, (3,))
    for other in (
        Unbounded((3,)),
        Bounded(0, 1, (3,), dtype=torch.float64),
        Bounded(0, 2, (3, 1)),
        Categorical(3, (3,)),
    ):
        with pytest.raises(ValueError, match="one class, dtype"):
            torch.stack([one, other])
    with pytest.raises(ValueError, match="at least one"):
        stack([])
    assert type(torch.stack([one, one.clone()])) is type(one)


def test_keys_of_stacked_composites() -> None:
    one = Composite(shared=Bounded(0, 1, (3,)), mine=Binary(2))
    two = Composite(shared=Bounded(0, 1, (4,)), its=Composite(deep=Unbounded((2,))))
    spec: Any = torch.stack([one, two])
    assert spec.keys() == ["shared"] and spec["shared"].shape == (2, -1) and spec.batch_size == (2,)
    assert (
        contains_lazy_spec(spec)
        and contains_lazy_spec(Composite(a=spec, shape=(2,)))
        and not contains_lazy_spec(one)
    )
    assert not check_no_exclusive_keys(spec) and check_no_exclusive_keys(one)
    full: Any = consolidate_spec(spec)
    assert check_no_exclusive_keys(full) and set(full.keys()) == {"shared", "mine", "its"}
    assert full[0]["its", "deep"].shape == (0,) and full[1]["mine"].shape == (2,) and full.is_in(full.rand())
    spec["new"] = torch.stack([Categorical(2), Categorical(3)])
    assert one["new"].n == 2 and two["new"].n == 3
    del spec["new"]
    assert "new" not in one and "new" not in spec
    with pytest.raises(RuntimeError, match="locked"):
        spec.lock_()["new"] = torch.stack([Categorical(2), Categorical(3)])


def test_a_composite_of_data() -> None:
    data = TensorDict(
        {"a": torch.zeros(4, 3), "b": {"c": torch.zeros(4, dtype=torch.int32)}, "text": "hi"}, [4]
    )
    spec = make_composite_from_td(data)
    assert spec.shape == (4,) and spec["b", "c"] == Unbounded((4,), dtype=torch.int32)
    assert spec.is_in(data) and spec.is_in(spec.zero())
    loose = make_composite_from_td(data, dynamic_shape=True)
    assert loose["a"].shape == (4, -1) and loose["a"].is_in(torch.zeros(4, 9))
    assert make_composite_from_td(TensorDict({"a": torch.tensor(1.0)}))["a"].shape == (1,)
    assert (
        make_composite_from_td(TensorDict({"a": torch.tensor(1.0)}), unsqueeze_null_shapes=False)["a"].shape
        == ()
    )


A, AB, AC = (Composite({name: Unbounded((2,)) for name in names}) for names in ("a", "ab", "ac"))


@pytest.mark.parametrize(
    "stacks",
    [[[A, AB], [A, AC]], [[A, AB], [A, A]], [[A, A], [A, AC]], [[A, A, AC], [A, AB, AB]]],
)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_stacks_of_stacks_are_consolidated(stacks: list[list[Composite]], nested: bool, dim: int) -> None:
    inner: list[Any] = [torch.stack(parts) for parts in stacks]
    if nested:
        inner = [Composite(x=part, shape=part.shape) for part in inner]
    spec: Any = torch.stack(inner, dim)
    whole: Any = consolidate_spec(spec)
    assert check_no_exclusive_keys(whole) and not check_no_exclusive_keys(spec)
    names = {name for parts in stacks for part in parts for name in part}
    assert set(whole["x"].keys() if nested else whole.keys()) == names
    for outer, parts in enumerate(stacks):
        for k, part in enumerate(parts):
            one = whole[(outer, k) if dim == 0 else (k, outer)]
            one = one["x"] if nested else one
            assert {name: one[name].shape for name in one} == {
                name: torch.Size([2 if name in part else 0]) for name in names
            }
    assert whole.is_in(whole.rand())


def test_parts_of_sizes_that_differ() -> None:
    spec: Any = torch.stack([Unbounded((3, 2)), Unbounded((4, 2))])
    assert spec.shape == (2, -1, 2) and [part.shape for part in spec[:, 1:].unbind()] == [(2, 2), (3, 2)]
    assert spec[:, :2].shape == (2, 2, 2) and spec[1, 1:].shape == (3, 2) and spec[1, 3].shape == (2,)
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        spec[:, 3]


def test_nested_keys_of_a_stack_are_deleted_in_the_order_of_its_keys() -> None:
    one = Composite(a=Unbounded((2,)), b=Composite(c=Unbounded((1,))))
    spec: Any = torch.stack([one, one.clone().set("d", Unbounded((2,)))])
    values = spec.rand()
    assert spec.keys(True) == list(values.keys(True))
    for key in spec.keys(True):
        del spec[key], values[key]
    assert spec.keys() == list(values.keys()) == []
    del spec["d"]  # of the one that has it
    assert spec.is_empty()
