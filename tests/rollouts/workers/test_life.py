"""How collectors with workers begin, pause, are saved and end."""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import interpreters
import pytest
import torch
from waits import wait_not_in_vain
from worker_envs import Faulty, ItsWeight, Once, Seeded, assert_equal, envs, falls, hangs, stop_myself

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.rollouts import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from flatroll.rollouts.workers.delivery import Tally
from flatroll.rollouts.workers.transport import Note
from flatroll.sharing import Nursery, WorkerDied

pytestmark = pytest.mark.usefixtures("transport")
PROCESSES = pytest.mark.parametrize("transport", ["processes"], indirect=True)

IDS = ("collector", "traj_ids")
BOTH = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@BOTH
def test_a_thread_fills_the_buffer(sync: bool, nursery: Nursery) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=8)
    with MultiCollector(
        envs(2),
        ItsWeight(),
        num_workers=2,
        sync=sync,
        frames_per_batch=9,
        replay_buffer=buffer,
        nursery=nursery,
    ) as collector:
        collector.start()
        with pytest.raises(
            RuntimeError, match=r"the thread of start\(\) is collecting: sample from the replay buffer"
        ):
            next(collector)
        wait_until(lambda: len(buffer) > 50)
        assert buffer.sample().batch_size == (8,)
        collector.update_policy_weights_({"weight": torch.tensor(3.0)})
        with collector.pause():
            count = len(buffer)
            assert count == collector.frames == collector.state_dict()["frames"]
            assert not collector.stats()["running"]
            next(collector)  # goes on from there
            assert len(buffer) == count + 9
        wait_until(lambda: len(buffer) > count + 50)
        assert collector.stats()["running"]
        collector.pause()
        count = len(buffer)
        collector.start()
        # Windows that were made with the weights before may come first.
        wait_until(lambda: len(buffer) > count and bool((buffer[:]["action"] == 3).any()))
    rows = buffer[:]
    for id in rows[IDS].unique():  # nothing was lost
        steps = rows["observation"][rows[IDS] == id][:, 2]
        assert steps.tolist() == list(range(len(steps)))
    assert {0, 3} == set(rows["action"].flatten().tolist())


def test_the_thread_ends_with_the_total(nursery: Nursery) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    with MultiAsyncCollector(
        Seeded, num_workers=2, frames_per_batch=5, total_frames=50, replay_buffer=buffer, nursery=nursery
    ) as collector:
        collector.start()
        wait_until(lambda: not collector.stats()["running"])
        assert len(buffer) == 50
    with (
        MultiAsyncCollector(Seeded, frames_per_batch=5, nursery=nursery) as collector,
        pytest.raises(RuntimeError, match=r"start\(\) collects into a replay buffer: create \w*Collector"),
    ):
        collector.start()


@pytest.mark.parametrize("asked", ["sample", "stats", "shutdown", "extend"])
def test_an_error_in_the_thread_is_told_once(asked: str, nursery: Nursery) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    collector = MultiSyncCollector(
        [Seeded, lambda: Faulty(falls)], frames_per_batch=4, replay_buffer=buffer, nursery=nursery
    )
    collector.start()
    wait_until(lambda: all(thread.name != "collector" for thread in threading.enumerate()))
    uses = {
        "sample": buffer.sample,
        "extend": lambda: buffer.extend(buffer[:]),
        "stats": collector.stats,
        "shutdown": collector.shutdown,
    }
    with pytest.raises(ValueError, match="the robot fell over"):
        uses[asked]()
    collector.shutdown()
    collector.stats()
    assert buffer.sample().batch_size == (4,)
    with pytest.raises(RuntimeError, match="the collector is closed"):
        collector.start()


@BOTH
def test_shutdown(sync: bool, nursery: Nursery, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(nursery.workers)
    for end in ("iterated", "fresh", "threaded", "forgotten"):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10**5)) if end == "threaded" else None
        collector = MultiCollector(
            lambda: Seeded((10**9, 10**9)),
            num_workers=2,
            sync=sync,
            frames_per_batch=10**5 if end == "threaded" else 4,
            trajs_per_batch=2 if end == "threaded" else None,  # so that no window ever comes
            replay_buffer=buffer,
            nursery=nursery,
        )
        assert len(nursery.workers) == count + 2
        if end == "threaded":
            collector.start()
        elif end != "fresh":
            next(collector)
        if end == "forgotten":
            del collector
            gc.collect()
        else:
            workers = nursery.workers[count:]
            with monkeypatch.context() as patch:
                if transport == "processes":
                    patch.setattr("flatroll.sharing.nursery.wait_for_any", wait_not_in_vain)
                # Processes end at their next step. An actor ends after its window, and here it is killed.
                collector.shutdown(timeout=0.1 if transport == "actors" and end == "threaded" else 300)
            if transport == "processes":  # an actor closes its env, and is then killed
                assert [worker.exitcode for worker in workers] == [0, 0]
            wait_until(lambda workers=workers: not any(is_there(worker.pid) for worker in workers))
            collector.async_shutdown()
            assert "state=closed" in repr(collector)
        assert len(nursery.workers) == count


def test_shutdown_does_not_wait_for_a_window_without_end(nursery: Nursery) -> None:
    """Actors that answer beside their work, as step_timeout needs, end at their next step, too."""
    count = len(nursery.workers)
    collector = MultiAsyncCollector(
        lambda: Seeded((10**9, 10**9)),
        frames_per_batch=10**4,
        trajs_per_batch=1,  # so that no window ever comes
        step_timeout=300,
        replay_buffer=ReplayBuffer(storage=LazyTensorStorage(10)),
        nursery=nursery,
    )
    collector.start()
    collector.shutdown(timeout=10**6)
    assert len(nursery.workers) == count


def test_a_thread_that_shutdown_does_not_wait_for_has_no_error_to_tell(nursery: Nursery) -> None:
    """It finds its workers gone, which is what was asked for."""
    collector = MultiAsyncCollector(
        lambda: Seeded((10**9, 10**9)),
        num_workers=2,
        frames_per_batch=10**5,
        trajs_per_batch=2,  # so that no window ever comes
        replay_buffer=ReplayBuffer(storage=LazyTensorStorage(10)),
        nursery=nursery,
    )
    collector.start()
    collector.shutdown(timeout=0)
    collector._supply.stop()  # waits until the thread has found out
    collector.shutdown()


@PROCESSES
def test_a_thread_that_is_late_with_a_batch_replaces_no_worker(nursery: Nursery) -> None:
    """It is still in the buffer when the workers end, and finds them gone."""
    late, go = threading.Event(), threading.Event()

    class Slow:
        def extend(self, batch: Any, final: Any = None) -> None:
            late.set()
            go.wait(600)

    count = len(nursery.workers)
    collector = MultiAsyncCollector(
        Seeded, num_workers=2, frames_per_batch=4, on_failure="replace", replay_buffer=Slow(), nursery=nursery
    )
    collector.start()
    late.wait(600)
    collector.shutdown(timeout=0.1)
    team = collector._supply.gatherer.team
    with pytest.raises(WorkerDied):  # what the thread would find, if it looked once more
        team.events(team.members)
    go.set()
    collector._supply.stop()
    assert len(nursery.workers) == count and team.failures == 1


@pytest.mark.parametrize("fault", [hangs, stop_myself])
def test_shutdown_is_bounded(fault: Any, nursery: Nursery) -> None:
    collector = MultiAsyncCollector(lambda: Faulty(fault), frames_per_batch=2, nursery=nursery)
    pid = nursery.workers[-1].pid
    next(collector)
    collector.shutdown(timeout=0.1)
    wait_until(lambda: not is_there(pid))


@BOTH
def test_ctrl_c_in_a_wait_loses_nothing(sync: bool, nursery: Nursery, tmp_path: Path) -> None:
    owner, pressed = os.getpid(), tmp_path / "pressed"

    def press() -> None:
        os.kill(owner, signal.SIGINT)
        pressed.touch()

    def wait_for_it() -> None:
        while not pressed.exists():
            time.sleep(0.001)

    once = Once(tmp_path / "once", press)
    # No window is full before it is pressed: between two calls of next it would lose what the first one returned.
    with MultiCollector(
        [lambda: Faulty(wait_for_it), lambda: Faulty(once)],
        sync=sync,
        frames_per_batch=40,
        nursery=nursery,
    ) as collector:
        batches = []
        with pytest.raises(KeyboardInterrupt):
            while True:
                batches.append(next(collector))
        batches += [next(collector) for _ in range(3)]
        assert collector.stats()["failures"] == 0
    rows = torch.cat(batches)
    for id in rows[IDS].unique():
        steps = rows["observation"][rows[IDS] == id][:, 2]
        assert steps.tolist() == list(range(len(steps)))


def test_two_runs_with_a_seed_are_bit_equal_and_resumed_ones_are_new(nursery: Nursery) -> None:
    arguments: Any = {
        "num_workers": 2,
        "frames_per_batch": 11,
        "total_frames": 44,
        "seed": 0,
        "nursery": nursery,
    }
    runs = []
    for _ in range(2):
        with MultiSyncCollector(envs(2), ItsWeight(), init_random_frames=30, **arguments) as collector:
            runs.append([next(collector), next(collector)])
            collector.update_policy_weights_({"weight": torch.tensor(2.0)})
            runs[-1] += list(collector)
            assert len(runs[-1]) == 4
    for one, other in zip(*runs, strict=True):
        assert_equal(one, other)
    assert len(set(torch.cat(runs[0])["observation"][:, 0].tolist())) == 44  # the workers differ


@PROCESSES
def test_workers_in_fresh_interpreters() -> None:
    with MultiSyncCollector(
        envs(2), ItsWeight(), frames_per_batch=7, seed=3, start_method="spawn", compact_obs=True
    ) as collector:
        alone = Collector(envs(2), ItsWeight(), frames_per_batch=7, seed=collector.seeds[0], compact_obs=True)
        for _ in range(2):
            assert_equal(next(collector), next(alone))
            assert_equal(collector.final, alone.final)


def test_states(nursery: Nursery, transport: str) -> None:
    arguments: Any = {
        "num_workers": 2,
        "frames_per_batch": 10,
        "total_frames": 60,
        "seed": 0,
        "nursery": nursery,
    }
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    with MultiAsyncCollector(Seeded, ItsWeight(), replay_buffer=buffer, writer=4, **arguments) as collector:
        for _ in range(3):
            next(collector)
            collector.update_policy_weights_({"weight": torch.tensor(4.0)})
            state = collector.state_dict()
        first = collector.seeds
    assert state["frames"] == 30 and state["policy"]["weight"] == 4 and state["policy_version"] == 3
    arguments["seed"] = 7  # that of the state counts
    with MultiAsyncCollector(
        Seeded, ItsWeight(), replay_buffer=buffer, init_random_frames=30, **arguments
    ) as collector:
        collector.load_state_dict(state)  # the rows with random actions are over
        assert collector.frames == 30 and collector.policy_version == 3
        assert not set(first) & set(collector.seeds)
        assert len(list(collector)) == 3 and len(buffer) == 60
        state = collector.state_dict()
        assert state["next_writer"] == 8
        if transport == "processes":
            assert state["seed"] == {"entropy": 0, "n_children_spawned": 4}
        else:
            assert state["seeds_used"] == 4
    rows = buffer[:]
    assert (rows["action"][30:] == 4).all()
    assert not set((rows[IDS][30:] >> 40).tolist()) - {6, 7}


def test_stats_and_repr(nursery: Nursery) -> None:
    with MultiSyncCollector(envs(3), num_workers=2, frames_per_batch=8, nursery=nursery, seed=1) as collector:
        next(collector)
        stats = collector.stats()
        assert stats["frames"] == 8 and stats["failures"] == 0 and stats["waited"] > 0
        for worker in stats["workers"]:
            assert (worker["frames"], worker["windows"]) == (4, 1)
            assert worker["rows_held"] == 2 and worker["waited"] >= 0  # two vector steps of three rows
            assert worker["policy_lag"] == {"min": 0, "mean": 0, "max": 0}
        assert repr(collector).startswith(
            f"{type(collector).__name__}(8 frames, workers=2, policy=random actions"
        )


@PROCESSES
def test_lag_is_counted_over_the_steps_of_windows() -> None:
    tally = Tally()
    for versions, version in (((1, 2.5, 4), 6), (None, 6), ((6, 6.0, 6), 6)):
        tally.count(Note(5, 5, (5,), 2, 0.5, versions), 5, version)
    lag = {"min": 0, "mean": 1.75, "max": 5}
    assert tally.facts() == {"frames": 15, "windows": 3, "rows_held": 2, "waited": 0.5, "policy_lag": lag}


PROGRAM = """
import time
import gymnasium
import numpy as np
from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.rollouts import MultiCollector
from flatroll.sharing import Nursery, WorkerDied

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, **options):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
nursery = Nursery(preload=("flatroll.rollouts",))
collector = MultiCollector(
    lambda: Env(), num_workers=2, sync=False, frames_per_batch=5, replay_buffer=buffer, nursery=nursery
)
collector.start()
while len(buffer) < 100:
    time.sleep(0.01)
print("pids", *(worker.pid for worker in nursery.workers), flush=True)
"""


@PROCESSES
def test_a_program_without_a_guard_that_just_ends(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = interpreters.run([sys.executable, tmp_path / "program.py"])
    assert ran.returncode == 0 and "Error" not in ran.stderr, ran.stderr
    pids = ran.stdout.removeprefix("pids ").split()
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_there, map(int, pids))))
