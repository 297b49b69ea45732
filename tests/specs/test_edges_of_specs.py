"""Specs at their edges: domains, draws, projections, encodings, errors."""

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
    TensorSpec,
    Unbounded,
    as_space,
    as_spec,
)

LEAVES: dict[str, TensorSpec] = {
    "bounded": Bounded(torch.tensor([-1.0, 0.5]), torch.tensor([1.0, 2.0])),
    "above": Bounded(3.0, torch.inf, (2,)),
    "whole": Bounded(2, 7, (2,), dtype=torch.int32),
    "bytes": Bounded(0, 255, (2, 2), dtype=torch.uint8),
    "flag": Bounded(0, 1, (2,), dtype=torch.bool),
    "any": Unbounded((3,), dtype=torch.float64),
    "any whole": Unbounded((3,), dtype=torch.int64),
    "categorical": Categorical(4, (2,), start=3),
    "masked": Categorical(4, (2,), mask=[[False, False, True, True], [True, False, False, True]]),
    "one-hot": OneHot(3, (2, 3)),
    "masked one-hot": OneHot(3, mask=[False, False, True]),
    "float one-hot": OneHot(3, dtype=torch.float32),
    "multi": MultiCategorical([3, 2], start=[1, 5]),
    "masked multi": MultiCategorical([3, 2], mask=[False, True, True, False, True]),
    "multi one-hot": MultiOneHot([3, 2]),
    "binary": Binary(4),
}
EACH_LEAF = pytest.mark.parametrize("spec", LEAVES.values(), ids=LEAVES.keys())


def test_discrete_spaces_keep_their_start() -> None:
    drawn = as_spec(spaces.Discrete(3, start=5)).rand((500,))
    assert set(drawn.tolist()) == {5, 6, 7}
    drawn = as_spec(spaces.MultiDiscrete([2, 3], start=[10, -1])).rand((500,))
    assert set(drawn[:, 0].tolist()) == {10, 11} and set(drawn[:, 1].tolist()) == {-1, 0, 1}


def test_draws_without_bounds_are_finite_of_both_signs_and_reproducible() -> None:
    for low, high in ((-torch.inf, torch.inf), (0.0, torch.inf), (-torch.inf, 0.0)):
        drawn = Bounded(low, high, (1000,)).rand()
        assert drawn.isfinite().all() and len(drawn.unique()) > 900
    most = torch.finfo(torch.float32).max
    wide = Bounded(-most, most, (1000,)).rand()
    assert wide.isfinite().all() and (wide < 0).any() and (wide > 0).any()
    assert (Unbounded((1000,), dtype=torch.int64).rand() < 0).any()
    for spec in LEAVES.values():
        one, two = (spec.rand((5,), generator=torch.Generator().manual_seed(3)) for _ in range(2))
        assert torch.equal(one, two)


@EACH_LEAF
def test_zero_one_and_draws_are_in_the_domain(spec: TensorSpec) -> None:
    for shape in ((), (5,), (2, 3)):
        for value in (
            spec.zero(shape),
            spec.one(shape),
            spec.rand(shape),
            spec.zeros(shape),
            spec.sample(shape),
        ):
            assert spec.is_in(value) and spec.problem(value) is None
            assert value.shape == (*shape, *spec.shape) and value.dtype == spec.dtype


@EACH_LEAF
def test_what_is_projected_is_in_the_domain(spec: TensorSpec) -> None:
    inside = spec.rand((4,))
    assert spec.project(inside) is inside
    noise = torch.randn(50, *spec.shape) * 10
    noise[::3] = torch.nan
    noise[1::7] = torch.inf
    for value in (noise, noise.double(), noise.nan_to_num(0.0, 9.0, -9.0).long(), noise > 0):
        assert spec.is_in(spec.project(value))


def test_project_takes_the_closest() -> None:
    assert Bounded(2, 7, (4,), dtype=torch.int64).project(
        torch.tensor([1.7, 3.6, 9.0, torch.nan])
    ).tolist() == [2, 4, 7, 2]
    assert Categorical(5, (3,), mask=[True, False, False, True, False]).project(
        torch.tensor([1, 2, 4])
    ).tolist() == [0, 3, 3]
    assert OneHot(3).project(torch.tensor([0.1, 5.0, 2.0])).tolist() == [False, True, False]


def test_encode_refuses_what_it_would_have_to_change() -> None:
    for spec, value in [
        (Bounded(0, 5, (1,)), 7.0),
        (Bounded(0, 255, (1,), dtype=torch.uint8), 300),
        (Bounded(0, 5, (1,), dtype=torch.int64), 1.5),
        (Categorical(3), 3),
        (Categorical(3), -1),
        (OneHot(3), 3),
        (MultiOneHot([2, 2]), [0, 2]),
        (Binary(2), [0, 2]),
    ]:
        with pytest.raises(OutsideSpecError):
            spec.encode(value)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) was expected, got \(3, 2\)"):
        Unbounded((2, 3)).encode(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="shape"):
        Unbounded((2,)).encode(torch.zeros(3))
    both = Composite(a=Unbounded((1,)), b=Categorical(2))
    with pytest.raises(KeyError, match="b"):
        both.encode({"a": 1.0})
    with pytest.raises(KeyError, match="c"):
        both.encode({"a": 1.0, "b": 1, "c": 1})
    with pytest.raises(OutsideSpecError, match="'b'"):
        both.encode({"a": 1.0, "b": 2})
    assert both.encode({"a": 1.0, "b": np.int64(1)})["b"].item() == 1


@EACH_LEAF
def test_encode_and_to_numpy_are_inverse(spec: TensorSpec) -> None:
    value = spec.rand()
    assert torch.equal(spec.encode(spec.to_numpy(value, safe=True)), value)


@EACH_LEAF
def test_is_in_returns_a_bool_and_never_raises(spec: TensorSpec) -> None:
    wrong = [
        spec.rand().to(torch.complex64),
        torch.zeros(7, 7, 7, dtype=spec.dtype),
        torch.tensor(0, dtype=spec.dtype) if spec.shape else torch.zeros(2, dtype=torch.bool),
        None,
        "text",
        TensorDict({}, [3]),
    ]
    for value in wrong:
        assert spec.is_in(value) is False and isinstance(spec.problem(value), str)
    assert spec.is_in(spec.rand()) is True
    assert Composite(a=spec).is_in(TensorDict({}, [])) is False
    assert Composite(a=spec).is_in({"a": spec.rand(), "more": 1}) is True


def test_cardinality_and_lists_of_values() -> None:
    assert Binary(4).cardinality() == 16 and len(Binary(4).enumerate().unique(dim=0)) == 16
    whole = Bounded(-1, 2, (2,), dtype=torch.int64)
    assert whole.cardinality() == 16 and len(whole.enumerate().unique(dim=0)) == 16
    assert OneHot(3, mask=[True, False, True]).enumerate(use_mask=True).tolist() == [
        [True, False, False],
        [False, False, True],
    ]
    assert MultiCategorical([3]).rand().shape == MultiCategorical([3]).shape == (1,)
    register = OneHot(2, use_register=True)
    codes = [register.encode(name).tolist() for name in ("left", "right", "left")]
    assert codes == [[True, False], [False, True], [True, False]]
    assert register.to_numpy(register.encode("right")) == "right"
    with pytest.raises(OutsideSpecError, match="up"):
        register.encode("up")
    both = Composite(a=Categorical(2), b=Binary(2))
    listed = both.enumerate()
    assert both.cardinality() == len(listed) == 8 and both.is_in(listed)


def test_nothing_is_copied_for_a_batch() -> None:
    image = Bounded(torch.zeros(84, 84, dtype=torch.uint8), 255, dtype=torch.uint8)
    for spec in (image.expand(1000, 84, 84), as_spec(spaces.Box(0, 255, (84, 84), np.uint8), 1000)):
        assert spec.shape == (1000, 84, 84)
        for wide in (
            spec,
            spec[::2],
            spec[torch.arange(7)],
            spec.unsqueeze(0),
            spec.reshape(10, 100, 84, 84),
        ):
            assert wide.low.untyped_storage().nbytes() <= 84 * 84 and wide.low.stride()[0] == 0
        assert spec.is_in(torch.zeros(1000, 84, 84, dtype=torch.uint8))


def test_bad_arguments() -> None:
    for make in (
        lambda: Bounded(2, 1, (1,)),
        lambda: Bounded(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 4.0])),
        lambda: Bounded(float("nan"), 1, (1,)),
        lambda: Bounded(0, 300, (1,), dtype=torch.uint8),
        lambda: Bounded(0, 0.5, (1,), dtype=torch.int64),
        lambda: Bounded(0, 1e39, (1,), dtype=torch.float32),
        lambda: Bounded(0, 1),
        lambda: Bounded(torch.zeros(2), torch.ones(3)),
        lambda: Bounded(torch.zeros(2), 1, (3,)),
        lambda: Categorical(0),
        lambda: Categorical(300, dtype=torch.uint8),
        lambda: Categorical(3, dtype=torch.bool),
        lambda: Categorical(3, mask=torch.zeros(3, dtype=torch.bool)),
        lambda: Categorical(3, mask=torch.ones(2, dtype=torch.bool)),
        lambda: OneHot(3, (4,)),
        lambda: Binary(3, (4,)),
        lambda: MultiCategorical([3, 0]),
        lambda: MultiCategorical([3, 2], (3,)),
        lambda: MultiOneHot([3, 2], (4,)),
        lambda: Unbounded((-2,)),
        lambda: Bounded(0, 1, (1,), domain="even"),
        lambda: Composite(a=Unbounded((3,)), shape=(2,)),
    ):
        with pytest.raises(ValueError):
            make()
    with pytest.raises(TypeError, match="gymnasium space"):
        as_spec("Discrete(3)")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no Gymnasium space"):
        as_space(NonTensor())
    with pytest.raises(TypeError, match="must be a spec"):
        Composite(a=3)
    with pytest.raises(RuntimeError, match="locked"):
        Composite(a=Categorical(2)).lock_().set("b", Categorical(2))


def test_an_error_names_the_key_and_the_row() -> None:
    spec = Composite(next=Composite(obs=Bounded(0, 1, (4, 2)), shape=(4,)), shape=(4,))
    value = spec.zero()
    value["next", "obs"][2, 1] = 7
    with pytest.raises(
        OutsideSpecError, match=r"\('next', 'obs'\): at index \(2, 1\) .* \[0.0, 1.0\] .* got 7.0"
    ):
        spec.assert_is_in(value)
