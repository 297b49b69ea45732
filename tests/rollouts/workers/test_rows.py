"""The rows of many workers are those of single collectors, each once, in every mode."""

from functools import partial
from typing import Any

import pytest
import torch
from worker_envs import assert_equal, envs, half, recurrent

from flatroll.layout import audit
from flatroll.rollouts import Collector, MultiCollector
from flatroll.sharing import Nursery

pytestmark = pytest.mark.usefixtures("transport")

OPTIONS: Any = {
    "random": (None, {"init_random_frames": 9, "info_keys": ["count"], "set_truncated": True}),
    "compact": (None, {"compact_obs": True, "max_frames_per_traj": 5, "track_policy_version": True}),
    "recurrent": (recurrent, {"compact_obs": True, "state_stride": 2}),
    "no ids": (None, {"track_traj_ids": False}),
    "postproc": (recurrent, {"postproc": lambda batch: batch.exclude("action"), "reset_at_each_iter": True}),
    "splits": (None, {"splits": 2}),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_rows_are_those_of_single_collectors(sync: bool, name: str, nursery: Nursery) -> None:
    make_policy, options = OPTIONS[name]
    policy = make_policy and make_policy()
    makers: list[Any] = [envs(2), envs(3)]
    if "splits" in options:
        makers = [[partial(half, 1), partial(half, 2)], [partial(half, 2), partial(half, 1)]]
    arguments: Any = options | {"writer": 4 if options.get("track_traj_ids", True) else 0}
    with MultiCollector(
        makers, policy, sync=sync, frames_per_batch=31, total_frames=124, seed=3, nursery=nursery, **arguments
    ) as multi:
        if "init_random_frames" in options:
            arguments["init_random_frames"] = 5
        alone = []
        for i, maker in enumerate(makers):
            arguments["writer"] += bool(i and arguments["writer"])
            rows = 16 - i if sync else 31
            env = [part() for part in maker] if isinstance(maker, list) else maker()
            alone.append(Collector(env, policy, frames_per_batch=rows, seed=multi.seeds[i], **arguments))
        count, before = 0, [0, 0]
        for batch in multi:
            if sync:
                assert_equal(batch, torch.cat([next(collector) for collector in alone]))
                finals = []
                for first, collector in zip((0, 16), alone, strict=True):
                    if collector.final is not None:
                        finals.append(collector.final.clone())
                        finals[-1]["row"] += first
                assert_equal(multi.final, torch.cat(finals) if finals else None)
            else:  # it is the next window of one of them
                served = [worker["windows"] for worker in multi.stats()["workers"]]
                at = int(served[1] > before[1])
                before = served
                assert_equal(batch, next(alone[at]))
                assert_equal(multi.final, alone[at].final)
            assert name == "postproc" or not audit(batch)
            count += len(batch)
        assert multi.frames == count == 124
