"""The fused forms against the torch forms, and both where the last row is not marked as an end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flatroll.kernels import residual_scan, return_scan, vtrace_scan

N = 60


def columns(dtype: torch.dtype, per_row: bool, marked: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    reward, value, next_value = torch.randn(3, N, generator=generator, dtype=dtype)
    rho, c, factor = torch.rand(3, N, generator=generator, dtype=dtype)
    ends = torch.rand(N, generator=generator) < 0.2
    terminated = ends & (torch.rand(N, generator=generator) < 0.5)
    ends[-1], terminated[-1] = marked, False
    next_value[terminated] = torch.nan  # never read there
    return {
        "gamma": factor if per_row else 0.97,
        "lmbda": 1.0 - factor if per_row else 0.9,
        "reward": reward,
        "value": value,
        "next_value": next_value,
        "terminated": terminated,
        "ends": ends,
        "rho": rho,
        "c": c,
    }


CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "residual": lambda x: residual_scan(
        x["gamma"], x["lmbda"], x["reward"], x["value"], x["next_value"], x["terminated"], x["ends"]
    ),
    "return": lambda x: return_scan(
        x["gamma"], x["lmbda"], x["reward"], x["next_value"], x["terminated"], x["ends"]
    ),
    "vtrace": lambda x: vtrace_scan(
        x["gamma"], x["rho"], x["c"], x["reward"], x["value"], x["next_value"], x["terminated"], x["ends"]
    ),
}


def stacked(out: Any) -> Tensor:
    return torch.stack(out if isinstance(out, tuple) else [out]).detach()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_one_result_from_both_forms(name: str, dtype: torch.dtype, per_row: bool, marked: bool) -> None:
    given = columns(dtype, per_row, marked)
    fused = stacked(CALLS[name](given))
    tracked = {**given, "reward": given["reward"].clone().requires_grad_()}  # a gradient takes the torch form
    torch.testing.assert_close(stacked(CALLS[name](tracked)), fused)
    as_end = given["ends"].clone()
    as_end[-1] = True
    torch.testing.assert_close(stacked(CALLS[name]({**given, "ends": as_end})), fused)
    assert fused.isfinite().all() and fused.dtype is dtype


@pytest.mark.parametrize("name", CALLS)
def test_mixed_dtypes_half_precision_and_strides(name: str) -> None:
    given = columns(torch.float64, True, True)
    wanted = stacked(CALLS[name](given))
    wide = {k: torch.stack([x, x], 1)[:, 0] if isinstance(x, Tensor) else x for k, x in given.items()}
    torch.testing.assert_close(stacked(CALLS[name](wide)), wanted)
    half = {
        k: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in given.items()
    }
    assert stacked(CALLS[name](half)).dtype is torch.bfloat16
    mixed = {**given, "next_value": given["next_value"].float()}
    torch.testing.assert_close(stacked(CALLS[name](mixed)), wanted, rtol=1e-5, atol=1e-5)
