"""Makes the rows of a log again: steps its env with the actions of the log, and compares checksums."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.datasets.replay_log.columns import Layout, first_bits, unpack_bytes
from flatroll.datasets.replay_log.digests import checksums
from flatroll.datasets.replay_log.generators import restore
from flatroll.datasets.replay_log.marks import decode_marks
from flatroll.datasets.replay_log.recipe import EnvMaker
from flatroll.datasets.replay_log.stage import Stage
from flatroll.datasets.replay_log.state_code import StateCode
from flatroll.datasets.replay_log.states import RECENT, actions_before, base_state, put_state, states_from
from flatroll.datasets.replay_log.varints import Ints
from flatroll.datasets.replay_log.windows import NEW, UNSEEDED, Event, Restart, Save, Window, Windows
from flatroll.disk.tensor_file import DamagedFileError
from flatroll.layout.keys import DONE, NestedKey, next_key
from flatroll.layout.tensordict_seam import nest

#: Stepping one env alone takes about this many times the time that a row takes in a vector env.
_ALONE = 3
_MOST_ALONE = 8  # envs that stay open
_AT_ONCE = 256  # steps of a window whose rows are not wanted
_MOST_CODES = 256  # of saved states, that stay in memory
_ENOUGH = 64  # rows after a restart that tell whether it leads to the right ones
_TOO_MANY = 4096  # of these: that would take too long

T = TypeVar("T")


class Run(NamedTuple):
    """One env in consecutive windows.

    Args:
        env: its number.
        begin: number of the first window.
        stop: number of the window after the last.
    """

    env: int
    begin: int
    stop: int


def runs_of(wanted: Mapping[int, Sequence[int]]) -> list[Run]:
    """Return the runs of envs in windows, which are in ascending order; those of an env are in order.

    >>> runs_of({3: [0, 1], 4: [0], 6: [0]})
    [Run(env=0, begin=3, stop=5), Run(env=0, begin=6, stop=7), Run(env=1, begin=3, stop=4)]
    """
    runs: dict[int, list[Run]] = {}
    for number, envs in wanted.items():
        for env in envs:
            own = runs.setdefault(env, [])
            if own and own[-1].stop == number:
                own[-1] = own[-1]._replace(stop=number + 1)
            else:
                own.append(Run(env, number, number + 1))
    return [run for env in sorted(runs) for run in runs[env]]


class ReplayMismatchError(RuntimeError):
    """The env has made other rows than those that were collected.

    Attributes:
        row: number of the first row that differs.
    """

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text)
        self.row = row


class RowsDiffer(Exception):
    """Rows differ; the first of them is ``row``."""

    def __init__(self, row: int, env: int) -> None:
        super().__init__(row, env)
        self.row = row
        self.env = env


#: What an env can be begun with.
Origin: TypeAlias = Restart | Event | Save


def last_until(items: Sequence[T], row: int, key: Callable[[T], int]) -> T | None:
    """Return the last of items in ascending order whose key is at most ``row``; None if there is none.

    >>> last_until([2, 5, 9], 8, lambda item: item)
    5
    """
    place = bisect_right(items, row, key=key)
    return items[place - 1] if place else None


def row_of(item: Restart | Save) -> int:
    """Return the row that an env can be begun with."""
    return item.row


class Replayer:
    """Makes rows again.

    Args:
        windows: of the log.
        layout: of its batches.
        maker: of its env; None if all rows are kept themselves.
        explain: returns the text of the error for a first row that differs, given its number and its env.
        num_envs: E.
    """

    def __init__(
        self,
        windows: Windows,
        layout: Layout,
        maker: EnvMaker | None,
        explain: Callable[[int, int], str],
        num_envs: int,
    ) -> None:
        self._windows = windows
        self._layout = layout
        self._made_by = maker
        self._explain = explain
        self._num_envs = num_envs
        self._alone: OrderedDict[int, Stage] = OrderedDict()
        self._whole: Stage | None = None
        self._next = -1  # the window that the whole env makes next
        self._shown: tuple[int, TensorDict] | None = None  # the last one that it made
        self._decoded: OrderedDict[int, list[Tensor]] = OrderedDict()
        # Rows of the next window that the whole env has behind it.
        self._before: Ints = np.zeros(num_envs, np.int64)

        # What rows can begin with besides seeds, and what has led to other rows.
        self._codes: OrderedDict[tuple[int, int], StateCode] = OrderedDict()
        self._wrong_saves: set[Save] = set()
        self._restarts_are_wrong = False

    def close(self) -> None:
        """Close all envs."""
        self._drop_envs()
        if self._made_by is not None:
            self._made_by.close()

    def _drop_envs(self) -> None:
        self._drop_whole()
        while self._alone:
            self._alone.popitem()[1].close()

    @contextmanager
    def _dropping_envs(self) -> Iterator[None]:
        """Close all envs if an error or Ctrl-C leaves them in the middle of a step."""
        try:
            yield
        except (Exception, KeyboardInterrupt):
            self._drop_envs()
            raise

    @property
    def _maker(self) -> EnvMaker:
        assert self._made_by is not None  # some rows are not kept
        return self._made_by

    def rows(self, first: int, end: int) -> TensorDict:
        """Return rows ``[first, end)``; ReplayMismatchError if the env does not make them."""
        with self._dropping_envs():
            return self._rows(first, end)

    def _rows(self, first: int, end: int) -> TensorDict:
        windows = self._windows
        begin = bisect_right(windows.ends, first)
        last = bisect_right(windows.ends, end - 1)
        parts: list[Any] = []

        number = begin
        while number <= last:
            # A stretch of windows that are all kept, or all made.
            stop = number
            while stop <= last and windows.kept[stop] == windows.kept[number]:
                stop += 1
            if windows.kept[number]:
                parts += [self._cut(one, self._kept_rows(one), first, end) for one in range(number, stop)]
            else:
                parts += self._made_rows(number, stop, first, end)
            number = stop

        if len(parts) == 1:
            return self._handed_over(parts[0])
        joined: Any = torch.cat(parts)
        return joined

    def _handed_over(self, rows: TensorDict) -> TensorDict:
        """Return rows that the caller may change: copies of a part of a window, which stays in memory here."""
        if self._shown is not None and rows is self._shown[1]:
            # All of it: whoever reads on does not ask for it again, and copies of images take time.
            self._shown = None
            return rows
        return rows.clone()

    def pieces(self, wanted: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int | None, TensorDict]]:
        """Make the rows of some envs in some windows, one after the other.

        Args:
            wanted: numbers of windows in ascending order, and the envs of each.

        Yields:
            number of the window, env, and the rows of this env there; env None and all rows of the window where envs
            are not made alone.

        Raises:
            ReplayMismatchError: the env does not make these rows.
        """
        with self._dropping_envs():
            yield from self._pieces(wanted)

    def _pieces(self, wanted: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int | None, TensorDict]]:
        made = {}
        for number, envs in wanted.items():
            if self._windows.kept[number]:
                yield number, None, self._kept_rows(number)
            else:
                made[number] = envs
        if not made:
            return

        runs = runs_of(made)
        ranges = [self._range(run) for run in runs]
        if self._alone_is_cheaper(ranges, min(made), max(made) + 1):
            for run, rows in zip(runs, ranges, strict=True):
                numbers = range(run.begin, run.stop)
                try:
                    parts = self._proven(*rows, numbers)
                except RowsDiffer:
                    break  # the env may depend on more than its generator: step all envs from the last seed
                for number, part in zip(numbers, parts, strict=True):
                    made[number] = [env for env in made[number] if env != run.env]
                    yield number, run.env, part

        try:
            for number, envs in made.items():
                if envs:
                    yield number, None, self.window(number)
        except RowsDiffer as found:
            raise self._mismatch(found) from None

    def _mismatch(self, found: RowsDiffer) -> ReplayMismatchError:
        return ReplayMismatchError(self._explain(found.row, found.env), found.row)

    def _range(self, run: Run) -> tuple[int, int, int]:
        """Return env, first row and end among the rows of the env."""
        begin = int(self._windows.env_begins(run.begin)[run.env])
        end = int(self._windows.env_ends[run.stop - 1][run.env])
        return run.env, begin, end

    def _cut(self, number: int, batch: TensorDict, first: int, end: int) -> TensorDict:
        """Return the rows of a window's batch that are in ``[first, end)``."""
        begin = self._windows.begins(number)
        if first <= begin and begin + len(batch) <= end:
            return batch
        rows: TensorDict = batch[max(first - begin, 0) : end - begin]
        return rows

    def _made_rows(self, begin: int, stop: int, first: int, end: int) -> list[TensorDict]:
        """Make rows ``[first, end)`` of the windows ``begin ... stop - 1``."""
        wanted = {number: self._wanted(number, first, end) for number in range(begin, stop)}
        if self._alone_is_cheaper(self._ranges(wanted), begin, stop):
            try:
                return self._rows_alone(wanted, first, end)
            except RowsDiffer:
                pass  # the env may depend on more than its generator: step all envs from the last seed

        parts = []
        try:
            for number in range(begin, stop):
                parts.append(self._cut(number, self.window(number), first, end))
        except RowsDiffer as found:
            raise self._mismatch(found) from None
        return parts

    def _wanted(self, number: int, first: int, end: int) -> list[int]:
        """Return the envs whose rows of a window are in ``[first, end)``."""
        begin = self._windows.begins(number)
        ends = begin + np.cumsum(self._windows.counts(number))
        begins = np.concatenate([[begin], ends[:-1]])
        return np.flatnonzero((begins < end) & (ends > first) & (ends > begins)).tolist()

    # One env at a time.

    def _alone_is_cheaper(self, ranges: Sequence[tuple[int, int, int]], begin: int, stop: int) -> bool:
        """Return whether envs can be stepped alone, and that takes fewer steps than the windows as a whole."""
        if not self._maker.recipe.alone:
            return False
        return self._cost_alone(ranges) < self._cost_whole(begin, stop)

    def _cost_alone(self, ranges: Sequence[tuple[int, int, int]]) -> int:
        """Return how many rows are stepped if each env is stepped alone, in rows of a vector env.

        Args:
            ranges: env, first row and end among the rows of the env.
        """
        rows = sum(end - self._start(env, begin)[0] for env, begin, end in ranges)
        return min(_ALONE, self._num_envs) * rows

    def _ranges(self, wanted: Mapping[int, list[int]]) -> list[tuple[int, int, int]]:
        """Return env, first row and end among the rows of the env, of all rows that are wanted."""
        ranges: dict[int, tuple[int, int]] = {}
        for number, envs in wanted.items():
            begins = self._windows.env_begins(number)
            ends = self._windows.env_ends[number]
            for env in envs:
                begin = ranges.get(env, (int(begins[env]), 0))[0]
                ranges[env] = begin, int(ends[env])
        return [(env, *span) for env, span in ranges.items()]

    def _start(self, env: int, row: int) -> tuple[int, Origin]:
        """Return the row and the state, nearest before a row of an env, from which it can be stepped."""
        return max(self._starts(env, row), key=lambda start: start[0])

    def _starts(self, env: int, row: int) -> list[tuple[int, Origin]]:
        """Return from where an env can be stepped to one of its rows: a seed, a restart, a saved state, the last each.

        They are in the order in which they are to be preferred if they are equally far.
        """
        starts: list[tuple[int, Origin]] = []
        event = last_until(self._windows.seeds, row, lambda event: int(event.rows[env]))
        if event is not None and event.seed != NEW:
            starts.append((int(event.rows[env]), event))

        restart = last_until(self._windows.restarts[env], row, row_of)
        if restart is not None and not self._restarts_are_wrong:
            starts.append((restart.row, restart))

        # The row that follows a saved state has no observation.
        save = last_until(self._windows.saves[env], row - 1, row_of)
        if save is not None and save not in self._wrong_saves:
            starts.append((save.row, save))

        if not starts:
            raise RowsDiffer(self._windows.begins(0), env)
        return starts

    def _rows_alone(self, wanted: Mapping[int, list[int]], first: int, end: int) -> list[TensorDict]:
        """Make the rows of each env alone, and lay them out as they were."""
        pieces: dict[int, list[Any]] = {number: [] for number in wanted}
        for env, begin, stop in sorted(self._ranges(wanted)):
            numbers = [number for number in wanted if env in wanted[number]]
            parts = self._proven(env, begin, stop, numbers)
            for number, part in zip(numbers, parts, strict=True):
                pieces[number].append(part)

        made = []
        for number, parts in pieces.items():
            batch = parts[0] if len(parts) == 1 else torch.cat(parts)
            # Its first row is that of the first env that is wanted.
            counts = self._windows.counts(number)
            begin = self._windows.begins(number) + int(counts[: wanted[number][0]].sum())
            made.append(batch[max(first - begin, 0) : end - begin])
        return made

    def env_in(self, number: int, env: int) -> TensorDict:
        """Make the rows of one env in a window; raise `RowsDiffer` if they are not those that were collected."""
        begin = int(self._windows.env_begins(number)[env])
        end = int(self._windows.env_ends[number][env])
        return self._proven(env, begin, end, [number])[0]

    def _proven(self, env: int, begin: int, end: int, numbers: Sequence[int]) -> list[TensorDict]:
        """Make rows of one env from the nearest start, or else from those farther away; see `env_rows`."""
        starts = self._starts(env, begin)
        starts.sort(key=lambda start: -start[0])  # stable
        failed: list[Origin] = []
        found: RowsDiffer | None = None

        for start in starts:
            if found is not None and isinstance(start[1], Event):
                self._forget(env)
            try:
                parts = self.env_rows(env, begin, end, numbers, start)
            except RowsDiffer as differs:
                found = found or differs
                failed.append(start[1])
            else:
                self._note_wrong(failed)
                return parts

        assert found is not None  # there is a start
        if isinstance(starts[0][1], Event):
            # The env may remember what it did before.
            self._forget(env)
            return self.env_rows(env, begin, end, numbers, starts[0])
        raise found

    def _note_wrong(self, origins: Sequence[Origin]) -> None:
        """Leave out from now on what has led to other rows, where another start has led to the right ones."""
        for origin in origins:
            if isinstance(origin, Save):
                self._wrong_saves.add(origin)
            elif isinstance(origin, Restart):
                self._restarts_are_wrong = True

    def restart_suffices(self, number: int, env: int) -> bool | None:
        """Return whether the state of its generator alone leads to the rows of an env in a window.

        None if none is before it, or if the rows between are too few to tell, or very many.
        """
        begin, end = self._range(Run(env, number, number + 1))[1:]
        restart = last_until(self._windows.restarts[env], begin, row_of)
        if restart is None or not _ENOUGH <= end - restart.row <= _TOO_MANY:
            return None
        try:
            self.env_rows(env, begin, end, [number], (restart.row, restart))
        except RowsDiffer:
            return False
        return True

    def env_rows(
        self, env: int, begin: int, end: int, numbers: Sequence[int], start: tuple[int, Origin]
    ) -> list[TensorDict]:
        """Make rows ``[begin, end)`` of one env, which are those in the windows ``numbers``; raise `RowsDiffer`."""
        row, origin = start
        if not isinstance(origin, Save):
            return self._rows_from(env, begin, end, numbers, row, origin, None)

        found = RowsDiffer(self._windows.begins(numbers[0]), env)
        try:
            state = self._code(env, origin.base).decode(self._windows.state(origin))
            recent = actions_before(self._actions_of(env, max(row - RECENT, 0), row))
            for chosen in states_from(self._stage(env).facts, state, recent):
                try:
                    return self._rows_from(env, begin, end, numbers, row, origin, chosen)
                except RowsDiffer as differs:
                    found = differs
        except DamagedFileError:
            self._forget(env)
        raise found

    def _code(self, env: int, base: int) -> StateCode:
        """Return what decodes the saved states of an env, -1 for all: with the state after the first reset."""
        key = env, base
        if key not in self._codes:
            events = self._windows.events_in(base) if base >= 0 else []
            state = None
            if events:
                state = self._base(env, events[0])
            self._codes[key] = StateCode(state)
            if len(self._codes) > _MOST_CODES:
                self._codes.popitem(last=False)
        return self._codes[key]

    def _base(self, env: int, event: Event) -> Any:
        """Return the state of a new env, -1 for all, after a reset; DamagedFileError if it cannot be saved here."""
        seed = event.seed if event.seed >= 0 else None
        if env < 0:
            stage = Stage(self._maker.whole(), 1, 0, self._num_envs)
            stage.reset(seed, event.ids)
            try:
                return base_state(stage.facts, stage.runner, None)
            finally:
                stage.close()

        self._forget(env)
        stage = self._stage(env)
        stage.reset(seed if seed is None else seed + env, event.ids[env : env + 1])
        return base_state(stage.facts, stage.runner, 0)

    def _rows_from(
        self,
        env: int,
        begin: int,
        end: int,
        numbers: Sequence[int],
        start: int,
        origin: Origin,
        state: dict[str, Any] | None,
    ) -> list[TensorDict]:
        """Make rows of one env from its row ``start`` on, see `env_rows`; ``state`` is that of a `Save`."""
        stage = self._stage(env)
        runner = stage.runner
        events = [event for event in self._windows.events if start < event.rows[env] < end]
        if isinstance(origin, Event):
            at = next(i for i, event in enumerate(self._windows.events) if event is origin)
            events = [event for event in self._windows.events[at + 1 :] if event.rows[env] < end]

        with torch.no_grad():
            stage.feed.load(self._actions_of(env, start, end), np.array([end - start]))
            stage.feed.used[:] = 0
            runner.forget()
            if isinstance(origin, Event):
                stage.reset(origin.seed + env, origin.ids[env : env + 1])
            elif isinstance(origin, Restart):
                restore(stage.facts, origin)
                stage.reset(None, np.array([origin.traj]))
            else:
                stage.reset(None, np.zeros(1, np.int64))
                put_state(stage.facts, runner, state, alone=True)

            row = start
            for event in [*events, None]:
                stop = end if event is None else int(event.rows[env])
                row = self._step_alone(stage, row, stop, begin)
                if event is not None:
                    stage.feed.used[:] = stop - start
                    seed = event.seed + env if event.seed >= 0 else None
                    stage.reset(seed, event.ids[env : env + 1])

            mask = runner.window.valid()
            skipped = begin - (end - int(mask.sum()))
            mask &= np.cumsum(mask, axis=0) > skipped
            batch = self._with_all_columns(runner.lay_out(mask, compact=False)[0])

        parts = []
        for number in numbers:
            count = int(self._windows.counts(number)[env])
            part: TensorDict = batch[:count]
            batch = batch[count:]
            self._check(number, part, [env])
            parts.append(self._with_outputs(number, part, env))
        return parts

    def _step_alone(self, stage: Stage, row: int, stop: int, wanted: int) -> int:
        """Step one env from its row ``row`` to ``stop``; rows before ``wanted`` are dropped now and then."""
        runner = stage.runner
        window = runner.window
        while row < stop:
            count = min(_AT_ONCE, stop - row)
            stage.step_until(window.count() + count)
            row += count
            if row < wanted:
                window.restart(1, keep=False)
        return row

    def _stage(self, env: int) -> Stage:
        """Return the stage of one env alone."""
        stage = self._alone.get(env)
        if stage is None:
            stage = Stage(self._maker.alone(env), _AT_ONCE, env, self._num_envs)
            self._alone[env] = stage
            if len(self._alone) > _MOST_ALONE:
                self._alone.popitem(last=False)[1].close()
        return stage

    def _forget(self, env: int) -> None:
        """Close the stage of one env, so that the next one is new."""
        stage = self._alone.pop(env, None)
        if stage is not None:
            stage.close()

    def _actions_of(self, env: int, begin: int, end: int) -> list[Tensor]:
        """Return the actions of rows ``[begin, end)`` of one env."""
        windows = self._windows
        first = bisect_right(windows.env_ends, begin, key=lambda ends: int(ends[env]))
        parts: list[list[Tensor]] = []
        number = first
        while number < len(windows) and windows.env_begins(number)[env] < end:
            counts = windows.counts(number)
            at = int(counts[:env].sum())
            own = int(windows.env_begins(number)[env])
            low = at + max(begin - own, 0)
            high = at + min(end - own, int(counts[env]))
            parts.append([column[low:high] for column in self._actions(number)])
            number += 1
        return [torch.cat(columns) for columns in zip(*parts, strict=True)]

    # All envs at once.

    def _cost_whole(self, begin: int, stop: int) -> int:
        """Return how many rows are stepped if all envs are stepped together."""
        windows = self._windows
        if self._shown is not None and self._shown[0] == begin:
            begin += 1
        if self._whole is not None and self._next <= begin:
            first = windows.begins(self._next)
        else:
            first = windows.begins(self._nearest(begin))
        return windows.ends[stop - 1] - first

    def _event_before(self, number: int) -> Event | None:
        """Return the last reset from which all envs can be stepped to a window."""
        seeds = self._windows.seeds
        place = bisect_right(seeds, number, key=lambda event: event.window)
        for event in reversed(seeds[:place]):
            if not event.local.any():
                return event
        return None

    def _nearest(self, number: int) -> int:
        """Return the window nearest before another from which all envs can be stepped to it."""
        event = self._event_before(number)
        save = self._save_before(number)
        found = [event.window] if event is not None else []
        if save is not None:
            found.append(save.window)
        return max(found, default=0)

    def _save_before(self, number: int) -> Save | None:
        """Return the last saved state of all envs from which a window can be made, if it is nearer than a reset."""
        save = last_until(self._windows.saves_of_all, number, row_of)
        if save is None or save in self._wrong_saves:
            return None
        event = self._event_before(number)
        if event is not None and event.window >= save.window:
            return None
        return save

    def window(self, number: int) -> TensorDict:
        """Make all rows of a window; raise `RowsDiffer` if they are not those that were collected."""
        if self._shown is not None and self._shown[0] == number:
            return self._shown[1]

        save = self._save_before(number)
        if save is not None and (self._whole is None or not save.window < self._next <= number):
            with suppress(RowsDiffer, DamagedFileError):
                self._begin_saved(save)
                return self._reach(number)
            self._wrong_saves.add(save)
            self._drop_whole()

        event = self._event_before(number)
        if event is None:
            raise RowsDiffer(self._windows.begins(number), 0)
        is_new = self._whole is None
        begins = is_new or self._next > number or (event.window > self._next and event.seed >= 0)
        if begins:
            self._begin_whole(event)

        try:
            return self._reach(number)
        except RowsDiffer:
            # The rows may depend on what the env did before a seed: on nothing, or on all that is in the log.
            earliest = self._windows.events[0]
            if not is_new:
                self._drop_whole()
                self._begin_whole(event)
                with suppress(RowsDiffer):
                    return self._reach(number)
            if earliest is event or earliest.seed == UNSEEDED:
                raise
            self._drop_whole()
            self._begin_whole(earliest)
            return self._reach(number)

    def _reach(self, number: int) -> TensorDict:
        """Step all envs to the end of a window; return its rows, or raise `RowsDiffer`."""
        with torch.no_grad():
            while self._next < number:
                self._advance(wanted=False)
            batch = self._with_all_columns(self._advance(wanted=True))

        self._check(number, batch, range(self._num_envs))
        batch = self._with_outputs(number, batch, None)
        self._shown = number, batch
        return batch

    def _begin_whole(self, event: Event) -> None:
        """Begin with a reset of all envs."""
        if self._whole is None or event.seed == NEW:
            self._drop_whole()
            self._whole = self._new_whole(event.window)
        self._whole.runner.forget()
        self._next = event.window
        self._before[:] = 0

    def _begin_saved(self, save: Save) -> None:
        """Begin with a saved state of all envs; DamagedFileError if it cannot be restored."""
        state = self._code(-1, save.base).decode(self._windows.state(save))
        if self._whole is None:
            self._whole = self._new_whole(save.window)
        stage = self._whole
        stage.runner.forget()
        stage.reset(None, np.zeros(self._num_envs, np.int64))
        put_state(stage.facts, stage.runner, state, alone=False)

        try:
            before = np.array(state["local"], np.int64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DamagedFileError(f"a state of the log is damaged: {str(error)[:200]}") from None
        counts = self._windows.counts(save.window)
        if before.shape != counts.shape or (before < 0).any() or (before > counts).any():
            raise DamagedFileError("a state of the log is of other rows")
        stage.feed.used[:] = 0
        self._next = save.window
        self._before = before

    def _new_whole(self, number: int) -> Stage:
        rows = int(self._windows.counts(number).sum())
        steps = -(-rows // self._num_envs)
        return Stage(self._maker.whole(), steps, 0, self._num_envs)

    def _drop_whole(self) -> None:
        if self._whole is not None:
            self._whole.close()
        self._whole = None
        self._shown = None

    def _advance(self, *, wanted: bool) -> TensorDict:
        """Step all envs through the next window; return its rows if they are wanted."""
        stage = self._whole
        assert stage is not None
        number = self._next
        runner = stage.runner
        window = runner.window
        self._load_whole(stage, number)

        # A saved state may be in the middle of the window.
        behind = int(self._before.sum())
        stage.feed.used += self._before
        self._before = np.zeros(self._num_envs, np.int64)

        for event in self._windows.events_in(number):
            before = int(event.local.sum()) - behind
            if before < 0:
                continue
            if window.count() > before:
                runner.forget()  # rows that the collector dropped, too
            else:
                stage.step_until(before)
            stage.feed.used[:] = event.local
            stage.reset(event.seed if event.seed >= 0 else None, event.ids)

        rows = self._windows.ends[number] - self._windows.begins(number) - behind
        batch = TensorDict({}, [0])
        if rows:
            stage.step_until(rows)
            mask, reached = window.first_cells(rows)
            if wanted:
                batch = runner.lay_out(mask, compact=False)[0]
            window.restart(reached)

        stage.feed.used -= self._windows.counts(number)
        self._next = number + 1
        return batch

    def _load_whole(self, stage: Stage, number: int) -> None:
        """Give all envs the actions of a window, and those of the next ones that its last step needs."""
        numbers = [number]
        # A step gives at most E rows; all but one of the last may be in later windows.
        most = self._windows.ends[number] + self._num_envs - 1
        while numbers[-1] + 1 < len(self._windows) and self._windows.ends[numbers[-1]] < most:
            numbers.append(numbers[-1] + 1)
        actions = [self._actions(one) for one in numbers]  # checks how many rows there are

        counts = [self._windows.counts(one) for one in numbers]
        envs = np.concatenate([np.repeat(np.arange(self._num_envs), count) for count in counts])
        order = torch.from_numpy(np.argsort(envs, kind="stable"))

        columns = zip(*actions, strict=True)
        stage.feed.load([torch.cat(parts)[order] for parts in columns], sum(counts, np.zeros_like(counts[0])))

    # What both need.

    def _actions(self, number: int) -> list[Tensor]:
        """Return the columns of the action in a window."""
        decoded = self._decoded.get(number)
        if decoded is None:
            window = self._windows.get(number)
            decoded = [
                code.decode(packed, window.rows)
                for code, packed in zip(self._layout.actions, window.actions, strict=True)
            ]
            self._decoded[number] = decoded
            if len(self._decoded) > _MOST_ALONE * 8:
                self._decoded.popitem(last=False)
        return decoded

    def _with_all_columns(self, batch: TensorDict) -> TensorDict:
        """Add columns that this part lacks, as entries of info may be missing; cast those of another dtype."""
        for key, dtype, shape in self._layout.made:
            column: Tensor | None = batch.get(key, None)
            if column is None:
                batch.set(key, torch.zeros(len(batch), *shape, dtype=dtype))
            elif column.shape[1:] != shape:
                raise DamagedFileError(f"the column {key!r} of the log has the shape {shape} in a row")
            elif column.dtype != dtype:
                batch.set(key, column.to(dtype))
        return batch

    def _check(self, number: int, batch: TensorDict, envs: Sequence[int]) -> None:
        """Raise `RowsDiffer` unless these are the rows of a window, those of the given envs."""
        window = self._windows.get(number)
        counts = window.counts
        chosen = np.zeros(self._num_envs, bool)
        chosen[list(envs)] = True
        digests = self._layout.digest(batch)
        if (checksums(digests, counts[chosen]) == window.checksums[chosen]).all():
            self._check_marks(window, batch, chosen)
            return

        rows = np.flatnonzero(np.repeat(chosen, counts))
        wrong = np.flatnonzero(first_bits(digests) != window.digests[rows])
        # Of 256 differing rows one has the same 8 bits.
        place = int(wrong[0]) if len(wrong) else 0
        env = int(np.repeat(np.arange(self._num_envs), counts)[rows[place]])
        raise RowsDiffer(self._windows.begins(number) + int(rows[place]), env)

    def _check_marks(
        self, window: Window, batch: TensorDict, chosen: np.ndarray[Any, np.dtype[np.bool_]]
    ) -> None:
        """Raise DamagedFileError if trajectories begin or end elsewhere than the window says."""
        of_chosen = np.repeat(chosen, window.counts)
        for key, stored in zip(
            (self._layout.init, DONE), decode_marks(window.marks, window.counts), strict=True
        ):
            if (batch.get(key).reshape(-1).cpu().numpy() != stored[of_chosen]).any():
                raise DamagedFileError("a window of the log has other ends of trajectories than its rows")

    def _with_outputs(self, number: int, batch: TensorDict, env: int | None) -> TensorDict:
        """Add the columns that the policy wrote, for the rows of one env or of all."""
        window = self._windows.get(number)
        if not window.outputs:
            return batch

        for key, column in self._columns(window, window.outputs)["columns"]:
            if env is not None:
                at = int(window.counts[:env].sum())
                column = column[at : at + int(window.counts[env])].clone()
            batch.set(key, column)
        return batch

    def _columns(self, window: Window, packed: bytes) -> dict[str, Any]:
        """Return stored columns; DamagedFileError unless each has one value a row."""
        most = 2 * window.rows * self._layout.row_bytes() + (1 << 20)
        tree = unpack_bytes(packed, most)
        try:
            rows = {len(column) for _, column in tree["columns"]}
            if not rows <= {window.rows}:
                raise ValueError(f"columns of {rows} rows, expected {window.rows}")
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"stored columns are damaged: {str(error)[:200]}") from None
        columns: dict[str, Any] = tree
        return columns

    def _kept_rows(self, number: int) -> TensorDict:
        """Return the rows of a window that were kept themselves."""
        window = self._windows.get(number)
        stored = self._columns(window, window.kept)
        columns: dict[NestedKey, Tensor] = dict(stored["columns"])
        for code, column in zip(self._layout.actions, self._actions(number), strict=True):
            columns[code.key] = column

        try:
            # The next observation is that of the next row, but at the ends of runs.
            rows = stored["final_rows"]
            for key, last in stored["final"]:
                following = columns[key].roll(-1, 0)
                following[rows] = last
                columns[next_key(key)] = following
            for key in self._layout.counts:
                columns[next_key(key)] = columns[key] + 1

            batch = nest(columns, window.rows)
            self._check(number, batch, range(self._num_envs))
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise DamagedFileError(f"kept rows are damaged: {str(error)[:200]}") from None
        except RowsDiffer as found:
            raise DamagedFileError(f"kept row {found.row:,} is not what was collected") from None
        return self._with_outputs(number, batch, None)
