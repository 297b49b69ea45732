"""Workers act with the owner's statistics, and rows name the version that acted."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from worker_envs import Seeded

from flatroll.modules import RunningNorm
from flatroll.rollouts import MultiCollector
from flatroll.sharing import Nursery


class Act(torch.nn.Module):
    """Any action, and what was seen."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(x), dtype=torch.int64), x


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("compact", [False, True])
def test_workers_act_with_the_statistics_of_their_version(nursery: Nursery, compact: bool) -> None:
    norm = RunningNorm("observation", shape=(3,))
    policy = TensorDictSequential(norm, TensorDictModule(Act(), ["observation_norm"], ["action", "seen"]))
    made: Any = MultiCollector(
        [Seeded, Seeded],
        policy,
        frames_per_batch=20,
        total_frames=120,
        track_policy_version=True,
        compact_obs=compact,
        seed=1,
        nursery=nursery,
    )
    by_version, rows, checked = [copy.deepcopy(norm)], [], set()
    with made as collector:
        for batch in collector:
            assert batch.get("observation_norm", None) is None
            for version in batch["collector", "policy_version"].unique().tolist():
                acted = batch["collector", "policy_version"] == version
                out = by_version[version](observation=batch["observation"][acted])
                torch.testing.assert_close(batch["seen"][acted], out)
                checked.add(version)
            norm.update(batch, final=collector.final)
            after = collector.final["next", "observation"] if compact else batch["next", "observation"]
            rows += [batch["observation"], after]
            collector.update_policy_weights_()
            by_version.append(copy.deepcopy(norm))
    seen = np.unique(torch.cat(rows).double().numpy(), axis=0)
    assert len(checked) > 2 and norm.statistics.count == len(seen)
    np.testing.assert_allclose(norm.statistics.mean, seen.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.statistics.var, seen.var(0), rtol=1e-12)
