"""`Team`: the workers of a collector as their owner sees them: what they deliver, and what is done when one fails."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, Literal

from flatroll.rollouts.workers.messages import END, READY, Note, Signals
from flatroll.sharing.mailbox import Inbox, Window
from flatroll.sharing.nursery import Nursery, Worker
from flatroll.sharing.worker import WorkerDied, WorkerTraceback

_LOG = logging.getLogger("flatroll.rollouts")
_WITHIN = 60.0  # seconds in which max_failures are counted


@dataclass(eq=False)
class Member:
    """One worker: at ``place`` i of the team, with its number in trajectory ids."""

    place: int
    writer: int
    worker: Worker
    inbox: Inbox
    signals: Signals
    ready: bool = False  # its collector is made
    frames: int = 0  # rows that it had collected when last heard of
    windows: int = 0  # that it was asked for
    told: int | None = None  # up to how many rows it was last told to collect; -1: without end
    ended: bool = False  # it has done so
    overdue: TimeoutError | None = None  # why it was killed
    since: float = 0.0  # when it last had nothing to do, or was heard of; inf while it waits for the owner

    def idle(self) -> float:
        """Seconds since it began the step under way, or was given something to do; 0 while it makes its collector."""
        beat = self.signals.beat[0]
        return monotonic() - float(self.since if beat == inf else beat) if self.ready else 0.0


@dataclass(frozen=True)
class Event:
    """What came from a member: a window; none, it has collected all; or it was lost, and who follows it, if any."""

    member: Member
    window: Window | None = None
    fresh: int = 0  # rows that it has collected since it was last heard of
    lost: bool = False
    successor: Member | None = None


class Team:
    """Workers that are started alike; see `MultiCollector` for what the arguments mean.

    Args:
        launch: starts the worker of a place, with a writer number and signals.
        nursery: that starts them.
        count: W.
        first_writer: number of worker 0 in trajectory ids; each further one, replacements included, has the next.
    """

    def __init__(
        self,
        launch: Callable[[int, int, Signals], Worker],
        nursery: Nursery,
        count: int,
        *,
        first_writer: int,
        with_ids: bool,
        on_failure: Literal["raise", "drop", "replace"],
        max_failures: int,
        step_timeout: float | None,
    ) -> None:
        self._launch, self._nursery, self._with_ids = launch, nursery, with_ids
        self._on_failure, self._max_failures, self._step_timeout = on_failure, max_failures, step_timeout
        self.next_writer = first_writer
        self._failed_at: list[float] = []
        #: How many workers have failed so far.
        self.failures = 0
        #: Seconds that the owner has waited for workers.
        self.waited = 0.0
        self.returns_key: Any = None  # of episodes' returns, if the envs count them
        self.members: list[Member] = []
        self._begun = False
        try:
            for place in range(count):
                self.members.append(self._start(place))
            while missing := [member for member in self.members if not member.ready]:
                self._listen(missing, None)
            self._begun = True
        except BaseException:
            self.end(0)
            raise

    def _start(self, place: int) -> Member:
        signals = Signals()
        writer = self.next_writer if self._with_ids else 0
        self.next_writer += 1
        worker = self._launch(place, writer, signals)
        return Member(place, writer, worker, Inbox(worker.channel), signals)

    def events(
        self, waiting: Sequence[Member], wake: Any = None, timeout: float | None = None
    ) -> list[Event]:
        """Wait until one of these members has delivered something or failed, and return what there is.

        Args:
            waiting: the members to wait for.
            wake: a `Wake`, which ends the wait. Default None: nothing does.
            timeout: seconds to wait at most. Default: without end, as long as each step ends within ``step_timeout``.

        Raises:
            BaseException: what a worker raised, or `WorkerDied`, or TimeoutError, unless workers that fail are dropped
                or replaced.
        """
        while True:
            events = self._listen(waiting, self._time_left(waiting) if timeout is None else timeout, wake)
            if events or timeout is not None or (wake is not None and wake.is_set()):
                return events

    def _listen(self, waiting: Sequence[Member], seconds: float | None, wake: Any = None) -> list[Event]:
        """Wait once, and return what has come, which may be nothing."""
        began = monotonic()
        by_worker = {member.worker: member for member in waiting}
        ready = self._nursery.wait(by_worker, seconds, also=() if wake is None else (wake,))
        self.waited += monotonic() - began
        events = [event for worker in ready for event in self._hear(by_worker[worker])]
        for worker in by_worker.keys() - set(ready) if self._step_timeout is not None else ():
            self._check_time(by_worker[worker])
        return events

    def _time_left(self, waiting: Sequence[Member]) -> float | None:
        """Seconds until a step may be overdue."""
        limit = self._step_timeout
        if limit is None:
            return None
        return max(
            0.0, min((limit - member.idle() for member in waiting if not member.overdue), default=limit)
        )

    def _check_time(self, member: Member) -> None:
        """Kill a member from which nothing is there, and that has not ended a step in time."""
        limit, worker = self._step_timeout, member.worker
        if limit is not None and member.overdue is None and member.idle() >= limit:
            member.overdue = TimeoutError(
                f"no step of {worker.name} (pid {worker.pid}) ended within step_timeout={limit} s: it was killed"
            )
            worker.kill()

    def _hear(self, member: Member) -> list[Event]:
        """All that a member has sent; its failure comes after it."""
        events: list[Event] = []
        member.since = monotonic()
        while member.worker.has_news():
            try:
                kind, content = member.worker.receive()
            except BaseException as error:
                if not isinstance(error, WorkerDied) and not isinstance(error.__cause__, WorkerTraceback):
                    raise  # not the worker's
                return [*events, self._failed(member, error)]
            if kind == READY:
                member.ready, self.returns_key = True, content
            elif kind == END:
                events.append(Event(member, fresh=self._count(member, content)))
            elif (window := member.inbox.open(kind, content)) is not None:
                events.append(Event(member, window, self._count(member, window.note)))
        return events

    @staticmethod
    def _count(member: Member, note: Note) -> int:
        fresh, member.frames = note.frames - member.frames, note.frames
        return fresh

    def _failed(self, member: Member, error: BaseException) -> Event:
        """Go on without it, or with another in its place; or raise the error."""
        self._nursery.end([member.worker], timeout=0)
        now = monotonic()
        self.failures += 1
        self._failed_at = [*(at for at in self._failed_at if now - at < _WITHIN), now]
        if member.overdue is not None:
            error = member.overdue
        if self._on_failure == "raise" or not (
            member.ready or (self._begun and isinstance(error, WorkerDied))
        ):
            raise error  # what cannot even be made would fail again and again
        if len(self._failed_at) > self._max_failures:
            error.add_note(
                f"{len(self._failed_at)} workers failed within {_WITHIN:.0f} s, more than max_failures="
                f"{self._max_failures}"
            )
            raise error
        at = self.members.index(member)
        if self._on_failure == "drop":
            del self.members[at]
            if not self.members:
                error.add_note("it was the last worker")
                raise error
            successor = None
        else:
            successor = self.members[at] = self._start(member.place)
        _LOG.warning(
            "%s failed and is %s: %s: %s",
            member.worker.name,
            "dropped" if successor is None else f"replaced by pid {successor.worker.pid}",
            type(error).__name__,
            str(error),  # the error itself would keep the worker's memory, where records of the log are kept
        )
        return Event(member, lost=True, successor=successor)

    def end(self, timeout: float) -> None:
        """End all workers, at their next step; kill those that are left after ``timeout`` seconds."""
        for member in self.members:
            member.signals.stop()
        self._nursery.end([member.worker for member in self.members], timeout)
