"""Gathers windows of several workers for batches: `InStep`, one per worker, and `InTurn`, one worker's at a time."""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import ceil, inf
from time import monotonic
from typing import NamedTuple

from flatroll.rollouts.workers.team import Event, Member, Team
from flatroll.rollouts.workers.transport import WITHOUT_END, Wake, WorkerWindow


class Filled(NamedTuple):
    """A window, the member that made it, and the rows it has collected since its last window."""

    member: Member
    window: WorkerWindow
    fresh: int


class Gatherer:
    """Base class of both gatherers.

    Args:
        team: the workers.
        frames_per_batch, total_frames: as in `MultiCollector`.
        whole: whether windows hold whole trajectories, so that their row counts differ from the rows collected.
    """

    def __init__(self, team: Team, frames_per_batch: int, total_frames: int, whole: bool) -> None:
        self.team = team
        self._rows = frames_per_batch
        self.total = total_frames
        self._whole = whole

    def next(self, limited: bool, wake: Wake | None = None) -> list[Filled] | None:
        """Return the windows of the next batch; none once ``total_frames`` are collected.

        Args:
            limited: False to continue beyond ``total_frames``.
            wake: a `Wake`; once it is set, None is returned. Nothing is lost: the next call continues from there.
        """
        raise NotImplementedError

    def set_total(self, total: int) -> None:
        """Set the total number of rows to collect; -1: no limit."""
        self.total = total

    def _left(self) -> int:
        """Return the rows left up to ``total_frames``."""
        return max(0, self.total - self.team.frames)

    def _is_limited(self, limited: bool) -> bool:
        return limited and self.total >= 0


@dataclass(eq=False)
class Ask:
    """A request for ``rows`` rows of a member, and its result."""

    member: Member
    rows: int
    answered: bool = False
    window: WorkerWindow | None = None
    fresh: int = 0


class InStep(Gatherer):
    """Asks each worker for its share and waits for all: batches are complete and in worker order.

    Args:
        enough: fraction of the workers, in (0, 1], to wait for; the others then deliver what they have. Default None:
            all.
    """

    def __init__(
        self,
        team: Team,
        frames_per_batch: int,
        total_frames: int,
        whole: bool,
        enough: float | None = None,
    ) -> None:
        super().__init__(team, frames_per_batch, total_frames, whole)
        self._enough = enough
        self._asks: list[Ask] = []

    def next(self, limited: bool, wake: Wake | None = None) -> list[Filled] | None:
        limited = self._is_limited(limited)
        while True:
            over = limited and not self._left()
            if not self._asks:
                if over and not self._whole:
                    return []
                self._begin(over, limited)

            while waiting := [ask for ask in self._asks if not ask.answered]:
                events = self.team.events([ask.member for ask in waiting], wake)
                if not events:
                    return None

                for event in events:
                    self.take(event, limited)
                self._cut()

            asks = self._asks
            self._asks = []
            self.team.frames += sum(ask.fresh for ask in asks)
            filled = [Filled(ask.member, ask.window, ask.fresh) for ask in asks if ask.window is not None]
            if filled or over:
                return filled

    def _begin(self, over: bool, limited: bool) -> None:
        """Ask each member for its share, or at the end of collection for its complete trajectories."""
        members = [member for member in self.team.members if member.frames or not over]
        for member, rows in zip(members, shares(self._rows, len(members)), strict=True):
            self._asks.append(Ask(member, rows))
        for ask in self._asks:
            self._send(ask, limited)

    def _send(self, ask: Ask, limited: bool) -> None:
        """Send a request. For complete trajectories a worker must know when to stop waiting for their ends."""
        member = ask.member
        limit = WITHOUT_END
        if limited and self._whole:
            limit = max(1, member.frames + ceil(self._left() / len(self.team.members)))
        member.ask(ask.rows, limit)

    def take(self, event: Event, limited: bool) -> None:
        """Record an event; the request of a lost member is sent to another one."""
        asks = [ask for ask in self._asks if ask.member is event.member and not ask.answered]
        if not event.lost:
            asks[0].answered, asks[0].window, asks[0].fresh = True, event.window, event.fresh
            if len(asks) > 1 and event.window is not None:
                event.window.keep()  # frees its slot for the next window before the batch is complete
            return

        for ask in asks:
            if event.successor is not None:
                ask.member = event.successor
                self._send(ask, limited)
                continue

            self._asks.remove(ask)
            if self._whole:
                continue  # its trajectories are missing from this batch

            members = self.team.members
            for member, rows in zip(members, shares(ask.rows, len(members)), strict=True):
                if rows:
                    self._free(member)
                    self._asks.append(Ask(member, rows))
                    self._send(self._asks[-1], limited)

    def _free(self, member: Member) -> None:
        """Copy a waiting window out of the member's memory, because the member is asked for another one."""
        for ask in self._asks:
            if ask.member is member and ask.window is not None:
                ask.window.keep()

    def _cut(self) -> None:
        """Cut the windows of late members once enough have delivered."""
        late = [ask for ask in self._asks if not ask.answered]
        if self._enough is not None and len(self._asks) - len(late) >= ceil(self._enough * len(self._asks)):
            for ask in late:
                ask.member.link.cut()


class InTurn(Gatherer):
    """Lets workers make windows continuously and serves the finished ones, worker by worker.

    It listens once all windows that it knows of are served: with many workers one wait brings many windows.
    """

    def __init__(self, team: Team, frames_per_batch: int, total_frames: int, whole: bool) -> None:
        super().__init__(team, frames_per_batch, total_frames, whole)
        self._waiting: dict[int, deque[Filled]] = {}  # windows of each place, in order of arrival

        #: A heap of the places with windows: turn of the last one served, arrival of the first one waiting, place.
        self._turns: list[tuple[int, int, int]] = []
        self._served: dict[int, int] = {}  # by place: number of the last window served
        self._last: Member | None = None  # the member served last
        self._number = count(1)
        self._limits: dict[Member, int] = {}  # maximum number of rows to collect for each
        self.set_total(total_frames)

    @property
    def queue(self) -> list[Filled]:
        """Windows that have arrived and have not been served, by place."""
        return [filled for windows in self._waiting.values() for filled in windows]

    def set_total(self, total: int) -> None:
        super().set_total(total)
        self._last = None
        if self._whole and total >= 0:
            share = max(1, ceil(self._left() / len(self.team.members)))
            self._limits = {member: member.frames + share for member in self.team.members}

    def next(self, limited: bool, wake: Wake | None = None) -> list[Filled] | None:
        limited = self._is_limited(limited)
        if limited and not self._whole and not self._left():
            return []

        # Request no more windows than are still needed.
        windows = sys.maxsize
        if limited and not self._whole:
            windows = ceil(self._left() / self._rows)

        while True:
            served = self._last
            self._last = None
            if served is not None and self._turns and served in self.team.members:
                self._go_on([served], limited, windows)
                return [self._serve()]

            self._go_on(self.team.members, limited, windows)
            going = [member for member in self.team.members if not member.ended]
            if not going and not self._turns:
                return []

            heard = self._listen(going, wake)
            if self._turns:
                return [self._serve()]
            if not heard:
                return None

    def _listen(self, going: Sequence[Member], wake: Wake | None) -> bool:
        """Take what these members send, without waiting if windows are there; return whether anything came."""
        if not going:
            return False
        timeout = None
        if self._turns:
            timeout = 0
        events = self.team.events(going, wake, timeout)
        for event in events:
            self.take(event)
        return bool(events)

    def _go_on(self, members: Sequence[Member], limited: bool, windows: int) -> None:
        """Let these members make windows, up to their limits."""
        for member in members:
            if limited and self._whole:
                limit = self._limits.get(member, WITHOUT_END)
            else:
                limit = WITHOUT_END

            if limit != member.row_limit:
                member.row_limit = limit
                member.ended = False
                member.ask(self._rows, limit)

            if not member.ended:
                member.link.go_on(windows)

    def take(self, event: Event) -> None:
        """Record an event: a window, a finished member or a lost one."""
        member = event.member
        if event.window is not None:
            waiting = self._waiting.setdefault(member.place, deque())
            waiting.append(Filled(member, event.window, event.fresh))
            if len(waiting) == 1:
                self._line_up(member.place)
            member.since = inf  # it may have to wait for a free slot until one of its windows is served
        elif not event.lost:
            member.ended = True
            self.team.frames += event.fresh
        elif member in self._limits:  # others collect its remaining rows
            rest = max(0, self._limits.pop(member) - member.frames)
            if event.successor is not None:
                self._limits[event.successor] = max(1, rest)
            else:
                for other, more in zip(self._limits, shares(rest, len(self._limits)), strict=True):
                    self._limits[other] += more

    def _line_up(self, place: int) -> None:
        heappush(self._turns, (self._served.get(place, 0), next(self._number), place))

    def _serve(self) -> Filled:
        """Return a window of the member that has waited longest."""
        place = heappop(self._turns)[2]
        waiting = self._waiting[place]
        filled = waiting.popleft()
        filled.member.since = monotonic()  # it now has a free slot
        self._served[place] = next(self._number)
        if waiting:
            self._line_up(place)

        self._last = filled.member
        self.team.frames += filled.fresh
        return filled


def shares(rows: int, count: int) -> Sequence[int]:
    """Split ``rows`` into ``count`` shares that differ by at most one, larger ones first.

    >>> shares(11, 4)
    [3, 3, 3, 2]
    """
    return [rows // count + (i < rows % count) for i in range(count)]
