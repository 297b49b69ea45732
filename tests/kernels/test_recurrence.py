"""The linear recurrence forward in time: both forms against a loop, their gradients, what crosses a boundary."""

from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatroll.kernels import recurrence, segmented_scan
from flatroll.kernels.recurrence import linear_recurrence, selective_recurrence

KINDS = [torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float64: 1e-12, torch.complex128: 1e-12}


def by_loop(a: Tensor, b: Tensor, first: Tensor, starts: Tensor) -> Tensor:
    states: list[Tensor] = []
    a = a.expand_as(b)
    for i, start in enumerate(starts.tolist()):
        before = first[i] if start else states[-1]
        states.append(a[i] * before + b[i])
    return torch.stack(states)


def arguments(starts: Tensor, shape: tuple[int, ...], dtype: torch.dtype, shared: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = len(starts)
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    sizes = [(1 if shared else rows, *shape), (rows, *shape), (rows, *shape)]
    return [torch.randn(size, generator=generator, dtype=drawn).to(dtype).requires_grad_() for size in sizes]


def of_lengths(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) == 0 for length in lengths])


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    shape=st.sampled_from([(1,), (3,), (2, 3)]),
    dtype=st.sampled_from(list(TOLERANCE)),
    shared=st.booleans(),
    tracing=st.booleans(),
)
def test_both_forms_equal_a_loop(
    lengths: list[int], shape: tuple[int, ...], dtype: torch.dtype, shared: bool, tracing: bool
) -> None:
    starts = of_lengths(lengths)
    inputs = arguments(starts, shape, dtype, shared)
    expected = by_loop(*inputs, starts)
    close: Any = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    if tracing:

        def summed(*columns: Tensor) -> tuple[Tensor, Tensor]:
            found = linear_recurrence(*columns, starts)
            return (found * found.conj()).real.sum(), found

        grads, found = torch.func.grad(summed, argnums=(0, 1, 2), has_aux=True)(*(x.detach() for x in inputs))
        wanted = torch.autograd.grad((expected * expected.conj()).real.sum(), inputs)
    else:
        found = linear_recurrence(*inputs, starts)
        weights = torch.ones_like(found).cumsum(0)
        grads = torch.autograd.grad(found, inputs, weights)
        wanted = torch.autograd.grad(expected, inputs, weights)
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(
        tuple(grads), tuple(wanted), rtol=100 * close["rtol"], atol=100 * close["atol"]
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradients_of_gradients(dtype: torch.dtype, shared: bool) -> None:
    starts = of_lengths([3, 1, 4])
    inputs = arguments(starts, (2,), dtype, shared)

    def compute(*columns: Tensor) -> Tensor:
        return linear_recurrence(*columns, starts)

    assert torch.autograd.gradcheck(compute, inputs)
    assert torch.autograd.gradgradcheck(compute, inputs)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_nothing_crosses_from_one_run_to_the_next(dtype: torch.dtype) -> None:
    starts = of_lengths([2, 3, 1])
    a, b, first = (x.detach() for x in arguments(starts, (2,), dtype, False))
    b[1] = torch.nan
    first[[1, 3, 4]] = torch.nan  # read at first rows only
    found = linear_recurrence(a, b, first, starts)
    assert found.isfinite().all(-1).tolist() == [True, False, True, True, True, True]


def test_columns_of_any_strides() -> None:
    starts = of_lengths([4, 2])
    a, b, first = (x.detach() for x in arguments(starts, (2, 3), torch.complex128, False))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (a, b, first)]
    expected = linear_recurrence(a, b, first, starts)
    assert torch.equal(linear_recurrence(*strided, starts), expected)
    conjugate = linear_recurrence(a.conj(), b.conj(), first.conj(), starts)
    torch.testing.assert_close(conjugate, expected.conj())


@pytest.mark.parametrize("wide", [True, False])
def test_the_segmented_scan_takes_complex_numbers(wide: bool) -> None:
    starts = of_lengths([3, 1, 2])
    a, b, _ = arguments(starts, (2,), torch.complex128, not wide)
    found = segmented_scan(a, b, starts.roll(-1))
    expected = by_loop(a.expand_as(b).flip(0), b.flip(0), torch.zeros_like(b), starts.roll(-1).flip(0)).flip(
        0
    )
    torch.testing.assert_close(found, expected)
    assert torch.autograd.gradcheck(lambda a, b: segmented_scan(a, b, starts.roll(-1)), (a, b))
    with pytest.raises(ValueError, match="of real numbers unless b is complex"):
        segmented_scan(a, b.real, starts)


def selective_arguments(starts: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Step sizes, what is written, how to write and to read it, rates, first states: 2 parts of 3 features."""
    generator = torch.Generator().manual_seed(0)
    rows = len(starts)
    sizes = [(rows, 3), (rows, 3), (rows, 2), (rows, 2), (2, 3), (rows, 2, 3)]
    drawn = [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]
    drawn[0] = drawn[0].exp()
    drawn[4] = drawn[4].exp()
    return [x.requires_grad_() for x in drawn]


def selective_loop(
    step: Tensor, written: Tensor, write: Tensor, read: Tensor, rates: Tensor, first: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    seen, states = [], []
    for i, start in enumerate(starts.tolist()):
        before = first[i] if start else states[-1]
        states.append(torch.exp(-step[i] * rates) * before + torch.outer(write[i], written[i]))
        seen.append(read[i] @ states[-1])
    return torch.stack(seen), torch.stack(states)


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    single=st.booleans(),
    of=st.sampled_from(["seen", "states", "both"]),
)
def test_the_selective_recurrence_equals_a_loop(lengths: list[int], single: bool, of: str) -> None:
    dtype, limit = (torch.float32, 1e-5) if single else (torch.float64, 1e-12)
    starts = of_lengths(lengths)
    inputs = selective_arguments(starts, dtype)
    used = {"seen": slice(0, 1), "states": slice(1, 2), "both": slice(0, 2)}[of]
    grads = []
    results = []
    for compute in (selective_recurrence, selective_loop, recurrence._in_parts):
        results.append(compute(*inputs, starts))
        outputs = results[-1][used]
        weights = [torch.ones_like(x).cumsum(0) for x in outputs]
        grads.append(torch.autograd.grad(outputs, inputs, weights, materialize_grads=True))
    for found, slopes in zip(results[1:], grads[1:], strict=True):
        torch.testing.assert_close(found, results[0], rtol=limit, atol=limit)
        torch.testing.assert_close(slopes, grads[0], rtol=100 * limit, atol=100 * limit)


def test_gradients_of_gradients_of_the_selective_recurrence() -> None:
    starts = of_lengths([2, 1, 3])
    inputs = selective_arguments(starts, torch.float64)

    def compute(*columns: Tensor) -> tuple[Tensor, Tensor]:
        return selective_recurrence(*columns, starts)

    assert torch.autograd.gradcheck(compute, inputs)
    assert torch.autograd.gradgradcheck(compute, inputs)


def test_nothing_selective_crosses_from_one_run_to_the_next() -> None:
    starts = of_lengths([2, 3, 1])
    *columns, rates, first = (x.detach() for x in selective_arguments(starts, torch.float32))
    columns[1][1] = torch.nan
    first[[1, 3, 4]] = torch.nan
    inputs = [x.requires_grad_() for x in (*columns, rates, first)]
    seen, states = selective_recurrence(*inputs, starts)
    for found in (seen, states.flatten(1)):
        assert found.isfinite().all(-1).tolist() == [True, False, True, True, True, True]
    of_written, of_first = torch.autograd.grad(seen[2:5].sum(), [inputs[1], inputs[5]])
    assert of_written.ne(0).all(-1).tolist() == [False, False, True, True, True, False]
    assert of_first.flatten(1).ne(0).all(-1).tolist() == [False, False, True, False, False, False]
