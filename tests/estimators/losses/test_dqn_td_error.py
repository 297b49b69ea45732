"""The ``td_error`` of `DQNLoss` against a loop in float64: masked and unknown rows, a discount for each row."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from flatroll.estimators import DQNLoss

NAN = float("nan")
QUIET = pytest.mark.filterwarnings("ignore")
NETWORK = TensorDictModule(nn.Identity(), ["observation"], ["action_value"])


def batch_of(seed: int) -> tuple[TensorDict, Tensor, Tensor]:
    """A batch, its real rows, and those of them whose next observation is known."""
    source = torch.Generator().manual_seed(seed)
    rows = 1 + seed % 8

    def some(share: float) -> Tensor:
        return torch.rand(rows, generator=source) < share

    real, known, end = some(0.7), some(0.7), some(0.3)
    later = torch.randn(rows, 3, generator=source)
    later[lost := some(0.2)] = NAN
    reward = torch.randn(rows, 1, generator=source)
    batch = TensorDict(
        {
            "observation": torch.randn(rows, 3, generator=source),
            "action": torch.randint(0, 3, (rows,), generator=source),
            "is_init": torch.ones(rows, 1, dtype=torch.bool),
            "collector": {"mask": real, "next_known": known},
            "gamma": torch.rand(rows, generator=source),
            "steps_to_next_obs": torch.ones(rows, dtype=torch.long),
            "next": {
                "observation": later,
                "reward": reward,
                "terminated": end[:, None],
                "done": end[:, None],
            },
        },
        [rows],
    )
    if seed % 2:
        batch["next", "reward"][~real] = NAN  # padding holds anything
    return batch, real, (known & ~lost) | end


def error_of(batch: TensorDict, row: int) -> float:
    """``|r + gamma * max Q(s') - Q(s, a)|`` in float64."""
    at = batch[row]
    target = float(at["next", "reward"])
    if not at["next", "terminated"]:
        target += float(at["gamma"]) * float(at["next", "observation"].double().max())
    return abs(target - float(at["observation"][at["action"]].double()))


@QUIET
def test_rows_that_count_have_their_error_and_unknown_ones_0() -> None:
    for seed in range(300):
        batch, real, known = batch_of(seed)
        loss = DQNLoss(NETWORK, delay_value=False).make_value_estimator(gamma=0.9)(batch)["loss"]
        errors = [error_of(batch, i) if known[i] else 0.0 for i in range(len(batch)) if real[i]]
        assert batch["td_error"][real].tolist() == pytest.approx(errors, abs=1e-5)
        counted = [error_of(batch, i) ** 2 for i in range(len(batch)) if real[i] and known[i]]
        assert float(loss) == pytest.approx(math.fsum(counted) / max(1, len(counted)), abs=1e-5)


@QUIET
def test_padding_has_no_error() -> None:
    """Else NaN in padding is a priority that ``update_priority`` refuses, and a finite one is of no row."""
    for seed in range(300):
        batch, real, _ = batch_of(seed)
        DQNLoss(NETWORK, delay_value=False)(batch)
        assert batch["td_error"][~real].tolist() == [0.0] * int((~real).sum()), seed
