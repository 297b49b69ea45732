"""`Team`: the workers of a collector: receives their windows and handles failures."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from time import monotonic
from types import FrameType
from typing import Any

import numpy as np

from flatroll.layout.checks import check_writer_number
from flatroll.rollouts.workers.options import Plan
from flatroll.rollouts.workers.transport import END, READY, Job, Link, Note, Transport, Wake, WorkerWindow
from flatroll.sharing.worker import WorkerDied, WorkerTraceback

_LOG = logging.getLogger("flatroll.rollouts")
_WITHIN = 60.0  # period in seconds over which max_failures are counted


class Interrupts:
    """Context manager that delays Ctrl-C while rows are being handled, so that none is lost.

    KeyboardInterrupt is raised at its end, in waits inside `allow`, or at once when Ctrl-C is pressed again. It
    does nothing outside the main thread, where Python raises no KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None  # the previous handler
        self._waiting = self._pressed = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                self._pressed = False
                signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if (self._waiting or self._pressed) and self._handler is not None:
            self._handler(number, frame)
        self._pressed = True

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Allow Ctrl-C during a wait in which nothing is lost."""
        self._waiting = True  # set before the check, so that no signal arrives between check and wait
        try:
            self._raise_if_pressed()
            yield
        finally:
            self._waiting = False

    def _raise_if_pressed(self) -> None:
        if self._pressed and self._handler is not None:
            self._pressed = False
            self._handler(signal.SIGINT, None)

    def __exit__(self, kind: object, *_: object) -> None:
        if self._handler is not None:
            handler = self._handler
            pressed = self._pressed
            self._handler = None
            self._pressed = False
            signal.signal(signal.SIGINT, handler)
            if pressed and kind is None:
                handler(signal.SIGINT, None)


@dataclass(eq=False)
class Member:
    """A worker: its ``place`` i in the team and its number in trajectory ids."""

    place: int
    writer: int
    link: Link
    limit: float | None  # time limit in seconds for creating its collector
    since: float  # time of its start, last idle moment or last message; inf while it waits for the owner
    ready: bool = False  # its collector exists
    frames: int = 0  # rows collected at its last message
    row_limit: int | None = None  # row limit of its last request; -1: none
    ended: bool = False  # it has reached its limit
    overdue: TimeoutError | None = None  # why it was killed

    def idle(self, limit: float) -> float:
        """Return the seconds since its current step or idle time began, or since its start if it has no collector."""
        if self.ready:
            return self.link.quiet(self.since, limit)
        return monotonic() - self.since

    def ask(self, rows: int, limit: int) -> None:
        """Request windows, see `Link.ask`."""
        self.since = monotonic()
        self.link.ask(rows, limit)


@dataclass(frozen=True)
class Event:
    """A message from a member: a window, or none if it has finished; or its loss, with its replacement, if any."""

    member: Member
    note: Note | None = None
    window: WorkerWindow | None = None
    fresh: int = 0  # rows collected since its last message
    lost: bool = False
    successor: Member | None = None


class Team:
    """A team of workers; see `MultiCollector` for the arguments.

    Args:
        transport: starts the workers.
        jobs: the job of each place; each worker gets its own writer number and seed.
        plan: what to do about failures, and limits of time.
        first_writer: number of worker 0 in trajectory ids; further workers and replacements get the next ones.
        writers: numbers that each worker uses, 0 without ids.
        seeds: the seed sequence; each worker uses the next child.
        frames: rows collected before.
        interrupts: allows Ctrl-C while the owner waits.
    """

    def __init__(
        self,
        transport: Transport,
        jobs: Sequence[Job],
        plan: Plan,
        *,
        first_writer: int,
        writers: int,
        seeds: np.random.SeedSequence,
        frames: int,
        interrupts: Interrupts,
    ) -> None:
        options = plan.options
        self.transport = transport
        self._jobs = jobs
        self._writers = writers
        self._on_failure = options.on_failure
        self._max_failures = options.max_failures
        self._step_timeout = options.step_timeout
        self._start_timeout = plan.start_timeout
        self._seed_sequence = seeds
        self._random_frames = options.init_random_frames or 0
        self._interrupts = interrupts
        self.next_writer = first_writer

        #: Rows collected in all windows delivered so far.
        self.frames = frames
        #: The seed of the last worker started at each place, and the number of workers started.
        self.seeds = [0] * len(jobs)
        self.started = 0
        self._failed_at: list[float] = []

        #: Number of failed workers.
        self.failures = 0
        #: Seconds the owner has waited for workers.
        self.waited = 0.0
        self.returns_key: Any = None  # key of the episode returns, if the envs record them
        self.scaled = False  # whether running statistics normalise the envs' observations

        self.members: list[Member] = []

        #: Events not yet returned.
        self.arrived: list[Event] = []
        self._begun = False
        try:
            for place in range(len(jobs)):
                self.members.append(self._start(place))
            while waiting := [member for member in self.members if not member.ready]:
                self._listen(waiting, self._time_left(waiting))
            self.arrived.clear()  # events of replacements, which have no request yet
            self._begun = True
        except BaseException:
            self.end(0)
            raise

    def _start(self, place: int) -> Member:
        writer = check_writer_number(self.next_writer) if self._writers else 0
        self.next_writer += self._writers
        (child,) = self._seed_sequence.spawn(1)
        self.seeds[place] = int(child.generate_state(1)[0] >> 1)
        self.started += 1

        job = replace(
            self._jobs[place],
            writer=writer,
            seed=self.seeds[place],
            # its share of the remaining random rows, rounded up
            init_random_frames=ceil(max(0, self._random_frames - self.frames) / len(self._jobs)),
        )

        limit = self._start_timeout
        if limit is None and self._begun:
            limit = self._step_timeout  # while others wait for a replacement
        return Member(place, writer, self.transport.start(job), limit, monotonic())

    def events(
        self, waiting: Sequence[Member], wake: Wake | None = None, timeout: float | None = None
    ) -> list[Event]:
        """Wait until one of these members delivers something or fails, and return all events.

        Args:
            waiting: the members to wait for.
            wake: ends the wait once it is set. Default None.
            timeout: maximum wait in seconds. Default: no limit, as long as each step ends within ``step_timeout``.

        Raises:
            Exception: a worker's error, `WorkerDied` or TimeoutError, unless failed workers are dropped or replaced.
        """
        waiting = list(dict.fromkeys(waiting))  # a member may have requests for several windows
        while True:
            seconds = timeout
            if self.arrived:
                seconds = 0.0  # a call that ended in an error has left them
            elif timeout is None:
                seconds = self._time_left(waiting)
            self._listen(waiting, seconds, wake)

            if self.arrived or timeout is not None or (wake is not None and wake.is_set()):
                events = self.arrived
                self.arrived = []
                return events

    def _listen(self, waiting: Sequence[Member], seconds: float | None, wake: Wake | None = None) -> None:
        """Read messages, waiting once if there are none."""
        if not self.drain(waiting):
            began = monotonic()
            with self._interrupts.allow():
                self.transport.wait([member.link for member in waiting], seconds, wake)
            self.waited += monotonic() - began
            self.drain(waiting)

        # An unread message, for example after Ctrl-C in a wait, was in time, however long ago it arrived.
        here = {event.member for event in self.arrived}

        for member in waiting:
            if member not in here:
                self._check_time(member)

    def _time_left(self, waiting: Sequence[Member]) -> float | None:
        """Return the seconds until a step or the creation of an env may be overdue."""
        left = [
            limit - member.idle(limit)
            for member in waiting
            if (limit := self._limit(member)) is not None and not member.overdue
        ]

        if left:
            return max(0.0, min(left))
        return None

    def _limit(self, member: Member) -> float | None:
        if member.ready:
            return self._step_timeout
        return member.limit

    def _check_time(self, member: Member) -> None:
        """Kill a member whose step or env creation takes too long."""
        limit = self._limit(member)
        link = member.link
        if limit is None or member.overdue is not None or member not in self.members:
            return
        if member.idle(limit) < limit:
            return

        if member.ready:
            member.overdue = TimeoutError(
                f"no step of {link} ended within step_timeout={limit:g} s: the worker was killed"
            )
        else:
            member.overdue = TimeoutError(link.not_ready(limit))
            if not self._begun:  # a replacement would fail in the same way
                raise member.overdue

        link.kill()

    def drain(self, members: Sequence[Member]) -> bool:
        """Read all messages of these members, then their failures; return whether there were any."""
        heard = False
        for member in members:
            while True:
                try:
                    message = member.link.receive()
                except Exception as error:
                    if not isinstance(error, WorkerDied) and not isinstance(error.__cause__, WorkerTraceback):
                        raise  # not an error of the worker
                    self.arrived.append(self._handle_failure(member, error))
                    heard = True
                    break

                if message is None:
                    break
                kind, content = message
                member.since = monotonic()
                heard = True
                if kind == READY:
                    member.ready, self.returns_key = True, content.returns
                    self.scaled = content.scaled
                    continue

                note = content if kind == END else content.note
                fresh = note.frames - member.frames
                member.frames = note.frames

                if kind == END:
                    payload = None
                else:
                    payload = content
                self.arrived.append(Event(member, note, payload, fresh))

        return heard

    def _handle_failure(self, member: Member, error: Exception) -> Event:
        """Drop or replace a failed member, or raise its error."""
        self.transport.end([member.link], timeout=0)
        now = monotonic()
        self.failures += 1
        self._failed_at = [*(at for at in self._failed_at if now - at < _WITHIN), now]
        dies = isinstance(error, WorkerDied)
        if member.overdue is not None:
            error = member.overdue
        if self._on_failure == "raise" or not (member.ready or dies):
            raise error  # a collector that cannot be created would fail again
        if len(self._failed_at) > self._max_failures:
            error.add_note(
                f"{len(self._failed_at)} workers failed within {_WITHIN:.0f} s, more than max_failures="
                f"{self._max_failures}"
            )
            raise error

        at = self.members.index(member)
        if self._on_failure == "drop":
            if len(self.members) == 1:
                error.add_note("it was the last worker")
                raise error
            del self.members[at]
            successor = None
        else:
            successor = self.members[at] = self._start(member.place)

        if successor is None:
            fate = "dropped"
        else:
            fate = "replaced"

        _LOG.warning(
            "%s failed and is %s: %s: %s",
            member.link.name,
            fate,
            type(error).__name__,
            str(error),  # logging the error object would keep the worker's memory alive
        )

        return Event(member, lost=True, successor=successor)

    def end(self, timeout: float) -> None:
        """Stop all workers at their next step; kill those that remain after ``timeout`` seconds."""
        self._on_failure = "raise"  # no replacements from now on, even by a late thread
        self.transport.end([member.link for member in self.members], timeout)
