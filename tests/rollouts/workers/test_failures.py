"""What the owner is told of a worker that fails, and how collection goes on without it or with another."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_workers import kill_workers
from worker_envs import Faulty, Once, Seeded, dies, falls, hangs, is_odd, stop_here

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.rollouts import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from flatroll.rollouts.workers.team import Event, Member, Team
from flatroll.sharing import Nursery, WorkerDied, WorkerTraceback

pytestmark = pytest.mark.usefixtures("transport")

IDS = ("collector", "traj_ids")
BOTH = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


@BOTH
@pytest.mark.parametrize(
    ("fault", "options", "error", "message"),
    [
        (falls, {}, ValueError, "^the robot fell over"),
        (is_odd, {}, RuntimeError, "^Odd: an odd end"),
        (dies, {}, WorkerDied, r"(worker|collector) 1 .*was killed by signal 9"),
        (hangs, {"step_timeout": 0.3}, TimeoutError, r"no step of (worker|collector) 1 .* within step_timeout=0.3"),
        (int, {"post_collect_hook": stop_here}, LookupError, "the hook stops"),
        (int, {"pre_collect_hook": stop_here}, LookupError, "the hook stops"),
        (int, {"postproc": stop_here}, LookupError, "the hook stops"),
        (int, {"policy": stop_here}, LookupError, "the hook stops"),
    ],
    ids=["raises", "odd", "dies", "hangs", "hook", "pre-hook", "postproc", "policy"],
)  # fmt: skip
def test_an_error_says_what_and_where(
    sync: bool,
    fault: Any,
    options: Any,
    error: Any,
    message: str,
    nursery: Nursery,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = Member.idle
    # On a busy machine worker 0, which does not hang, may be late, too.
    monkeypatch.setattr(Member, "idle", lambda member, limit: idle(member, limit) if member.place else 0.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000))
    collector = MultiCollector(
        [Seeded, lambda: Faulty(fault)],
        sync=sync,
        frames_per_batch=4,
        replay_buffer=buffer,
        nursery=nursery,
        **options,
    )
    with pytest.raises(error, match=message) as caught:
        while True:
            next(collector)
    if error not in (WorkerDied, TimeoutError):
        where = stop_here if options else fault
        assert isinstance(caught.value.__cause__, WorkerTraceback)
        assert f"in {where.__name__}" in str(caught.value.__cause__)
        assert any("raised in" in note for note in caught.value.__notes__)
    assert len(buffer) == collector.frames  # what was delivered is kept
    with pytest.raises(RuntimeError, match="the collector is closed"):
        collector.rollout()
    collector.shutdown()


@pytest.mark.parametrize("on_failure", ["raise", "drop", "replace"])
def test_a_collector_that_cannot_be_made_is_an_error(on_failure: Any, nursery: Nursery) -> None:
    count = len(nursery.workers)
    with pytest.raises(ZeroDivisionError, match="division") as caught:
        MultiSyncCollector(
            [Seeded, lambda: 1 // 0], frames_per_batch=4, on_failure=on_failure, nursery=nursery
        )
    assert "lambda" in str(caught.value.__cause__)
    assert len(nursery.workers) == count


@BOTH
@pytest.mark.parametrize("on_failure", ["drop", "replace"])
@pytest.mark.parametrize("whole", [False, True], ids=["rows", "trajectories"])
def test_collection_goes_on(
    sync: bool,
    on_failure: Any,
    whole: bool,
    nursery: Nursery,
    tmp_path: Path,
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once, noticed, failed = Once(tmp_path / "done", falls), tmp_path / "noticed", Team._handle_failure

    def notice(team: Team, *arguments: Any) -> Any:
        noticed.touch()
        return failed(team, *arguments)

    def wait_for_the_failure() -> None:
        while not noticed.exists():
            time.sleep(0.001)

    monkeypatch.setattr(Team, "_handle_failure", notice)
    # Workers that do not wait for one another might else collect all before worker 1 gets that far.
    other = Seeded if sync else lambda: Faulty(wait_for_the_failure)
    with MultiCollector(
        [other, lambda: Faulty(once), other],
        sync=sync,
        frames_per_batch=13,
        total_frames=260,
        on_failure=on_failure,
        trajs_per_batch=3 if whole else None,
        nursery=nursery,
        seed=3,
        writer=5,
    ) as collector:
        first = collector.seeds
        batches = list(collector)
        stats = collector.stats()
        if not whole:
            assert [len(batch) for batch in batches] == [13] * 20 and collector.frames == 260
        assert collector.frames >= 260 and stats["failures"] == 1
        assert (len(set(first + collector.seeds)) == 4) == (on_failure == "replace")
    rows: Any = torch.cat(batches)
    writers = set((rows[IDS] >> 40).tolist())
    assert writers <= {5, 6, 7, 8} and not (8 in writers and on_failure == "drop")
    assert 8 in writers or on_failure == "drop" or not sync  # the others may have been faster
    for id in rows[IDS].unique():
        steps = rows["observation"][rows[IDS] == id][:, 2]
        assert steps.tolist() == list(range(len(steps)))
    assert (
        re.search(r"(worker 1|collector 1 \(writer 6\)) failed and is", caplog.text)
        and "ValueError: the robot fell over" in caplog.text
    )


def test_a_worker_that_fails_again_and_again_is_an_error(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatroll.rollouts.workers.team._WITHIN", 3600.0)  # however slow the system is
    with MultiAsyncCollector(
        lambda: Faulty(falls), frames_per_batch=4, on_failure="replace", max_failures=2, nursery=nursery
    ) as collector:
        with pytest.raises(ValueError, match="the robot fell over") as caught:
            list(collector)
        assert any("3 workers failed within 3600 s" in note for note in caught.value.__notes__)
    with MultiAsyncCollector(
        lambda: Faulty(falls), frames_per_batch=4, on_failure="drop", nursery=nursery
    ) as collector:
        with pytest.raises(ValueError, match="the robot fell over") as caught:
            list(collector)
        assert "it was the last worker" in caught.value.__notes__


@BOTH
def test_a_stopped_worker_is_replaced(sync: bool, nursery: Nursery) -> None:
    with MultiCollector(
        Seeded,
        num_workers=2,
        sync=sync,
        frames_per_batch=4,
        step_timeout=0.4,
        on_failure="replace",
        max_failures=10_000,  # on a busy machine others may be late, too
        slots=1,
        nursery=nursery,
    ) as collector:
        next(collector)
        for worker in nursery.workers[-2:]:
            with suppress(ProcessLookupError):  # one that was late may be gone already
                os.kill(worker.pid, signal.SIGSTOP)
        for _ in range(5):
            next(collector)
        assert collector.stats()["failures"] >= 1


def test_workers_that_stand_in_for_another_need_a_slot_for_each_share(nursery: Nursery) -> None:
    """The slow worker is at its own share when it is asked for that of the one that dies."""
    with MultiSyncCollector(
        [lambda: Faulty(lambda: time.sleep(0.02)), lambda: Faulty(dies)],
        frames_per_batch=24,
        slots=1,
        step_timeout=300,
        on_failure="drop",
        nursery=nursery,
    ) as collector:
        batches = [next(collector) for _ in range(3)]
    assert [len(batch) for batch in batches] == [24] * 3
    rows: Any = torch.cat(batches)
    for id in rows[IDS].unique():
        steps = rows["observation"][rows[IDS] == id][:, 2]
        assert steps.tolist() == list(range(len(steps)))


def test_a_worker_that_waits_for_a_slow_learner_is_not_overdue(
    transport: str, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An actor on a busy node does not say in time for how long its step has run.
    monkeypatch.setattr("flatroll.rollouts.workers.on_ray.actors._PATIENCE", 0)
    with MultiAsyncCollector(
        Seeded, num_workers=3, frames_per_batch=4, slots=1, step_timeout=300, nursery=nursery
    ) as collector:
        gatherer: Any = collector._supply.gatherer
        served: set[int] = set()  # a worker's first window comes in two messages
        while len(served) < 3:
            window: Any = collector.rollout()
            served.add(int(window[IDS][0]) >> 40)
        for _ in range(5):
            next(collector)
            team, here = gatherer.team, {filled.member for filled in gatherer.queue}
            for member in team.members:
                # An actor whose window was taken is asked for the next one at the next call.
                asked = transport == "processes" or member.link.head is not None
                while asked and member not in here | {event.member for event in team.arrived}:
                    team.transport.wait([member.link], None)
                    team.drain([member])  # until its next window is here
                member.since -= 1000  # so slow is the learner
        assert collector.stats()["failures"] == 0


def test_what_a_failed_call_has_received_is_returned_without_a_wait(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MultiCollector([Seeded] * 2, frames_per_batch=4, step_timeout=300, nursery=nursery) as collector:
        supply: Any = collector._supply
        team = supply.gatherer.team
        waits: list[float | None] = []
        monkeypatch.setattr(team.transport, "wait", lambda links, timeout, wake=None: waits.append(timeout))

        event = Event(team.members[0])
        team.arrived.append(event)
        assert team.events(team.members) == [event]
        assert waits == [0.0]


def test_kills_with_replacement(nursery: Nursery) -> None:
    """``python tests/support/kill_workers.py 200`` is the long form."""
    count = len(nursery.workers)
    found = kill_workers(nursery, kills=10)
    assert found["wrong"] == found["segments"] == 0 and found["workers"] == count
    assert found["descriptors"] == 0


class HangsAt:
    """Makes an env that dies in its second episode; call number ``at``, over all processes, hangs instead."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at = folder, at

    def __call__(self) -> Any:
        number = len(list(self.folder.iterdir()))
        (self.folder / str(number)).touch()
        if number == self.at:
            hangs()
        return Faulty(dies) if number == 0 else Seeded()


def test_a_replacement_that_hangs_while_its_env_is_made(
    tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = Member.idle

    def idle_while_it_hangs(member: Member, limit: float) -> float:
        """On a busy machine others, which do not hang, may be late, too."""
        hangs_now = member.writer == 1 and (tmp_path / "1").exists()
        return idle(member, limit) if hangs_now else 0.0

    monkeypatch.setattr(Member, "idle", idle_while_it_hangs)
    with MultiAsyncCollector(
        HangsAt(tmp_path, at=1), frames_per_batch=4, start_timeout=1, on_failure="replace", nursery=nursery
    ) as collector:
        while collector.stats()["failures"] < 2:
            next(collector)
        assert len(next(collector)) == 4


def test_step_timeout_holds_for_the_env_of_a_replacement(nursery: Nursery, tmp_path: Path) -> None:
    with (
        MultiSyncCollector(
            HangsAt(tmp_path, at=1), frames_per_batch=4, step_timeout=1, on_failure="replace", max_failures=1,
            start_timeout=None, nursery=nursery,
        ) as collector,
        pytest.raises(TimeoutError, match=r"did not make its env within 1 s|within start_timeout=1 s"),
    ):  # fmt: skip
        while True:
            next(collector)


def test_an_env_that_hangs_while_it_is_made_is_an_error(nursery: Nursery) -> None:
    count = len(nursery.workers)
    with pytest.raises(TimeoutError, match=r"did not make its env within 0.5 s|within start_timeout=0.5 s"):
        MultiSyncCollector(
            hangs, frames_per_batch=4, start_timeout=0.5, on_failure="replace", nursery=nursery
        )
    assert len(nursery.workers) == count
