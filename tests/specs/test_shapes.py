"""Shape operations on specs do what they do to the values."""

from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st

from flatroll.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)

LOW = torch.arange(6.0).reshape(2, 3)
#: Each with batch dims [2, 3].
SPECS: list[TensorSpec] = [
    Bounded(LOW, LOW + 1),
    Bounded(torch.arange(3.0), 9.0, (2, 3)),
    Bounded(LOW.unsqueeze(-1).expand(2, 3, 4), 9.0),
    Unbounded((2, 3, 4), dtype=torch.int64),
    Categorical(4, (2, 3), start=2),
    Categorical(2, (2, 3), mask=torch.tensor([[[True, False]], [[False, True]]])),
    OneHot(4, (2, 3, 4)),
    OneHot(2, (2, 3, 2), mask=torch.tensor([[[True, False]], [[False, True]]])),
    MultiCategorical([3, 2], (2, 3, 2)),
    MultiCategorical([3, 2], (2, 3, 2), mask=[True, False, True, True, False]),
    MultiOneHot([3, 2], (2, 3, 5)),
    Binary(4, (2, 3, 4)),
]
SPECS.append(Composite({str(i): spec for i, spec in enumerate(SPECS)}, shape=(2, 3)))
OPERATIONS: list[Any] = [
    lambda x: x.unsqueeze(0),
    lambda x: x.unsqueeze(1),
    lambda x: x[0],
    lambda x: x[:, 1],
    lambda x: x[..., :] if x.ndim == 2 else x[:, :],
    lambda x: x[None],
    lambda x: x[1:],
    lambda x: x[torch.tensor([1, 0, 1])],
    lambda x: x[torch.tensor([True, False])],
    lambda x: x[:, [2, 0]],
    lambda x: x.flatten(0, 1),
    lambda x: x.unbind(0)[1],
    lambda x: x.unbind(1)[2],
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: x.unflatten(1, (1, 3)),
    lambda x: x.reshape(3, 2, *x.shape[2:]),
    lambda x: x.reshape(6, *x.shape[2:]),
    lambda x: x.expand(5, *x.shape),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("operation", range(len(OPERATIONS)))
def test_an_operation_is_that_of_the_values(spec: TensorSpec, operation: int) -> None:
    value, change = spec.rand(), OPERATIONS[operation]
    if isinstance(spec, Composite) and operation in (10, 14):
        pytest.skip("a tensordict has no such operation")
    changed = change(spec)
    moved = change(value)
    assert changed.shape == (moved.batch_size if isinstance(spec, Composite) else moved.shape)
    assert changed.is_in(moved) and changed.is_in(changed.rand()) and changed.is_in(changed.zero((2,)))


def test_bounds_go_with_their_rows() -> None:
    spec = Bounded(LOW, LOW + 1)
    assert torch.equal(spec[1].low, LOW[1]) and torch.equal(spec.reshape(6).low, LOW.reshape(6))
    assert torch.equal(spec.expand(4, 2, 3)[2, :, 1].high, LOW[:, 1] + 1)
    mask = Categorical(2, (2,), mask=[[True, False], [False, True]])
    assert (
        mask[1].rand((50,)).tolist() == [1] * 50 and mask.expand(3, 2)[0][0].rand((50,)).tolist() == [0] * 50
    )


@examples(60)
@given(st.lists(st.integers(0, len(OPERATIONS) - 1), max_size=4), st.integers(0, len(SPECS) - 2))
def test_chains_of_operations(chain: list[int], which: int) -> None:
    spec: Any = SPECS[which]
    value = spec.rand()
    for number in chain:
        change = OPERATIONS[number]
        try:
            moved = change(value)
        except (IndexError, RuntimeError):
            continue
        try:
            spec = change(spec)
        except (IndexError, ValueError):  # it reaches into a value's own dims
            continue
        value = moved
        assert spec.shape == value.shape and spec.is_in(value)


def test_own_dims_of_a_value_stay() -> None:
    for spec in (OneHot(3), MultiCategorical([2, 2]), MultiOneHot([2, 2]), Binary(3)):
        size = spec.shape[-1]
        for change in (
            lambda s: s[0],
            lambda s: s[..., 0],
            lambda s: s.unsqueeze(-1),
            lambda s: s.squeeze(-1),
            lambda s: s.unbind(-1),
            lambda s: s.reshape(1, 1),
            lambda s, size=size: s.expand(2, size + 1),
            lambda s: s.unflatten(0, (1, -1)),
        ):
            with pytest.raises((IndexError, ValueError)):
                change(spec)
        assert spec.expand(4, size)[..., :].squeeze().shape == (4, size)


def test_dims_of_any_length() -> None:
    spec = Unbounded((3, -1))
    assert (
        spec.is_in(torch.zeros(3, 7))
        and spec.is_in(torch.zeros(5, 3, 1))
        and not spec.is_in(torch.zeros(2, 7))
    )
    assert (
        spec.unsqueeze(0).shape == (1, 3, -1)
        and spec[1].shape == (-1,)
        and spec.expand(4, 3, -1).shape == (4, 3, -1)
    )
    assert Bounded(0, 1, (-1,)).is_in(torch.rand(9)) and Bounded(0, 1, (-1,)).rand().shape == (1,)
    with pytest.raises(ValueError, match="any length"):
        spec.reshape(-1)
    with pytest.raises(ValueError, match="any length"):
        spec.flatten()


def test_functions_of_torch() -> None:
    spec = Bounded(0, 1, (2, 1))
    assert torch.squeeze(spec, 1).shape == (2,) and torch.unsqueeze(spec, 0).shape == (1, 2, 1)  # type: ignore[arg-type]
    assert torch.reshape(spec, (1, 2)).shape == (1, 2) and torch.stack([spec, spec]).shape == (2, 2, 1)  # type: ignore[arg-type,list-item]


def test_to_clone_and_equality() -> None:
    spec = Bounded(0, 5, (2,))
    assert (
        spec.to(torch.int64).is_in(torch.tensor([0, 5]))
        and type(spec.to(torch.int64)).__name__ == "BoundedDiscrete"
    )
    assert spec.to(torch.float64).dtype == torch.float64 and spec.to("cpu") is spec and spec.cpu() is spec
    assert spec == Bounded(torch.zeros(2), torch.full((2,), 5.0)) and spec != Bounded(0, 4, (2,))
    one = Categorical(3, mask=[True, False, True])
    two = one.clone()
    two.update_mask(None)
    assert one.mask is not None and one != two and two == Categorical(3)
    assert MultiCategorical([2, 3]) != MultiCategorical([3, 2])
    assert Composite(a=one, b=two) == Composite(b=two, a=one)
    with pytest.raises(ValueError, match="cannot hold"):
        Bounded(0, 300, (1,)).to(torch.uint8)


def test_a_part_of_a_dim_of_any_length_is_refused() -> None:
    spec = Categorical(4, (1, -1, 2))
    assert spec[0].shape == spec[0, :].shape == (-1, 2) and spec[:, :, 0].shape == (1, -1)
    assert (
        spec[0, 3].shape == (2,)
        and spec[0, [1, 2]].shape == (2, 2)
        and spec[:, None, :, :1].shape == (1, 1, -1, 1)
    )
    rows: Any = Composite(action=spec, shape=(1, -1))
    assert rows[0]["action"].shape == (-1, 2)
    for part in (slice(1, None), slice(1, 2), slice(0, 5), slice(None, None, 2)):
        for whole in (spec, rows):
            with pytest.raises(
                IndexError, match=r"takes a part of a dim of any length \(-1\), dim 1 of \(1, -1"
            ):
                whole[0, part]
    with pytest.raises(ValueError, match=r"unbind needs a dim of known length, got dim 1 of \(1, -1, 2\)"):
        spec.unbind(1)
