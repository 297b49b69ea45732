"""`Processes`: workers are local processes; rows and weights are in shared memory."""

import logging
import os
import selectors
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any, Literal

from torch import Tensor

from flatroll.rollouts.workers.transport import END, READY, WINDOW, Job, Wake
from flatroll.rollouts.workers.worker import Signals, WindowMaker
from flatroll.sharing.channel import Channel
from flatroll.sharing.mailbox import Inbox, Outbox
from flatroll.sharing.nursery import Nursery, Worker, need_descriptors
from flatroll.sharing.weights import SharedWeights

_LOG = logging.getLogger("flatroll.rollouts")
_GO = "collect"  # message kind of requests by the owner
_DESCRIPTORS = 5  # per worker: its channel, report, signals and mailbox blocks


def work(
    channel: Channel,
    *,
    job: Job,
    signals: Signals,
    weights: SharedWeights,
    first_version: int,
    create_env_fn: Any,
    policy: Any,
    policy_factory: Any,
    **options: Any,
) -> None:
    """Make a window per request (``job.sync``) or windows continuously, until the owner closes the channel."""
    parts = {"create_env_fn": create_env_fn, "policy": policy, "policy_factory": policy_factory}
    maker = WindowMaker(replace(job, **parts, options=options), signals, weights, first_version)

    with maker.collector:
        channel.send(READY, maker.ready())
        outbox = Outbox(channel, job.slots)

        waited = 0.0
        going = False
        asked = 0
        while True:
            began = monotonic()
            channel.feed()
            if going:
                request = channel.pop(_GO)
            else:
                request = (_GO, channel.receive(_GO))

            waited += monotonic() - began
            if request is not None:
                maker.ask(*request[1])
                asked += 1

            note, tables = maker.make(waited)
            going = not job.sync and bool(tables)
            if tables:
                began = monotonic()
                outbox.put(*tables, note=note)
                waited += monotonic() - began
            else:
                channel.send(END, (asked, note))


class Processes:
    """The transport of `MultiCollector`.

    Args:
        workers: number of workers.
        nursery: the process that starts them; it stays open. Default: a new one.
        start_method, num_threads: options of a new nursery.

    Raises:
        OSError: the limit of open files is too low.
    """

    makes_policies = False
    writers_of_each = 1

    def __init__(
        self,
        workers: int,
        nursery: Nursery | None = None,
        start_method: Literal["fork", "spawn"] | None = None,
        num_threads: int = 1,
    ) -> None:
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        else:
            cores = os.cpu_count() or 1

        if workers > cores:
            _LOG.warning(
                "num_workers=%d is more than the %d cores that this process may use: workers will wait for each other",
                workers,
                cores,
            )

        need_descriptors(workers * _DESCRIPTORS)
        self._owns_nursery = nursery is None
        self.nursery = nursery or Nursery(
            start_method, preload=("flatroll.rollouts",), num_threads=num_threads
        )
        self._first_version = 0
        self._selector = selectors.DefaultSelector()

        #: What is registered there; None if unknown, after an interrupt or the end of a worker.
        self._watched: set[Process | Wake] | None = set()

    def share(self, state: Mapping[str, Tensor]) -> None:
        self.nursery.prepare()  # Ctrl-C interrupts this wait
        self._weights = SharedWeights(state)

    @property
    def version(self) -> int:
        return self._weights.version + self._first_version

    @version.setter
    def version(self, version: int) -> None:
        self._first_version = version - self._weights.version

    def publish(self, state: Mapping[str, Tensor]) -> None:
        self._weights.publish(state)

    def fetch_into(self, state: Mapping[str, Tensor]) -> None:
        self._weights.fetch_into(state)

    def start(self, job: Job) -> "Process":
        signals = Signals()
        worker = self.nursery.start(
            work,
            name=f"worker {job.place}",
            job=job.without_parts(),
            create_env_fn=job.create_env_fn,
            policy=job.policy,
            policy_factory=job.policy_factory,
            **job.options,
            signals=signals,
            weights=self._weights,
            first_version=self._first_version,
        )

        return Process(worker, signals, job.sync)

    def wait(self, links: "Sequence[Process]", timeout: float | None, wake: Wake | None = None) -> None:
        unread = [link for link in links if link.worker.has_unread()]
        for each in unread:
            each.is_ready = True
        if unread:
            return

        watched: set[Process | Wake] = {*links}
        if wake is not None:
            watched.add(wake)
        self._watch(watched)

        for key, _ in self._selector.select(timeout):
            link: Process | None = key.data
            if link is None:
                continue

            if link.worker.channel.ended and key.fileobj is link.worker.channel:
                self._selector.unregister(
                    link.worker.channel
                )  # always readable; the helper reports how it ended
            else:
                link.is_ready = True

    def _watch(self, wanted: "set[Process | Wake]") -> None:
        """Register these workers, which stay registered: a wait for 512 of them is then one system call."""
        watched = self._watched
        self._watched = None
        if watched is None:
            self._selector.close()
            self._selector = selectors.DefaultSelector()
            watched = set()

        known = self._selector.get_map()
        for gone in watched - wanted:
            old = [gone.worker.channel, gone.worker.report] if isinstance(gone, Process) else [gone]
            for source in old:
                if source in known:
                    self._selector.unregister(source)

        for new in wanted - watched:
            if isinstance(new, Process):
                for channel in new.worker.sources():
                    self._selector.register(channel, selectors.EVENT_READ, new)
            else:
                self._selector.register(new, selectors.EVENT_READ)

        self._watched = wanted

    def end(self, links: "Sequence[Process]", timeout: float) -> None:
        self._watched = None  # descriptors that are closed now may come back as other files
        for link in links:
            link.signals.stop()
        self.nursery.end([link.worker for link in links], timeout)

    def close(self) -> None:
        self._selector.close()
        if self._owns_nursery:
            self.nursery.close(0)


class Process:
    """A worker in another process."""

    def __init__(self, worker: Worker, signals: Signals, sync: bool) -> None:
        self.worker = worker
        self.signals = signals
        self.name = worker.name
        self._inbox = Inbox(worker.channel)
        self._sync = sync
        self._asked = 0  # number of cuts

        #: Whether to read its channel, since the last wait found something there: each look is a system call.
        self.is_ready = True

    def __str__(self) -> str:
        return f"{self.name} (pid {self.worker.pid})"

    def ask(self, rows: int, limit: int) -> None:
        self._asked += 1
        self.worker.send(_GO, (rows, limit))

    def go_on(self, windows: int) -> None:
        """Do nothing: the worker continues while it has a free slot."""

    def cut(self) -> None:
        self.signals.cut(self._asked)

    def receive(self) -> tuple[str, Any] | None:
        while self.is_ready:
            if not self.worker.has_news():
                self.is_ready = False
                break

            kind, content = self.worker.receive()
            self.is_ready = self.worker.has_unread()
            if kind == READY:
                return kind, content
            if kind == END:
                number, note = content
                if self._sync or number == self._asked:  # otherwise the END belongs to an earlier request
                    return kind, note
                continue
            if (window := self._inbox.open(kind, content)) is not None:
                return WINDOW, window

        return None

    def quiet(self, since: float, limit: float) -> float:
        beat = float(self.signals.beat[0])
        if beat == inf:
            last = since
        else:
            last = beat
        return monotonic() - last

    def not_ready(self, limit: float) -> str:
        return f"{self} did not make its env within {limit:g} s: it was killed"

    def kill(self) -> None:
        self.worker.kill()
