"""``recurrent_recompute="full"``: the same numbers and gradients, less memory between forward and backward."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.measure.live_bytes import LiveBytes
from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode

KEYS: dict[str, Any] = {"in_key": "observation", "out_key": "features", "state": "zero"}


def batch_of(rows: int) -> TensorDict:
    torch.manual_seed(0)
    starts = torch.rand(rows) < 0.2
    return TensorDict({"observation": torch.randn(rows, 3), "is_init": starts}, [rows])


def run(kind: Any, recompute: str, burn_in: int = 0, **options: Any) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    module = kind(3, 8, recurrent_recompute=recompute, **KEYS, **options)
    torch.manual_seed(2)  # of the dropout
    with set_recurrent_mode(True, burn_in=burn_in):
        out = module(batch_of(40))["features"]
    out.square().sum().backward()
    return out.detach(), [x.grad for x in module.parameters()]


@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"burn_in": 2},
        {"recurrent_backend": "packed", "num_layers": 2, "dropout": 0.5},
        {"python_based": True, "recurrent_backend": "scan"},
        {"recurrent_backend": "pad", "bidirectional": True},
    ],
    ids=str,
)
def test_same_outputs_and_gradients(kind: Any, options: dict[str, Any]) -> None:
    kept, again = run(kind, "none", **options), run(kind, "full", **options)
    torch.testing.assert_close(again, kept, rtol=0, atol=0)


def test_nothing_of_the_recurrence_is_kept() -> None:
    live = {}
    for recompute in ("none", "full"):
        module = GRUModule(
            3, 64, recurrent_recompute=recompute, python_based=True, recurrent_backend="scan", **KEYS
        )
        with set_recurrent_mode(True), LiveBytes() as counted:
            out = module(batch_of(400))
        live[recompute] = counted.live
        assert out["features"].requires_grad
    assert live["full"] < live["none"] / 2, live


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recurrent_recompute must be 'none' or 'full', got 'all'"):
        GRUModule(3, 8, recurrent_recompute="all", **KEYS)
