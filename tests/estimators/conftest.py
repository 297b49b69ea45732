"""Batches of random runs that end in every way, and the slow loop over each run alone."""

from collections.abc import Callable, Sequence

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from benchmarks.measure.live_bytes import peak_of

Run = tuple[int, str]
BatchOf = Callable[..., TensorDict]
GaeLoop = Callable[[TensorDictBase, TensorDictModuleBase, float, float], Tensor]


def make_batch(
    runs: Sequence[Run], *, seed: int = 0, obs: int = 3, dtype: torch.dtype = torch.float64
) -> TensorDict:
    """Runs (rows, way to end) end to end in a flat batch; the final observation of each is in no other row."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for number, (rows, end) in enumerate(runs):
        seen = torch.randn(rows + 1, obs, generator=generator, dtype=dtype)
        last = (torch.arange(rows) == rows - 1).unsqueeze(-1)
        terminated, truncated = last & (end in ("terminated", "both")), last & (end in ("truncated", "both"))
        parts.append(
            TensorDict(
                {
                    "observation": seen[:-1],
                    "is_init": (torch.arange(rows) == 0).unsqueeze(-1),
                    "collector": {"traj_ids": torch.full((rows,), number)},
                    "next": {
                        "observation": seen[1:],
                        "reward": torch.randn(rows, 1, generator=generator, dtype=dtype),
                        "terminated": terminated,
                        "truncated": truncated,
                        "done": terminated | truncated,
                    },
                },
                [rows],
            )
        )
    return torch.cat(parts)


def linear_critic(obs: int = 3, dtype: torch.dtype = torch.float64) -> TensorDictModule:
    torch.manual_seed(0)
    net = nn.Linear(obs, 1, dtype=dtype)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])


def loop_over_runs(batch: TensorDictBase, critic: TensorDictModuleBase, gamma: float, lmbda: float) -> Tensor:
    """The advantage ``[N, 1]`` of a critic of single rows, run by run, row by row, in float64."""
    advantages = []
    with torch.no_grad():
        ids = batch["collector", "traj_ids"]
        for run in (batch[ids == number] for number in ids.unique()):
            value = critic(run.select("observation"))["state_value"].double()
            next_value = critic(run["next"].select("observation"))["state_value"].double()
            advantage = torch.zeros(len(run) + 1, 1, dtype=torch.float64)
            for i in reversed(range(len(run))):
                alive = 1.0 - float(run["next", "terminated"][i])
                delta = run["next", "reward"][i].double() + gamma * alive * next_value[i] - value[i]
                advantage[i] = delta + gamma * lmbda * advantage[i + 1]
            advantages.append(advantage[:-1])
    return torch.cat(advantages)


MIXED: list[Run] = [
    (5, "terminated"),
    (1, "truncated"),
    (4, "cut"),
    (1, "both"),
    (3, "truncated"),
    (2, "cut"),
]


@pytest.fixture
def mixed() -> TensorDict:
    """16 rows: a run of each kind, two of them of one row."""
    return make_batch(MIXED)


@pytest.fixture
def critic() -> TensorDictModule:
    return linear_critic()


# The functions as fixtures of the session, since a test module cannot import this file.
@pytest.fixture(scope="session", name="batch_of")
def batch_of_fixture() -> BatchOf:
    return make_batch


@pytest.fixture(scope="session", name="gae_loop")
def gae_loop_fixture() -> GaeLoop:
    return loop_over_runs


@pytest.fixture(scope="session", name="peak_of")
def peak_of_fixture() -> Callable[[Callable[[], object]], int]:
    return peak_of
