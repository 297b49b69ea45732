"""The driver's side of a fleet of actors that collect: calls under way, failures, replacements."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

from flatroll.layout.checks import writer_number
from flatroll.sharing.worker import WorkerDied
from flatroll.sharing.ray_calls import Calls, Failure

OnFailure = Literal["raise", "drop", "replace"]
_FAILURES_COUNT_FOR = 60.0  # seconds

_LOG = logging.getLogger("flatroll.rollouts")


@dataclass(frozen=True)
class Report:
    """What an actor says about a window.

    Attributes:
        rows: number of rows, 0 where the collector has no more to give.
        frames: rows that the actor has collected so far, those of unfinished trajectories included.
        version: number of the weights that it began with.
        nbytes: size of the rows.
    """

    rows: int
    frames: int
    version: int
    nbytes: int


@dataclass(eq=False)
class Place:
    """One of the collectors: the actor that has this place now, after those that were replaced.

    Attributes:
        number: from 0.
        env: reference to the function that makes the env.
        options: of ``ray.remote``, for the actor.
    """

    number: int
    env: Any
    options: Mapping[str, Any]
    actor: Any = None
    writer: int = -1
    starting: Any = None  # the reference of the call that makes the collector, until it is answered
    deadline: float = 0.0  # for that answer, of the clock `monotonic`
    row_bytes: int = 0
    under_way: deque[list[Any]] = field(
        default_factory=deque
    )  # references to a report and to rows, oldest first
    version: int = -1  # of the weights that were sent last
    served: int = 0  # when a window of it was taken last, as a running number
    windows: int = 0  # taken
    frames: int = 0  # collected, by all actors that had this place
    frames_before: int = 0  # by those before this one
    ended: bool = False  # the collector has no more to give

    @property
    def name(self) -> str:
        return f"collector {self.number} (writer {self.writer})"

    @property
    def head(self) -> Any:
        """The reference that is answered next; None if nothing is under way."""
        if self.starting is not None:
            return self.starting
        return self.under_way[0][0] if self.under_way else None


@dataclass(frozen=True)
class Taken:
    """A window that has come: what its actor says, and its rows (or the reference to them)."""

    place: Place
    report: Report
    rows: Any
    fresh: int  # rows that its place has collected since the window before


class Fleet:
    """Actors that collect. Every actor has a writer number that no other had before.

    Args:
        calls: Ray, or what stands in for it.
        kind: the class of actors.
        options_of: further arguments at a place, given the number of actors that were made before.
        writer: number of the first actor.
        writers: numbers that each actor takes.
        on_failure, max_failures: see `RayCollector`.
        start_timeout: seconds that an actor may take until its collector is made.
    """

    def __init__(
        self,
        calls: Calls,
        kind: type,
        options_of: Callable[[Place, int], Mapping[str, Any]],
        writer: int,
        writers: int,
        *,
        on_failure: OnFailure,
        max_failures: int,
        start_timeout: float,
    ) -> None:
        self.calls, self._kind, self._options_of = calls, kind, options_of
        #: Where actors are wanted.
        self.places: list[Place] = []
        #: References to the policy, to the function that makes one, and to the collector's arguments.
        self.common: list[Any] = []
        #: Number of the next actor that is made.
        self.next_writer = writer
        self._writers = writers
        self._on_failure, self._max_failures, self._start_timeout = on_failure, max_failures, start_timeout
        self._failures: deque[float] = deque()  # when they happened
        self._served = 0
        #: Number of actors that were made so far.
        self.hired = 0
        #: Number of actors that were lost so far.
        self.lost = 0
        self._version, self._weights = 0, None

    def start(self) -> None:
        """Make all actors, and wait until each has its collector."""
        for place in self.places:
            self._hire(place)
        while any(place.starting is not None for place in self.places):
            self.take()

    def _hire(self, place: Place) -> None:
        """Put a new actor into a place."""
        place.writer = writer_number(self.next_writer)
        self.next_writer += self._writers
        options = self._options_of(place, self.hired)
        self.hired += 1
        place.frames_before, place.version, place.ended = place.frames, -1, False
        place.actor = self.calls.make(self._kind, place.options)
        place.starting = self.calls.call(place.actor, "start", place.env, *self.common, options)
        place.deadline = monotonic() + self._start_timeout

    def publish(self, version: int, weights: Any) -> None:
        """Let windows that begin from now on have these weights: an array with their layout, or None."""
        # Stored once for all actors. The store forgets the version before when the last call with it has run.
        self._version, self._weights = version, None if weights is None else self.calls.put(weights)

    def begin(self, place: Place, frames: int | None = None, total: int | None = None) -> None:
        """Ask for one more window of a place, of ``frames`` rows, of a ``total`` that the place is to collect."""
        weights = None if place.version == self._version else self._weights
        place.version = self._version
        if total is not None:
            total -= place.frames_before
        arguments = self._version, weights, frames, total
        place.under_way.append(self.calls.call(place.actor, "collect", *arguments, returns=2))

    def take(self, fetch: bool = True) -> Taken | None:
        """Wait until something comes; return it if it is a window. Places that waited longest come first.

        Args:
            fetch: get the rows too, else the reference to them.

        Raises:
            BaseException: what an actor raised, if failures are not to be survived, or while its collector was made.
            WorkerDied: an actor is gone, likewise.
            TimeoutError: an actor was not ready in time.
        """
        waiting = [place for place in self.places if place.head is not None]
        waiting.sort(key=lambda place: place.served)
        deadlines = [place.deadline for place in waiting if place.starting is not None]
        left = max(0.0, min(deadlines) - monotonic()) if deadlines else None
        ready = self.calls.wait([place.head for place in waiting], left)
        if not ready:
            raise self._not_ready([place for place in waiting if place.starting is not None])
        place = next(place for place in waiting if place.head == ready[0])
        try:
            answer = self.calls.get(place.head)
            if place.starting is not None:
                self._started(place, answer)
                return None
            if not isinstance(answer, Failure):
                rows = place.under_way[0][1]
                return self._taken(place, answer, self.calls.get(rows) if fetch else rows)
        except WorkerDied as error:
            died = WorkerDied(f"{place.name}: {error}")
            died.__cause__ = error
            answer = Failure(died, "")
        self._survive(place, answer)
        return None

    def _started(self, place: Place, answer: Any) -> None:
        if isinstance(answer, Failure):  # it would only happen again, so nothing is replaced
            answer.throw(f"{place.name}, while its collector was made")
        place.starting, place.row_bytes = None, answer

    def _taken(self, place: Place, report: Report, rows: Any) -> Taken:
        place.under_way.popleft()
        self._served += 1
        place.served = self._served
        place.windows += report.rows > 0
        place.ended = not report.rows
        before, place.frames = place.frames, place.frames_before + report.frames
        return Taken(place, report, rows, place.frames - before)

    def _survive(self, place: Place, failure: Failure) -> None:
        """Replace or drop a failed actor; raise its error if that is not wanted, or not any more."""
        now = monotonic()
        self._failures.append(now)
        self.lost += 1
        while self._failures[0] < now - _FAILURES_COUNT_FOR:
            self._failures.popleft()
        left = [other for other in self.places if other is not place]
        replace = self._on_failure == "replace" and len(self._failures) <= self._max_failures
        if not replace and (self._on_failure != "drop" or not left):
            if self._on_failure == "replace":
                failure.error.add_note(
                    f"failure {len(self._failures)} in {_FAILURES_COUNT_FOR:.0f} s, more than "
                    f"max_failures={self._max_failures}"
                )
            if not failure.trace:  # its process said nothing
                raise failure.error
            failure.throw(place.name)
        error, became = failure.error, "replaced" if replace else "dropped"
        _LOG.warning("%s failed and is %s: %s: %s", place.name, became, type(error).__name__, error)
        self.calls.kill(place.actor)
        place.starting = None
        place.under_way.clear()
        if replace:
            self._hire(place)
        else:
            self.places = left

    def _not_ready(self, places: list[Place]) -> TimeoutError:
        names = ", ".join(f"{place.name} asks for {dict(place.options)}" for place in places)
        return TimeoutError(
            f"no node had room for an actor, or its env took too long to be made, within start_timeout="
            f"{self._start_timeout} s: {names}. Ask for less with remote_configs, or add nodes"
        )

    def end(self, timeout: float) -> None:
        """Let the actors close their envs, for at most ``timeout`` seconds, and end them."""
        ends = monotonic() + timeout
        closing = [self.calls.call(place.actor, "close") for place in self.places] if timeout > 0 else []
        while closing and (left := ends - monotonic()) > 0:
            ready = self.calls.wait(closing, left)
            closing = [reference for reference in closing if reference not in ready]
        for place in self.places:
            if place.actor is not None:
                self.calls.kill(place.actor)
            place.starting = None
            place.under_way.clear()
