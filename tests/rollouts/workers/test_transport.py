"""The owner of workers needs nothing but the protocol of a transport: here is one that is only a queue."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from worker_envs import ItsWeight, assert_equal, envs

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.rollouts import Collector, MultiCollector
from flatroll.rollouts.workers.processes import Process
from flatroll.rollouts.workers.transport import (
    END,
    READY,
    WINDOW,
    Job,
    Link,
    LocalWindow,
    Note,
    Ready,
    Transport,
    Wake,
)
from flatroll.rollouts.workers.worker import Signals
from flatroll.sharing import WorkerDied


class QueueLink:
    """A worker that collects in this process as soon as it is asked, and queues what it made."""

    def __init__(self, job: Job) -> None:
        self.name, self._sync, self.dies = f"queue {job.place}", job.sync, False
        self.collector = Collector(
            job.create_env_fn,
            job.policy,
            frames_per_batch=job.frames_per_batch,
            writer=job.writer,
            seed=job.seed,
            **job.options,
        )
        self._queue: deque[tuple[str, Any]] = deque([(READY, Ready(None, 0))])

    def ask(self, rows: int, limit: int) -> None:
        self.collector.frames_per_batch, self.collector.total_frames = rows, limit
        if self._sync:
            self._make()

    def go_on(self, windows: int) -> None:
        if not self._queue:
            self._make()

    def _make(self) -> None:
        batch = next(self.collector, None)
        count = 0 if batch is None else len(batch)
        note = Note(self.collector.frames, count, (count,), self.collector.rows_held, 0.0, None)
        self._queue.append(
            (END, note) if batch is None else (WINDOW, LocalWindow([dict(batch.items(True, True))], note))
        )

    def receive(self) -> tuple[str, Any] | None:
        if self.dies:
            raise WorkerDied(f"{self.name} is gone")
        return self._queue.popleft() if self._queue else None

    def cut(self) -> None: ...

    def quiet(self, since: float, limit: float) -> float:
        return 0.0

    def not_ready(self, limit: float) -> str:
        return f"{self.name} was not ready"

    def kill(self) -> None: ...


class Queues:
    makes_policies, writers_of_each, version = False, 1, 0

    def __init__(self) -> None:
        self.links: list[QueueLink] = []
        self.closed = 0

    def share(self, state: Mapping[str, torch.Tensor]) -> None: ...

    def publish(self, state: Mapping[str, torch.Tensor]) -> None:
        self.version += 1  # the policy is the owner's own

    def fetch_into(self, state: Mapping[str, torch.Tensor]) -> None: ...

    def start(self, job: Job) -> Link:
        self.links.append(QueueLink(job))
        return self.links[-1]

    def wait(self, links: Sequence[Any], timeout: float | None, wake: Wake | None = None) -> None: ...

    def end(self, links: Sequence[Any], timeout: float) -> None:
        for link in links:
            link.collector.shutdown()

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_a_transport_may_be_a_queue(sync: bool) -> None:
    queues: Transport = Queues()
    with MultiCollector(
        [envs(2), envs(3)],
        ItsWeight(),
        sync=sync,
        frames_per_batch=20,
        total_frames=120,
        seed=3,
        transport=queues,
    ) as collector:
        alone = [
            Collector(envs(2 + i), ItsWeight(), frames_per_batch=10 if sync else 20, seed=seed, writer=i)
            for i, seed in enumerate(collector.seeds)
        ]
        for batch in collector:
            if sync:
                assert_equal(batch, torch.cat([next(each) for each in alone]))
            else:
                assert_equal(batch, next(alone[int(batch["collector", "traj_ids"][0]) >> 40]))
        assert collector.frames == 120
        collector.update_policy_weights_()
        assert collector.policy_version == 1
    assert isinstance(queues, Queues) and queues.closed


def test_workers_of_a_queue_are_replaced_and_fill_a_buffer() -> None:
    queues, buffer = Queues(), ReplayBuffer(storage=LazyTensorStorage(1000))
    with MultiCollector(
        envs(1), num_workers=2, frames_per_batch=8, total_frames=80, transport=queues, replay_buffer=buffer,
        on_failure="replace",
    ) as collector:  # fmt: skip
        next(collector)
        queues.links[1].dies = True
        collector.start()
        while collector.stats()["running"]:
            pass
        assert collector.stats()["failures"] == 1
    assert len(buffer) == 80 and (buffer[:]["collector", "traj_ids"] >> 40).unique().tolist() == [0, 1, 2]


class Told:
    """A worker that has sent these messages."""

    name, channel = "worker 0", None

    def __init__(self, *messages: tuple[str, Any]) -> None:
        self.messages = list(messages)

    def send(self, kind: str, content: Any) -> None:
        """Take a request."""

    def has_news(self) -> bool:
        return bool(self.messages)

    has_unread = has_news

    def receive(self) -> tuple[str, Any]:
        return self.messages.pop(0)


def test_the_end_of_an_earlier_request_is_left_out() -> None:
    """A total may be raised while the worker says that it has collected the old one."""
    worker: Any = Told((END, (1, "old")), (END, (2, "new")))
    link = Process(worker, Signals(), sync=False)
    link.ask(20, 40)
    link.ask(20, 400)
    assert link.receive() == (END, "new")
    assert link.receive() is None
    worker.messages = [(END, (1, "first")), (END, (2, "second"))]
    both = Process(worker, Signals(), sync=True)  # each request has an answer of its own
    both.ask(20, 40)
    both.ask(20, 40)
    assert [both.receive(), both.receive()] == [(END, "first"), (END, "second")]
