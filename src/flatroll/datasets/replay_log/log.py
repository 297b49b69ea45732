"""`ReplayLog`: reads a log, and makes its rows again."""

from collections.abc import Callable
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from flatroll.datasets.replay_log.recipe import EnvMaker, Recipe, differing_versions, versions_here
from flatroll.datasets.replay_log.recorder import read_description, unchanged_generators
from flatroll.datasets.replay_log.replay import Layout, Replayer
from flatroll.datasets.replay_log.windows import Windows
from flatroll.disk.folder import Folder
from flatroll.layout.checks import check_function, check_path, check_whole_number
from flatroll.layout.inspect.text import Facts


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
        create_env_fn: makes the env, or vector env, that was collected. Needed if it is not one of Gymnasium's
            registry.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: the folder holds something else, or is damaged; the log needs ``create_env_fn``.

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

    def __len__(self) -> int:
        """Number of rows."""
        return self._windows.rows

    def __getitem__(self, rows: slice | int) -> TensorDict:
        """Return rows of a slice of step 1, or one row; see `rows`."""
        if not isinstance(rows, slice):
            number = range(len(self))[rows]
            row: TensorDict = self.rows(number, number + 1)[0]
            return row

        first, end, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of a log must have step 1, got {step}")
        return self.rows(first, max(first, end))

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

        Few rows are made by stepping only the envs that they are of, from the episode's beginning or a little before
        it; many by stepping all envs from the last seed on. Reading on where the last call ended goes on from there.

        Args:
            first: number of a row. Default 0.
            end: number of a row. Default ``len(log)``.

        Raises:
            IndexError: the log does not have these rows.
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

    def _make_replayer(self) -> Replayer:
        """Return what makes the rows; its envs are open until the log is closed."""
        if self._replayer is None:
            maker = EnvMaker(self._recipe, self._function) if self.kept < len(self) else None
            self._replayer = Replayer(self._windows, self._layout, maker, self._explain, self.num_envs)
        return self._replayer

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


def describe_log(log: ReplayLog) -> str:
    """Return a description of a log for ``flatroll inspect``."""
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
        lines.append("the env was made by a function: ReplayLog(path, create_env_fn=make_env) reads it")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(log.versions.items()))
    lines += [f"written with {versions}", ""]

    width = max(len(str(form.key)) for form in log._layout.made)
    lines += [
        f"{form.key!s:<{width}}  {str(form.dtype).removeprefix('torch.')} {list(form.shape)}"
        for form in log._layout.made
    ]
    return "\n".join(lines)
