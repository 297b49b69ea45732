"""`ReplayLog`: reads a log, and makes its rows again."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.datasets.replay_log.columns import Layout, differing_columns
from flatroll.datasets.replay_log.from_rows import write_log
from flatroll.datasets.replay_log.recipe import (
    CannotRemakeError,
    EnvMaker,
    Recipe,
    differing_versions,
    versions_here,
)
from flatroll.datasets.replay_log.recorder import read_description, unchanged_generators
from flatroll.datasets.replay_log.replay import Replayer
from flatroll.datasets.replay_log.windows import Windows
from flatroll.disk.folder import Folder
from flatroll.layout.boundaries import run_starts
from flatroll.layout.checks import check_function, check_path, check_whole_number
from flatroll.layout.inspect.text import Facts
from flatroll.layout.keys import DONE, NestedKey, as_tuple
from flatroll.rollouts.arguments import EnvSource, env_function
from flatroll.rollouts.batch_columns import spec_of_columns
from flatroll.rollouts.env_facts import EnvFacts
from flatroll.specs import Composite


class ReplayLog(Facts):
    """The rows that a collector has logged, made again from seeds and actions.

    ``Collector(..., log=path)`` writes a log: a folder with the env's id, arguments and wrappers, the versions of its
    packages, seeds, actions, what the policy wrote besides, and checksums. No observation is stored. Reading rows steps
    the env again and compares the checksums, so the rows are equal bit by bit to those that were collected, or an error
    names the first one that differs. Rows of an env that is not deterministic are kept themselves.

    A process killed while it writes loses the batch that it collects; all earlier ones are there. Opening a log reads
    an index of its batches (rows of each env, resets, states of generators) and no rows.

    Args:
        path: the folder.
        create_env_fn: makes the env, or vector env, that was collected. Needed, to make rows, if it is not one of
            Gymnasium's registry.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: the folder holds something else, or is damaged.

    >>> import gymnasium as gym, tempfile
    >>> from flatroll.rollouts import Collector
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     env = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    ...     collector = Collector(env, frames_per_batch=20, total_frames=40, seed=0, log=f"{folder}/run.replay")
    ...     batches = list(collector)
    ...     with ReplayLog(f"{folder}/run.replay") as log:
    ...         rows = log.rows(0, 40)
    >>> len(log), bool((rows == torch.cat(batches)).all())
    (40, True)
    """

    def __init__(self, path: str | PathLike[str], *, create_env_fn: Callable[[], Any] | None = None) -> None:
        self.path = check_path("path", path)
        if create_env_fn is not None:
            check_function("create_env_fn", create_env_fn)

        folder = Folder(self.path)
        if not folder.versions():
            raise FileNotFoundError(f"{self.path} holds no replay log")
        loaded = folder.load()
        tree = read_description(loaded.json, loaded.tensors)
        folder.recover()

        #: The versions of packages when the log was begun, by name.
        self.versions: dict[str, str] = tree["versions"]
        self._recipe = Recipe.from_tree(tree["recipe"])
        self._layout = Layout.from_tree(tree["layout"])
        self._function = create_env_fn
        self._folder = folder
        self._windows = Windows(folder, self._recipe.num_envs, len(self._layout.actions))
        self._windows.load()
        self._replayer: Replayer | None = None
        self._spec: Composite | None = None

    @classmethod
    def from_rows(
        cls,
        path: str | PathLike[str],
        rows: TensorDictBase | Sequence[TensorDictBase],
        create_env_fn: EnvSource,
        *,
        seed: int | None = None,
        obs_dtype: torch.dtype | None = None,
        max_frames_per_traj: int | None = None,
        info_keys: Sequence[NestedKey] = (),
    ) -> Self:
        """Write a log of rows that were collected without one, and open it.

        Their actions are played again, and every column of every row is compared, so the rows may be deleted.

        Args:
            path: a new folder.
            rows: the batches of one `flatroll.rollouts.Collector` from its first reset on, in order; each but the last
                has the same number of rows. They need no next observations. A single env's may be one batch.
            create_env_fn: the env that was collected, as new, or a function that makes it, as for the collector. A
                function is also needed to read the log.
            seed: the ``seed`` of that collector. Default None, for envs that take theirs when they are made.
            obs_dtype, max_frames_per_traj, info_keys: those of that collector.

        Raises:
            ReplayMismatchError: the env makes other rows; the message names the first one. No log is left.
            FileExistsError: ``path`` exists.
            KeyError: the rows lack the actions or ids of trajectories, or have a column that nothing makes.
            ValueError: there is no batch, or one has other entries than the first.

        >>> import gymnasium as gym, tempfile
        >>> from flatroll.rollouts import Collector
        >>> env = gym.make("CartPole-v1")
        >>> batches = list(Collector(env, frames_per_batch=20, total_frames=40, seed=0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with ReplayLog.from_rows(f"{folder}/old.replay", batches, env, seed=0) as log:
        ...         print(len(log), log.kept)
        40 0
        """
        batches = [rows] if isinstance(rows, TensorDictBase) else list(rows)
        if not batches:
            raise ValueError("rows must have at least one batch, got none")
        options = {
            "obs_dtype": obs_dtype,
            "max_frames_per_traj": max_frames_per_traj,
            "info_keys": info_keys,
        }
        write_log(check_path("path", path), batches, create_env_fn, seed=seed, options=options)
        return cls(path, create_env_fn=env_function(create_env_fn))

    def __len__(self) -> int:
        """Number of rows."""
        return self._windows.rows

    def __getitem__(self, rows: slice | int) -> TensorDict:
        """Return rows of a slice of step 1, or one row; see `rows`."""
        if not isinstance(rows, slice):
            number = self._row_number(rows)
            row: TensorDict = self.rows(number, number + 1)[0]
            return row

        first, end, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of a log must have step 1, got {step}")
        return self.rows(first, max(first, end))

    def _row_number(self, row: Any) -> int:
        """Return the number of a row, which may be counted from the end."""
        try:
            number = index(row)
        except TypeError:
            raise TypeError(
                f"a log takes the number of a row or a slice of rows, got {row!r:.100}: columns are in the batch that "
                "it returns"
            ) from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} requested, available are [0, {len(self)})")
        return number % len(self)

    @property
    def num_envs(self) -> int:
        """Number of envs that were collected."""
        return self._recipe.num_envs

    @property
    def kept(self) -> int:
        """Number of rows that are kept themselves."""
        windows = self._windows
        return sum(
            windows.ends[number] - windows.begins(number) for number, kept in enumerate(windows.kept) if kept
        )

    def rows(self, first: int | None = None, end: int | None = None) -> TensorDict:
        """Make rows ``[first, end)`` again: flat and marked, in the order in which they were collected.

        Few rows are made by stepping only the envs that they are of, from the nearest seed, state of a generator or
        saved state; many by stepping all envs from the last seed or saved state on. Reading on where the last call
        ended goes on from there.

        Args:
            first: number of a row. Default 0.
            end: number of a row. Default ``len(log)``.

        Raises:
            IndexError: the log does not have these rows.
            ValueError: the log needs ``create_env_fn``, or is damaged.
            ReplayMismatchError: the env makes other rows: the message names the first one, and the versions that
                differ.
        """
        first = 0 if first is None else check_whole_number("first", first, 0)
        end = len(self) if end is None else check_whole_number("end", end, 0)
        if not first <= end <= len(self):
            raise IndexError(f"rows [{first}, {end}) requested, available are [0, {len(self)})")
        if first == end:
            return self._no_rows()

        with unchanged_generators():
            return self._make_replayer().rows(first, end)

    def trajectories(self, *, rows_at_once: int = 65_536) -> Iterator[TensorDict]:
        """Yield each trajectory whole, as a flat batch ``[T]``, in the order in which they began.

        Those that a batch of the collector cut are joined; the ones at the end of the log, and before lost rows, end
        without ``done``. All rows are made once, and in order. In memory are those since the first unfinished
        trajectory began.

        Args:
            rows_at_once: rows to make at a time, of whole batches of the collector. Default 65,536.

        Raises:
            ReplayMismatchError: the env makes other rows.

        >>> import gymnasium as gym, tempfile
        >>> from flatroll.rollouts import Collector
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     env = gym.make("CartPole-v1", max_episode_steps=8)
        ...     collector = Collector(env, frames_per_batch=5, total_frames=20, seed=0, log=f"{folder}/run.replay")
        ...     batches = list(collector)
        ...     with ReplayLog(f"{folder}/run.replay") as log:
        ...         print([len(trajectory) for trajectory in log.trajectories()])
        [8, 8, 4]
        """
        check_whole_number("rows_at_once", rows_at_once)
        return self._trajectories(rows_at_once)

    def _trajectories(self, rows_at_once: int) -> Iterator[TensorDict]:
        waiting: deque[_Trajectory] = deque()
        newest: dict[int, _Trajectory] = {}  # by env

        windows = self._windows
        first = 0
        for number, end in enumerate(windows.ends):
            begin = windows.begins(first)
            if end - begin < rows_at_once and number + 1 < len(windows):
                continue
            if begin < end:
                self._add_parts(self.rows(begin, end), range(first, number + 1), waiting, newest)
            while waiting and waiting[0].is_over:
                yield waiting.popleft().join()
            first = number + 1

        while waiting:
            yield waiting.popleft().join()

    def _add_parts(
        self,
        batch: TensorDict,
        numbers: range,
        waiting: "deque[_Trajectory]",
        newest: "dict[int, _Trajectory]",
    ) -> None:
        """Add the rows of some windows to the trajectories that they continue or begin."""
        counts = np.concatenate([self._windows.counts(number) for number in numbers])
        envs = np.tile(np.arange(self.num_envs), len(numbers)).repeat(counts)
        first_of_env = (counts.cumsum() - counts)[counts > 0]

        starts = run_starts(batch, **self._layout.marks).numpy(force=True).copy()
        starts[first_of_env] = True
        begins = starts.nonzero()[0].tolist()
        ends = [*begins[1:], len(batch)]

        is_init = batch.get(self._layout.init).reshape(-1)
        done = batch.get(DONE).reshape(-1)
        for begin, end in zip(begins, ends, strict=True):
            env = int(envs[begin])
            trajectory = newest.get(env)
            if trajectory is None or trajectory.is_over or is_init[begin]:
                if trajectory is not None:
                    trajectory.is_over = True
                trajectory = _Trajectory([])
                newest[env] = trajectory
                waiting.append(trajectory)

            trajectory.parts.append(batch[begin:end])
            trajectory.is_over = bool(done[end - 1])

    @property
    def spec(self) -> Composite:
        """The spec of the rows, shape ``(-1,)``, as ``collector.spec`` has it: what `ReplayBuffer.note_spec` takes.

        The first call makes the env.

        Raises:
            ValueError: the env was made by a function, which was not passed.
        """
        if self._spec is None:
            with unchanged_generators():
                maker = EnvMaker(self._recipe, self._function)
                facts = maker.whole()
                self._spec = spec_of_columns(facts.keys, facts.env)
                facts.env.close()
                maker.close()
        return self._spec

    def _make_replayer(self) -> Replayer:
        """Return what makes the rows; its envs are open until the log is closed."""
        if self._replayer is None:
            maker = None
            if self.kept < len(self):
                maker = EnvMaker(self._recipe, self._function, check=self._check_columns)
            self._replayer = Replayer(self._windows, self._layout, maker, self._explain, self.num_envs)
        return self._replayer

    def _check_columns(self, facts: EnvFacts) -> None:
        """Raise CannotRemakeError if an env has other observations or actions than the log's."""
        problems = differing_columns(self._layout, facts)
        if not problems:
            return

        source = "create_env_fn" if self._function is not None else "its id"
        text = f"{self.path}: {source} makes another env than {self._recipe.name} was: {'; '.join(problems)}"
        if versions := differing_versions(self.versions, versions_here(facts)):
            text += f". Versions differ: {'; '.join(versions)}"
        raise CannotRemakeError(text)

    def check(self, rows_at_once: int = 65_536) -> None:
        """Make all rows again and compare their checksums; ReplayMismatchError if one differs.

        Args:
            rows_at_once: rows in memory at a time. Default 65,536.
        """
        check_whole_number("rows_at_once", rows_at_once)
        for first in range(0, len(self), rows_at_once):
            self.rows(first, min(first + rows_at_once, len(self)))

    def stats(self) -> dict[str, int]:
        """Return the numbers of rows, of rows kept themselves, of windows, of saved states, and of bytes on disk."""
        return {
            "rows": len(self),
            "kept": self.kept,
            "windows": len(self._windows),
            "states": len(self._windows.saves_of_all) + sum(map(len, self._windows.saves)),
            "bytes": self._folder.stats()["bytes"],
        }

    def close(self) -> None:
        """Close the envs that were made."""
        if self._replayer is not None:
            self._replayer.close()
            self._replayer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _facts(self) -> dict[str, Any]:
        """Return what `repr` and notebooks show."""
        stats = self.stats()
        return {
            "": f"{stats['rows']:,} rows in {stats['bytes']:,} bytes",
            "env": self._recipe.name,
            "num_envs": self.num_envs,
            "kept": f"{stats['kept']:,}",
        }

    def _no_rows(self) -> TensorDict:
        """Return a batch without rows, with all columns."""
        batch = TensorDict({}, [0])
        forms = [(form.key, form.dtype, form.shape) for form in (*self._layout.made, *self._layout.outputs)]
        forms += [(code.key, code.dtype, code.shape) for code in self._layout.actions]
        for key, dtype, shape in forms:
            batch.set(key, torch.zeros(0, *shape, dtype=dtype))
        return batch

    def _explain(self, row: int, env: int) -> str:
        """Return the text of the error for a first row that differs."""
        facts = EnvMaker(self._recipe, self._function).whole()
        now = versions_here(facts)
        facts.env.close()
        text = f"{self.path}: row {row:,}, of env {env}, is not what {self._recipe.name} made when it was collected"

        differs = differing_versions(self.versions, now)
        if not differs:
            return (
                f"{text}. The versions are the same: the env depends on something besides its seed, or create_env_fn "
                "makes another one"
            )
        installable = [
            f"{name}=={version}"
            for name, version in sorted(self.versions.items())
            if now.get(name) != version and name not in ("python", "machine")
        ]
        text += f". Versions differ: {'; '.join(differs)}"
        if installable:
            text += f". To have them again: pip install {' '.join(installable)}"
        return text


@dataclass
class _Trajectory:
    """A trajectory of which further rows may come.

    Attributes:
        parts: its rows so far.
        is_over: whether these are all.
    """

    parts: list[TensorDict]
    is_over: bool = False

    def join(self) -> TensorDict:
        """Return its rows, which share no memory with others."""
        parts: Any = self.parts
        joined: Any = torch.cat(parts)
        rows: TensorDict = joined
        return rows


def describe_log(log: ReplayLog, *, hint: bool = False) -> str:
    """Return a description of a log for ``flatroll inspect``; with ``hint`` it says how to verify the log."""
    stats = log.stats()
    rows = stats["rows"]
    per_row = stats["bytes"] / max(rows, 1)
    lines = [
        f"{log.path}: replay log of {log._recipe.name}, {log.num_envs} envs",
        f"{rows:,} rows in {stats['windows']:,} windows, {stats['states']:,} saved states, "
        f"{stats['bytes']:,} bytes ({per_row:.2f} a row)",
    ]

    if stats["kept"]:
        kept = np.flatnonzero(log._windows.kept)
        first = log._windows.begins(int(kept[0]))
        lines.append(f"not deterministic: {stats['kept']:,} rows, from row {first:,} on, are kept themselves")
    if log._recipe.kind == "function":
        lines.append(
            "the env was made by a function: log = ReplayLog(path, create_env_fn=make_env) reads the log, and "
            "log.check() makes all rows again"
        )
    versions = ", ".join(f"{name} {version}" for name, version in sorted(log.versions.items()))
    lines += [f"written with {versions}", ""]

    layout = log._layout
    columns = {form.key: (form.dtype, form.shape) for form in (*layout.made, *layout.outputs)}
    columns |= {code.key: (code.dtype, code.shape) for code in layout.actions}
    width = max(len(str(key)) for key in columns)
    for key in sorted(columns, key=as_tuple):
        dtype, shape = columns[key]
        lines.append(f"{key!s:<{width}}  {str(dtype).removeprefix('torch.')} {list(shape)}")
    if hint and log._recipe.kind != "function":
        lines += ["", "--verify makes all rows again and compares their checksums"]
    return "\n".join(lines)
