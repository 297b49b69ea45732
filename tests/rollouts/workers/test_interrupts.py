"""Ctrl-C in whatever a collector with workers is at loses no row and doubles none: the next batch goes on."""

import signal
from typing import Any

import pytest
import torch
from fake_ray import FakeRay
from worker_envs import Seeded

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.rollouts import MultiCollector, RayCollector
from flatroll.sharing import Nursery

IDS = ("collector", "traj_ids")
BOTH = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


def assert_no_gaps(rows: Any) -> None:
    for id in rows[IDS].unique():
        steps = rows["observation"][rows[IDS] == id][:, 2]
        assert steps.tolist() == list(range(len(steps)))


class Presses:
    """A buffer in whose `extend` Ctrl-C is pressed, or which raises KeyboardInterrupt before it stores anything."""

    def __init__(self, copies_rows: bool) -> None:
        self.rows: list[Any] = []
        self.copies_rows, self.calls = copies_rows, 0

    def extend(self, batch: Any, final: Any = None) -> None:
        self.calls += 1
        if self.calls % 5 == 0:
            raise KeyboardInterrupt
        self.rows.append(batch.clone())
        if self.calls % 3 == 0:
            signal.raise_signal(signal.SIGINT)
            self.rows[-1] = self.rows[-1].clone()  # goes on after Ctrl-C


@BOTH
@pytest.mark.parametrize("copies", [True, False], ids=["from windows", "batches"])
@pytest.mark.usefixtures("transport")
def test_in_extend(sync: bool, copies: bool, nursery: Nursery) -> None:
    buffer, interrupts, batches = Presses(copies), 0, 0
    with MultiCollector(
        Seeded,
        num_workers=2,
        sync=sync,
        frames_per_batch=12,
        total_frames=240,
        replay_buffer=buffer,
        nursery=nursery,
    ) as collector:
        while True:
            try:
                next(collector)
                batches += 1
            except KeyboardInterrupt:
                interrupts += 1
            except StopIteration:
                break
    rows = torch.cat(buffer.rows)
    assert batches == 20 and len(rows) == 240 and interrupts >= 8
    assert_no_gaps(rows)


@BOTH
@pytest.mark.parametrize("place", ["get", "wait", "unpack", "join", "batch"])
def test_in_each_step_of_a_batch_from_actors(sync: bool, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def pressed(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] % 4 == 0:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    fake: Any = FakeRay()
    with RayCollector(
        Seeded, num_collectors=3, sync=sync, frames_per_batch=12, total_frames=240, calls=fake
    ) as collector:
        if place in ("get", "wait"):
            monkeypatch.setattr(fake, place, pressed(getattr(fake, place)))
        module = {
            "unpack": "on_ray.actors.unpack_batches",
            "join": "delivery._join_tables",
            "batch": "delivery.nest",
        }.get(place)
        if module is not None:
            name = f"flatroll.rollouts.workers.{module}"
            owner, _, attribute = name.rpartition(".")
            function = getattr(__import__(owner, fromlist=["x"]), attribute)
            monkeypatch.setattr(name, pressed(function))
        batches, interrupts = [], 0
        while len(batches) < 20:
            try:
                batches.append(next(collector))
            except KeyboardInterrupt:
                interrupts += 1
        monkeypatch.undo()
    assert interrupts >= 4 and [len(batch) for batch in batches] == [12] * 20
    assert_no_gaps(torch.cat(batches))


def test_the_thread_of_start_is_not_interrupted(nursery: Nursery) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10**5))
    with MultiCollector(
        Seeded, sync=False, frames_per_batch=8, total_frames=400, replay_buffer=buffer, nursery=nursery
    ) as collector:
        collector.start()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with collector.pause():
            pass
        while collector.stats()["running"]:
            nursery.wait([], 0.01)
        assert len(buffer) == 400
