"""`track_policy_version` and `interruptor`: what the rows say of the policy, and batches that end early."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.layout.inspect.audit import audit
from flatroll.rollouts import Collector
from flatroll.wrappers import StepCounter
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv

LENGTHS = [[3, 1, 4], [2, 5], [6]]
VERSION = ("collector", "policy_version")


class Constant(nn.Module):
    """Its action is its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.action = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.action.expand(len(obs))


class Stop:
    """Says True at the chosen askings, counted from 0."""

    def __init__(self, *at: int) -> None:
        self.at, self.asked = at, 0

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked - 1 in self.at


def scripted(mode: Any = "NextStep") -> ScriptedVectorEnv:
    return ScriptedVectorEnv(Script(3, lengths=LENGTHS), autoreset_mode=mode)


def shown(batch: Any) -> list[Any]:
    return batch["observation"].int().tolist()


def in_time(batches: list[Any]) -> dict[int, list[Any]]:
    """The rows of each env over all batches, as (episode, step)."""
    rows: dict[int, list[Any]] = {}
    for batch in batches:
        for env, episode, step in shown(batch):
            rows.setdefault(env, []).append((episode, step))
    return rows


@pytest.mark.parametrize("options", [{}, {"compact_obs": True}, {"set_truncated": True}])
def test_each_row_has_the_version_that_chose_it(options: Any) -> None:
    policy = Constant()
    # Batches of 10 rows of 3 envs leave rows over, which belong to the version before.
    collector = Collector(scripted(), policy, frames_per_batch=10, track_policy_version=True, **options)
    held_over = 0
    for version in range(4):
        batch = next(collector)
        assert batch[VERSION].shape == (10,) and batch[VERSION].dtype is torch.int64
        assert torch.equal(batch[VERSION], batch["action"])
        held_over += int((batch[VERSION] < version).sum())
        policy.action += 1
        collector.update_policy_weights_()
        assert collector.policy_version == version + 1
    assert held_over > 0 and audit(batch) == []


def test_versions_of_whole_trajectories_and_of_torch_envs() -> None:
    policy = Constant()
    env = ScriptedTorchEnv(Script(3, lengths=LENGTHS))
    collector = Collector(env, policy, frames_per_batch=6, trajs_per_batch=3, track_policy_version=True)
    for _ in range(3):
        batch = next(collector)
        assert torch.equal(batch[VERSION], batch["action"])
        policy.action += 1
        collector.policy_version += 1


def test_a_buffer_keeps_the_versions() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=64)
    collector = Collector(
        scripted(), Constant(), frames_per_batch=10, replay_buffer=buffer, track_policy_version=True
    )
    next(collector)
    collector.update_policy_weights_(Constant())
    next(collector)
    assert set(buffer.sample()[VERSION].tolist()) == {0, 1}


def test_the_version_is_saved_and_counts_without_the_column() -> None:
    collector = Collector(scripted(), Constant(), frames_per_batch=10)
    collector.update_policy_weights_(Constant().state_dict())
    with pytest.raises(RuntimeError):
        collector.update_policy_weights_({"other": torch.zeros(())})
    assert collector.policy_version == 1 and VERSION not in next(collector).keys(True)
    resumed = Collector(scripted(), Constant(), frames_per_batch=10, track_policy_version=True)
    resumed.load_state_dict(collector.state_dict())
    assert next(resumed)[VERSION].tolist() == [1] * 10


def test_two_writers_of_the_version_are_refused() -> None:
    with pytest.raises(ValueError, match="track_policy_version"):
        Collector(
            scripted(),
            frames_per_batch=4,
            track_policy_version=True,
            info_keys=[("collector", "policy_version")],
        )


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("at", [(0,), (1,), (2, 7), (0, 1, 2, 3, 4, 5, 6), tuple(range(100))])
def test_an_interrupted_stream_has_the_same_rows(mode: Any, compact: bool, at: Any) -> None:
    whole = list(Collector(scripted(mode), frames_per_batch=10, total_frames=60, seed=0))
    collector = Collector(
        StepCounter(scripted(mode)),
        frames_per_batch=10,
        total_frames=40,
        interruptor=Stop(*at),
        compact_obs=compact,
    )
    batches = []
    for batch in collector:
        assert 1 <= len(batch) <= 10 and audit(batch) == []
        batches.append(batch)
    assert collector.frames == sum(map(len, batches)) >= 40
    assert (min(map(len, batches)) < 10) == (at != (0,))  # there is no row yet when it is asked first
    true = in_time(whole)
    for env, rows in in_time(batches).items():
        assert rows == true[env][: len(rows)]


def test_an_event_stops_a_collection_from_another_thread() -> None:
    event = threading.Event()

    def policy(obs: torch.Tensor) -> torch.Tensor:
        if obs[0, 1] >= 2:  # the second episode of env 0
            event.set()
        return torch.zeros(len(obs), dtype=torch.int64)

    collector = Collector(scripted(), policy, frames_per_batch=10_000, interruptor=event)
    assert 0 < len(next(collector)) < 50
    assert len(next(collector)) in (1, 2, 3)  # still set: what one vector step brings
    event.clear()


def test_an_interruption_yields_the_trajectories_that_are_complete() -> None:
    stop = Stop(*range(12, 40))
    collector = Collector(scripted(), frames_per_batch=6, trajs_per_batch=20, interruptor=stop)
    batch = next(collector)
    ended = int(batch["next", "done"].sum())
    assert 1 <= ended < 20 and len(set(batch["collector", "traj_ids"].tolist())) == ended


@pytest.mark.parametrize("bad", [True, lambda: True, threading.Event])
def test_an_interruptor_that_cannot_be_asked(bad: Any) -> None:
    if bad is threading.Event:
        bad = 1
    with pytest.raises(TypeError, match=r"interruptor must have a method is_set\(\)"):
        Collector(scripted(), frames_per_batch=4, interruptor=bad)
