"""Only the process that made a collector uses it, and ends its workers; several collectors share a nursery."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from worker_envs import Faulty, Seeded, envs

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.rollouts import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from flatroll.sharing import Nursery, WorkerDied, WorkerTraceback

pytestmark = pytest.mark.usefixtures("transport")

BOTH = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


def status_of_child(function: Callable[[], Any]) -> int:
    """The exit status of a forked process that calls this function: 0 after RuntimeError, else 1."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
        except RuntimeError as error:
            status = 0 if "belongs to process" in str(error) else 2
        except SystemExit as error:
            status = int(error.code or 0)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@BOTH
def test_a_forked_child_takes_nothing_and_ends_nobody(sync: bool, nursery: Nursery) -> None:
    with MultiCollector(Seeded, num_workers=2, sync=sync, frames_per_batch=8, nursery=nursery) as collector:
        next(collector)
        uses: list[Callable[[], Any]] = [
            lambda: next(collector),
            collector.rollout,
            lambda: next(iter(collector)),
            collector.update_policy_weights_,
            collector.stats,
            lambda: collector.load_state_dict({}),
            collector.start,
            collector.pause,
        ]
        assert [status_of_child(use) for use in uses] == [0] * len(uses)
        assert status_of_child(collector.shutdown) == 1  # no error: a child that ends a `with` block
        assert status_of_child(lambda: collector._end()) == 1  # as when the interpreter ends
        for _ in range(4):
            assert len(next(collector)) == 8
        assert collector.stats()["failures"] == 0


def test_a_forked_child_leaves_the_thread_alone(nursery: Nursery) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10**5))
    with MultiAsyncCollector(Seeded, frames_per_batch=8, replay_buffer=buffer, nursery=nursery) as collector:
        collector.start()
        assert status_of_child(collector.shutdown) == 1
        count = len(buffer)
        deadline = time.monotonic() + 600
        while len(buffer) < count + 100:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert collector.stats()["running"]


def test_two_collectors_share_a_nursery_and_one_runs_in_a_thread(nursery: Nursery) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10**5))
    with MultiAsyncCollector(
        Seeded, num_workers=2, frames_per_batch=4, replay_buffer=buffer, nursery=nursery
    ) as background:
        background.start()
        for _ in range(10):
            with MultiSyncCollector(envs(2), num_workers=2, frames_per_batch=8, nursery=nursery) as collector:
                assert [len(next(collector)) for _ in range(3)] == [8] * 3
        assert background.stats()["running"]


def leaves() -> None:
    sys.exit(3)


def interrupts() -> None:
    raise KeyboardInterrupt


def closes() -> None:
    raise GeneratorExit


@BOTH
@pytest.mark.parametrize("fault", [leaves, interrupts, closes])
def test_an_env_that_ends_its_program_is_a_dead_worker(sync: bool, fault: Any, nursery: Nursery) -> None:
    with MultiCollector(
        [Seeded, lambda: Faulty(fault)], sync=sync, frames_per_batch=8, nursery=nursery
    ) as collector:
        with pytest.raises(
            WorkerDied, match=r"ended by (SystemExit: 3|KeyboardInterrupt|GeneratorExit)"
        ) as caught:
            while True:
                next(collector)
        assert isinstance(caught.value.__cause__, WorkerTraceback)
        assert f"in {fault.__name__}" in str(caught.value.__cause__)


def test_shutdown_may_be_called_again_after_ctrl_c(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(nursery.workers)
    collector = MultiSyncCollector(Seeded, num_workers=2, frames_per_batch=4, nursery=nursery)
    next(collector)
    with monkeypatch.context() as patch:
        patch.setattr(nursery, "end", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            collector.shutdown()
    assert len(nursery.workers) == count + 2
    collector.shutdown()
    assert len(nursery.workers) == count


def test_in_step_is_the_default(nursery: Nursery) -> None:
    with MultiCollector([Seeded] * 2, frames_per_batch=9, nursery=nursery) as collector:
        assert (next(collector)["collector", "traj_ids"] >> 40).tolist() == [0] * 5 + [1] * 4
