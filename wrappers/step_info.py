"""`StepInfo`: the entries of ``info`` as the last step returned them, also in rows that have been reset since."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from flatroll.wrappers.arrays import Array, copy_array, fill_rows, select, to_torch

_KEPT = ("final_info", "_final_info")


class StepInfo(Mapping[str, Any]):
    """A view of ``info`` whose entries are those of the step, see `VectorStream.step_info`.

    An entry is computed when it is read, so that a marker pays for what it uses.

    Args:
        info: the entries after the resets.
        final: the step's own entries of the rows that ended, ``info["final_info"]``; empty if the env returns none.
        ended: the rows whose episode ended in the step, bool ``(E,)``.
        lost: ended rows whose own entries are unknown, bool ``(E,)``; None if there are none.
        passed: names that are passed on as they are, since wrappers around the env added them.
        env: name of the env, for errors.
        path: names of the dicts around these entries, for errors.
    """

    def __init__(
        self,
        info: Mapping[str, Any],
        final: Mapping[str, Any],
        *,
        ended: Array,
        lost: Array | None,
        passed: Collection[str] = (),
        env: str = "the env",
        path: tuple[str, ...] = (),
    ) -> None:
        self._info = info
        self._final = final
        self._ended = ended
        self._lost = lost
        self._passed = passed
        self._env = env
        self._path = path

    @override
    def __iter__(self) -> Iterator[str]:
        names = {**self._info, **self._final}
        return (name for name in names if self._path or name not in _KEPT)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    @override
    def __repr__(self) -> str:
        return f"StepInfo({list(self)})"

    @override
    def __getitem__(self, name: str) -> Any:
        if name in _KEPT and not self._path:
            raise KeyError(f"{name!r} is merged into the other entries")
        if name in self._passed:
            return self._info[name]

        now = self._info.get(name)
        last = self._final.get(name)
        if now is None and last is None:
            # The KeyError of a dict, or None where that is the entry.
            if name in self._info:
                return self._info[name]
            return self._final[name]

        if isinstance(now, Mapping) or isinstance(last, Mapping):
            if not isinstance(now, Mapping):
                now = {}
            if not isinstance(last, Mapping):
                last = {}
            return StepInfo(
                now,
                last,
                ended=self._ended,
                lost=self._lost,
                env=self._env,
                path=(*self._path, name),
            )

        entry = self._merge(name, now, last)
        if self._lost is None:
            return entry
        return self._hide(name, entry, self._lost)

    def _merge(self, name: str, now: Any, last: Any) -> Any:
        """Return an entry with its last values in the ended rows; 0, False or None where the step returned none."""
        if last is None:
            if not self._has_rows(now):
                return now
            empty = None if now.dtype == object else False
            return fill_rows(copy_array(now), rows_like(self._ended, now), empty)

        if now is None or not self._has_rows(last):
            return last

        if not self._has_rows(now) or now.shape != last.shape:
            raise ValueError(
                f"{self._named(name)} of {self._env} must have one shape, got {np.shape(now)}, and "
                f"{np.shape(last)} in info['final_info']"
            )
        return select(rows_like(self._ended, now), last, now)

    def _hide(self, name: str, entry: Any, lost: Array) -> Any:
        """Return the entry with NaN in the lost rows; ValueError if it has no NaN and a row is lost."""
        if not self._has_rows(entry):
            return entry

        rows = rows_like(lost, entry)
        if isinstance(entry, Tensor):
            floating = entry.is_floating_point()
        else:
            floating = entry.dtype.kind == "f"
        if floating:
            return fill_rows(copy_array(entry), rows, float("nan"))

        if name.startswith("_"):  # Gymnasium's mask of the rows that returned the entry
            return fill_rows(copy_array(entry), rows, False)
        if not bool(rows.any()):  # on a device this syncs; only entries without NaN come here
            return entry
        raise ValueError(
            f"{self._named(name)} of a step that ends an episode is unknown: {self._env} resets ended envs in the same "
            f"step and gives no info['final_info'], so the value of env {int(rows.nonzero()[0][0])} may be that of the "
            "reset. Let the env pass the last step's entries as a dict, info['final_info'], or make it with "
            "autoreset_mode='NextStep'"
        )

    def _has_rows(self, entry: Any) -> bool:
        """Return whether an entry is an array with one row per env."""
        return isinstance(entry, np.ndarray | Tensor) and tuple(entry.shape[:1]) == tuple(self._ended.shape)

    def _named(self, name: str) -> str:
        return "info" + "".join(f"[{part!r}]" for part in (*self._path, name))


def rows_like(rows: Array, entry: Array) -> Array:
    """Return a mask of rows in the framework and on the device of an entry of ``info``, which may be NumPy's."""
    if isinstance(entry, Tensor):
        return to_torch(rows, entry.device)
    if isinstance(rows, Tensor):
        return rows.numpy(force=True)
    return rows
