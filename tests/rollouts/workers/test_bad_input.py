"""What collectors with workers refuse, and what they say."""

import copy
import os
import pickle
import threading
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from worker_envs import ItsWeight, Seeded

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.rollouts import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from flatroll.rollouts.policies import refuse_hidden_weights
from flatroll.sharing import Nursery

LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("env", "options", "error", "message"),
    [
        (Seeded, {"frames_per_batch": 2, "num_workers": 3}, ValueError, "frames_per_batch=2 is less than one row"),
        (Seeded, {"storing_device": "xpu"}, ValueError, "storing_device='xpu' cannot be used here: "),
        (Seeded, {"num_workers": 0}, ValueError, "num_workers must be an integer of at least 1, got 0"),
        (Seeded, {"num_workers": 2.0}, ValueError, "num_workers must be an integer of at least 1, got 2.0"),
        ([Seeded], {"num_workers": 2}, ValueError, "num_workers must be the number of functions, 1, got 2"),
        ([], {}, ValueError, "a function or a list of functions, got an empty list"),
        (Seeded(), {}, TypeError, "create_env_fn must be a function that makes an env, since each"),
        (Seeded, {"frames": 1}, TypeError, "unknown arguments frames: of Collector's arguments, workers accept"),
        (Seeded, {"interruptor": LOCK}, TypeError, "use preemptive_threshold, pause"),
        (Seeded, {"policy": partial(print, file=LOCK)}, TypeError, "^policy cannot be sent to a process"),
        (Seeded, {"postproc": partial(print, file=LOCK)}, TypeError, "^postproc cannot be sent to a process"),
        (partial(Seeded, LOCK), {}, TypeError, "^create_env_fn cannot be sent to a process"),
        (Seeded, {"on_failure": "ignore"}, ValueError, "on_failure must be .*, got 'ignore'"),
        (Seeded, {"max_failures": -1}, ValueError, "max_failures must be an integer of at least 0, got -1"),
        (Seeded, {"slots": 0}, ValueError, "slots must be an integer of at least 1, got 0"),
        (Seeded, {"step_timeout": 0}, ValueError, "step_timeout must be a positive number of seconds"),
        (Seeded, {"step_timeout": "1"}, ValueError, "positive number of seconds or None, got '1'"),
        (Seeded, {"seed": -1}, ValueError, "seed must be an integer of at least 0, or None, got -1"),
        (Seeded, {"seed": "a"}, ValueError, "seed must be an integer of at least 0, or None, got 'a'"),
        (Seeded, {"writer": 2**23 - 1, "num_workers": 2}, ValueError, "writer"),
        (Seeded, {"writer": 1, "track_traj_ids": False}, ValueError, "writer=1 needs track_traj_ids=True"),
        (Seeded, {"trajs_per_batch": 1, "num_workers": 2}, ValueError, "trajs_per_batch=1 is less than one traj"),
        (Seeded, {"trajs_per_batch": 1, "track_traj_ids": False}, ValueError, "trajs_per_batch needs"),
        (Seeded, {"preemptive_threshold": 2}, ValueError, r"a share of the workers in \(0, 1\], got 2"),
        (Seeded, {"preemptive_threshold": "half"}, ValueError, r"a share of the workers in \(0, 1\], got 'half'"),
        (Seeded, {"preemptive_threshold": 0.5, "sync": False}, ValueError, "preemptive_threshold needs sync=True"),
        (Seeded, {"sync": None}, TypeError, "sync must be True or False, got None"),
        (Seeded, {"cat_results": 1}, ValueError, 'cat_results must be 0 or "stack", got 1'),
        (Seeded, {"cat_results": "stack", "sync": False}, ValueError, "which is not possible with sync=False"),
        (Seeded, {"cat_results": "stack", "num_workers": 3}, ValueError, r"10 \(not a multiple of 3 workers\)"),
        (Seeded, {"update_at_each_batch": True}, TypeError, "needs a policy with weights, got NoneType"),
        (Seeded, {"policy_factory": [ItsWeight], "num_workers": 2}, ValueError, "one for each of 2 workers, got 1"),
        (Seeded, {"policy_factory": 3}, TypeError, "policy_factory must be a function that makes a policy, got 3"),
        (Seeded, {"policy": nn.LazyLinear(1)}, TypeError, "call a lazy module once before"),
        (Seeded, {"total_frames": 0}, ValueError, "total_frames must be positive, or -1 for no limit, got 0"),
        (Seeded, {"num_threads": 0}, ValueError, "num_threads must be at least 1, got 0"),
        (Seeded, {"start_method": "thread"}, ValueError, 'start_method must be "fork", "spawn" or None'),
        (Seeded, {"state_stride": 2}, ValueError, "state_stride=2 needs a recurrent policy"),
        (Seeded, {"postproc": lambda batch: None}, TypeError, "postproc returned None"),
        (Seeded, {"postproc": lambda batch: batch.sum()}, TypeError, "a tensordict with a first dimension"),
        (Seeded, {"postproc": lambda batch: batch.set("text", ["a"] * 10)}, TypeError, "column 'text' is not a tensor"),
        ([Seeded, lambda: gym.wrappers.DtypeObservation(Seeded(), np.float64)], {}, ValueError,
         r"the same columns: 'observation' of worker 0 is torch.float32 \[3\], of worker 1 torch.float64 \[3\]"),
    ],
)  # fmt: skip
def test_refusals(env: Any, options: dict[str, Any], error: Any, message: str, nursery: Nursery) -> None:
    given = {"frames_per_batch": 10, "sync": True, "nursery": nursery} | options
    if {"start_method", "num_threads"} & options.keys():
        del given["nursery"]
    count = len(nursery.workers)
    with pytest.raises(error, match=message):
        next(MultiCollector(env, **given))
    assert len(nursery.workers) == count


def test_batches_of_one_worker_each_have_the_same_columns_too(nursery: Nursery) -> None:
    envs = [Seeded, lambda: gym.wrappers.DtypeObservation(Seeded(), np.float64)]
    collector = MultiAsyncCollector(envs, frames_per_batch=10, nursery=nursery)
    with (
        pytest.raises(ValueError, match=r"same columns: 'observation' of worker \d is torch.float"),
        collector,
    ):
        while True:
            collector.rollout()


def test_weights_for_a_policy_without_any(nursery: Nursery) -> None:
    with MultiSyncCollector(
        Seeded, frames_per_batch=4, track_policy_version=True, nursery=nursery
    ) as collector:
        with pytest.raises(TypeError, match=r"the policy, NoneType, is not an nn\.Module: it has no weights"):
            collector.update_policy_weights_({"weight": torch.zeros(1)})
        collector.update_policy_weights_()  # counts
        assert (next(collector)["collector", "policy_version"] == 1).all()


def test_a_copy_is_refused(nursery: Nursery) -> None:
    with MultiSyncCollector(Seeded, frames_per_batch=4, nursery=nursery) as collector:
        for way in (pickle.dumps, copy.deepcopy):
            with pytest.raises(
                TypeError, match=r"a MultiSyncCollector cannot be pickled .* its state_dict\(\)"
            ):
                way(collector)


class Agent:
    def __init__(self) -> None:
        self.net = ItsWeight()

    def act(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs)


def act_with(net: nn.Module, obs: torch.Tensor) -> torch.Tensor:
    acted: torch.Tensor = net(obs)
    return acted


def test_weights_that_an_update_would_not_reach(nursery: Nursery) -> None:
    net = ItsWeight()
    policies: Any = [lambda obs: net(obs), Agent().act, partial(act_with, net), partial(act_with, net=net)]
    for policy in policies[:3]:
        with MultiSyncCollector(Seeded, policy, frames_per_batch=4, nursery=nursery) as collector:
            assert len(next(collector)) == 4  # a policy that stays as it is
            with pytest.raises(TypeError, match=r"uses the module .*ItsWeight\) but is not an nn\.Module"):
                collector.update_policy_weights_()
            assert collector.policy_version == 0
    for policy in (None, len, act_with, Agent):
        refuse_hidden_weights(policy)
    with pytest.raises(TypeError, match="uses the module 'net'"):
        refuse_hidden_weights(policies[3])


def test_a_buffer_that_refuses_rows_says_whose(nursery: Nursery) -> None:
    double = [Seeded, lambda: gym.wrappers.DtypeObservation(Seeded(), np.float64)]
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    with (
        MultiAsyncCollector(double, frames_per_batch=4, replay_buffer=buffer, nursery=nursery) as collector,
        pytest.raises(ValueError, match=r"batch\['observation'\] is torch.float") as caught,
    ):
        while True:
            next(collector)
    assert any("in the rows of worker " in note for note in caught.value.__notes__)


def test_a_buffer_of_running_normalisations_in_workers_warns(nursery: Nursery) -> None:
    def normalized() -> gym.Env[Any, Any]:
        return gym.wrappers.NormalizeObservation(Seeded())

    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    with pytest.warns(
        UserWarning, match="NormalizeObservation scales each row by the statistics of its step"
    ):
        MultiSyncCollector(normalized, frames_per_batch=4, replay_buffer=buffer, nursery=nursery).shutdown()
    MultiSyncCollector(normalized, frames_per_batch=4, nursery=nursery).shutdown()


def test_more_workers_than_cores_is_a_note(nursery: Nursery, caplog: pytest.LogCaptureFixture) -> None:
    count = 2 + len(os.sched_getaffinity(0))
    with MultiAsyncCollector(Seeded, num_workers=count, frames_per_batch=4, nursery=nursery) as collector:
        next(collector)
    assert f"num_workers={count} is more than the {count - 2} cores" in caplog.text
