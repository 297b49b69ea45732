"""The segmented scan against a slow loop over every run alone, in float64."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from flatroll.kernels import residual_scan, scan, segmented_scan


def loop(a: Tensor | float, b: Tensor, ends: Tensor) -> Tensor:
    a = torch.as_tensor(a, dtype=torch.float64)
    a = (a.reshape(-1, *[1] * (b.ndim - 1)) if a.shape == b.shape[:1] else a).expand(b.shape)
    y = b.double().clone()
    for i in range(len(y) - 2, -1, -1):
        if not ends[i]:
            y[i] += a[i] * y[i + 1]
    return y


def doubling(a: Tensor | float, b: Tensor, ends: Tensor) -> Tensor:
    a = scan._checked(a, b, ends)
    return scan._doubling(a, b, ends, len(b))


FORMS = pytest.mark.parametrize("form", [segmented_scan, doubling], ids=["numba", "torch"])
Form = Callable[[Tensor | float, Tensor, Tensor], Tensor]


def random_ends(rows: int, share: float = 0.3, seed: int = 0) -> Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < share


@FORMS
@examples(60)
@given(
    ends=st.lists(st.booleans(), min_size=1, max_size=40),
    features=st.sampled_from([(), (1,), (3,), (2, 3)]),
    kind=st.sampled_from(["number", "scalar", "row", "full"]),
    seed=st.integers(0, 10),
)
def test_equals_the_loop(
    form: Form, ends: list[bool], features: tuple[int, ...], kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = len(ends)
    b = torch.randn(n, *features, generator=generator, dtype=torch.float64)
    shape = {"number": (), "scalar": (), "row": (n,), "full": (n, *features)}[kind]
    a: Tensor | float = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "number":
        a = float(a)
    cut = torch.tensor(ends)
    torch.testing.assert_close(form(a, b, cut), loop(a, b, cut))


@FORMS
def test_float32_stays_float32_and_near_float64(form: Form) -> None:
    b, ends = torch.randn(20_000), random_ends(20_000, 0.001)
    y = form(0.995, b, ends)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y.double(), loop(0.995, b, ends), rtol=1e-5, atol=1e-4)


@FORMS
def test_nothing_crosses_an_end(form: Form) -> None:
    ends = torch.tensor([False, True, False, True])
    b = torch.tensor([1.0, 2.0, float("nan"), float("inf")])
    assert form(0.5, b, ends)[:2].tolist() == [2.0, 2.0]
    a = torch.tensor([1.0, float("nan"), 1.0, float("inf")])  # the factor of an end row is never used
    assert form(a, torch.ones(4), ends).tolist() == [2.0, 1.0, 2.0, 1.0]


@FORMS
@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3)])
@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_nothing_crosses_a_decay_of_zero(form: Form, shape: tuple[int, ...], rubbish: float) -> None:
    """And the gradient of that decay is the row behind it, or 0 where that is rubbish."""
    a, b = torch.tensor([0.5, 0.0, 1.0, 0.0]), torch.ones(shape)
    b[3] = rubbish
    ends = torch.tensor([False, False, True, False])
    a.requires_grad_()
    y = form(a, b, ends)
    y.sum().backward()
    row = math.prod(shape[1:])
    assert y[:, None].flatten(1).amax(1).tolist() == [1.5, 1.0, 1.0, rubbish] or math.isnan(rubbish)
    assert y[:3].isfinite().all()
    assert a.grad.tolist() == [row * 1.0, row * 1.5, 0.0, 0.0]
    ends[2] = False
    a.grad = None
    with torch.no_grad():
        a[2] = 0.0
    form(a, b, ends).sum().backward()
    assert a.grad.tolist() == [row * 1.0, row * 1.5, 0.0, 0.0]


@FORMS
def test_a_decay_that_rounds_to_zero_is_none(form: Form) -> None:
    b = torch.ones(1024)
    b[-1] = torch.nan
    assert form(0.5, b, torch.zeros(1024, dtype=torch.bool)).isnan().all()
    assert form(torch.full((1024,), 0.5), b, torch.zeros(1024, dtype=torch.bool)).isnan().all()


@FORMS
def test_last_row_ends_a_run_and_inputs_stay_as_they_were(form: Form) -> None:
    a, b, ends = torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.bool)
    assert form(a, b, ends).tolist() == [3.0, 2.0, 1.0]
    assert b.tolist() == a.tolist() == [1.0, 1.0, 1.0] and not ends.any()


def test_strided_and_half_inputs() -> None:
    b, ends = torch.randn(50, 4)[:, 1::2], random_ends(100)[::2]
    torch.testing.assert_close(
        segmented_scan(0.9, b, ends).double(), loop(0.9, b, ends), rtol=1e-5, atol=1e-5
    )
    half = b.bfloat16()
    assert segmented_scan(0.9, half, ends).dtype is torch.bfloat16
    assert segmented_scan(0.9, torch.ones(0), torch.ones(0, dtype=torch.bool)).shape == (0,)


@pytest.mark.parametrize("decay", [0.9, (6,), (6, 1), (6, 4), ()], ids=str)
def test_features_run_in_the_compiled_loop(decay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a = decay if isinstance(decay, float) else torch.rand(decay)
    b, ends = torch.randn(6, 4), torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.bool)
    expected = segmented_scan(a, b.requires_grad_(), ends).detach()
    monkeypatch.setattr(scan, "_doubling", None)  # the form for devices, forty times slower here
    torch.testing.assert_close(segmented_scan(a, b.detach(), ends), expected)


def test_longest_saves_passes_and_changes_no_result() -> None:
    ends = torch.zeros(64, dtype=torch.bool)
    ends[7::8] = True
    b = torch.randn(64).to(torch.bfloat16)  # a dtype that runs the torch form
    assert torch.equal(segmented_scan(1.0, b, ends, longest=8), segmented_scan(1.0, b, ends))


@pytest.mark.parametrize("shape", [(), (12,), (12, 3), (1, 3)], ids=str)
def test_gradients(shape: tuple[int, ...]) -> None:
    ends = random_ends(12)
    a = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    b = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)

    def of(a: Tensor, b: Tensor) -> Tensor:
        return segmented_scan(a, b, ends)

    assert gradcheck(of, (a, b))
    assert gradgradcheck(of, (a, b))
    loose = torch.autograd.grad(doubling(a, b, ends).sum(), (a, b))
    tight = torch.autograd.grad(of(a, b).sum(), (a, b))
    torch.testing.assert_close(tight, loose)


def test_gradient_with_a_number() -> None:
    b = torch.randn(9, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda b: segmented_scan(0.7, b, random_ends(9)), (b,))


def test_compiles_as_one_graph() -> None:
    compiled = torch.compile(segmented_scan, backend="aot_eager", fullgraph=True)
    b, ends = torch.randn(33, requires_grad=True), random_ends(33)
    y = compiled(0.9, b, ends)
    torch.testing.assert_close(y, segmented_scan(0.9, b, ends))
    (grad,) = torch.autograd.grad(y.sum(), b)
    (expected,) = torch.autograd.grad(segmented_scan(0.9, b, ends).sum(), b)
    torch.testing.assert_close(grad, expected)


def test_runs_on_meta_so_reads_no_number_on_the_host() -> None:
    b, ends = torch.ones(100, 2, device="meta"), torch.zeros(100, dtype=torch.bool, device="meta")
    assert segmented_scan(torch.ones(100, device="meta"), b, ends).shape == (100, 2)
    flat = b[:, 0]
    assert residual_scan(0.9, 0.8, flat, flat, flat, ends, ends)[0].shape == (100,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("per_row", [False, True])
def test_residual_scan_is_the_scan_of_the_residuals(dtype: torch.dtype, per_row: bool) -> None:
    n = 200
    reward, value, next_value = torch.randn(3, n, dtype=dtype)
    terminated, cut = random_ends(n, 0.1, seed=1), random_ends(n, 0.1, seed=2)
    ends = terminated | cut
    gamma = torch.rand(n, dtype=dtype) if per_row else 0.99
    decay = gamma * 0.9
    residual = reward + gamma * next_value * ~terminated - value
    expected = loop(decay, residual, ends)
    next_value[terminated] = torch.nan  # never read there
    advantage, target = residual_scan(gamma, decay, reward, value, next_value, terminated, ends)
    assert advantage.dtype is target.dtype is dtype
    torch.testing.assert_close(advantage.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.double(), expected + value.double(), rtol=1e-5, atol=1e-5)
    tracked = value.clone().requires_grad_()  # a gradient takes the torch form of the residuals
    slow = residual_scan(gamma, decay, reward, tracked, next_value, terminated, ends)[0]
    torch.testing.assert_close(slow.detach(), advantage)


def by_rows(gamma: float, decay: float, *columns: Tensor) -> list[Tensor]:
    """The residual scan by the kernel that takes the rows one by one."""
    reward = columns[0]
    numbers = [np.full(1, number, reward.numpy().dtype) for number in (gamma, decay)]
    factors = [np.ndarray(tuple(reward.shape), one.dtype, one, strides=(0,)) for one in numbers]
    results = [torch.full_like(reward, torch.nan) for _ in range(2)]
    record = tuple(column.numpy() for column in columns)
    scan.machine_code(scan._residual_loop)(*factors, record, *(result.numpy() for result in results))
    return results


def bits(column: Tensor) -> Tensor:
    return column.view(torch.int32)


def lengths(length: int, rows: int) -> Tensor:
    """Ends of runs of one length."""
    return torch.arange(1, rows + 1) % length == 0


def two_near_ends(rows: int) -> Tensor:
    """Ends so near one another that two lanes would have nearly the same rows."""
    ends = torch.zeros(rows, dtype=torch.bool)
    first = rows // 3 - 1
    ends[[first, first + 5, 2 * first + 5, rows - 1]] = True
    return ends


MANY = scan._LANE_ROWS
RUNS = {
    "random": (random_ends(MANY + 77, 0.01), True),
    "one row": (torch.ones(MANY, dtype=torch.bool), True),
    "5 rows": (lengths(5, MANY), True),
    "1000 rows": (lengths(1000, MANY), True),
    "a sixteenth": (lengths(MANY // 16, MANY), True),
    "a quarter": (lengths(MANY // 4, MANY), False),
    "a third": (lengths(MANY // 3, MANY), False),
    "no end": (torch.zeros(MANY, dtype=torch.bool), False),
    "two near ends": (two_near_ends(MANY), False),
    "ends in the first half": (lengths(50, MANY) & (torch.arange(MANY) < MANY // 2), False),
    "few rows": (lengths(5, MANY - 1), True),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lanes_give_the_same_bits_as_row_by_row(name: str, dtype: torch.dtype) -> None:
    ends, in_lanes = RUNS[name]
    assert (scan.find_lanes(ends.numpy()) is not None) == in_lanes

    generator = torch.Generator().manual_seed(0)
    reward, value, next_value = torch.randn(3, len(ends), generator=generator, dtype=dtype)
    terminated = ends & random_ends(len(ends), 0.5, seed=1)
    columns = (reward, value, next_value, terminated, ends)
    next_value[terminated] = torch.nan  # never read there

    for gamma, decay in ((0.99, 0.94), (1.0, 1.0), (0.9, 0.0), (0.0, 0.0)):
        given = residual_scan(gamma, decay, *columns)
        for result, expected in zip(given, by_rows(gamma, decay, *columns), strict=True):
            assert torch.equal(bits(result), bits(expected))
            assert bool(result.isfinite().all())


def test_lanes_keep_infinite_rows_inside_of_their_runs() -> None:
    ends = lengths(50, MANY)
    reward, value, next_value = torch.zeros(3, MANY)
    reward[::1000] = torch.nan
    value[1::1000] = torch.inf
    reward[2::1000] = -0.0
    columns = (reward, value, next_value, ends, ends)

    for result, expected in zip(residual_scan(0.9, 0.8, *columns), by_rows(0.9, 0.8, *columns), strict=True):
        assert torch.equal(bits(result), bits(expected))
        assert int(result.isfinite().sum()) >= MANY - 2 * 50 * (MANY // 1000 + 1)


@examples(60)
@given(
    share=st.sampled_from([0.002, 0.01, 0.1, 1.0]), rows=st.integers(2000, 20_000), seed=st.integers(0, 1000)
)
def test_lanes_cover_all_rows_and_end_where_runs_do(share: float, rows: int, seed: int) -> None:
    ends = random_ends(rows, share, seed).numpy()
    lasts = scan.find_lanes(ends)
    if lasts is None:
        assert share < 0.1
        return

    assert len(lasts) == 4
    assert lasts[-1] == rows - 1
    assert ends[lasts[:-1]].all()
    assert np.diff(lasts).min() >= scan._BLOCK
    covered = np.zeros(rows, np.bool_)
    for last in lasts:
        assert last >= lasts[0]
        covered[last - lasts[0] : last + 1] = True
    assert covered.all()


BAD = {
    "int b": (0.5, torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool), TypeError, "b must be"),
    "int ends": (0.5, torch.ones(3), torch.ones(3), TypeError, "ends must be bool, got torch.float32"),
    "short ends": (
        0.5,
        torch.ones(3, 2),
        torch.ones(2, dtype=torch.bool),
        ValueError,
        "ends must have shape [N] for b of shape [N, *F], got (2,) for (3, 2)",
    ),
    "wide a": (
        torch.ones(2),
        torch.ones(3),
        torch.ones(3, dtype=torch.bool),
        ValueError,
        "broadcasts to b, got (2,) for b of shape (3,)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    a, b, ends, error, text = BAD[name]
    with pytest.raises(error, match=re.escape(text)):
        segmented_scan(a, b, ends)


def test_compiles_where_no_machine_code_can_be_kept() -> None:
    """Numba refuses to keep code that has no file, as it does where no directory can be written."""
    import numba

    from flatroll.kernels.compiled import compiled

    scope: dict[str, Callable[[int], int]] = {}
    exec("def twice(x): return 2 * x", scope)
    with pytest.raises(RuntimeError, match="cannot cache function"):
        numba.njit(cache=True)(scope["twice"])
    assert compiled()(scope["twice"])(21) == 42
