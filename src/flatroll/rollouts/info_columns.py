"""`InfoColumns`: the chosen entries of an env's ``info``, as columns."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from flatroll.layout.keys import ACTION_MASK, NestedKey, as_tuple, next_key
from flatroll.rollouts.window import Window
from flatroll.wrappers.arrays import Array, copy_array, fill_rows, select, to_torch
from flatroll.wrappers.markers import MarkerWrapper
from flatroll.wrappers.source import layers
from flatroll.wrappers.stream import VectorStream


class InfoColumns:
    """Finds and records the chosen entries of an env's ``info``."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], stream: VectorStream, names: Sequence[NestedKey]
    ) -> None:
        self._stream = stream
        self._names = names
        self._device = stream.capabilities.device
        self._on_host = stream.capabilities.framework == "numpy"

        # RecordEpisodeStatistics writes the step's entry where SAME_STEP keeps the entries of the reset.
        around = (*layers(env), *layers(stream.source.env))
        self._of_step = {layer._stats_key for layer in around if hasattr(layer, "_stats_key")}

        # So do markers that describe the step; others describe the observation after the reset.
        markers = [layer for layer in layers(env) if isinstance(layer, MarkerWrapper)]
        self._of_step |= {marker.info_name for marker in markers if marker.describes_step}
        self._of_reset = {marker.info_name for marker in markers} - self._of_step
        self._seen: set[NestedKey] = set()
        self._lost: dict[NestedKey, Tensor] = {}  # on a device: whether an unknown entry was recorded

    def clear(self) -> None:
        """Forget which entries were recorded, together with their columns."""
        self._seen.clear()
        self._lost.clear()

    @property
    def seen(self) -> list[NestedKey]:
        """The entries that were recorded."""
        return list(self._seen)

    @seen.setter
    def seen(self, names: Iterable[NestedKey]) -> None:
        self._seen = set(names)

    def record(self, info: dict[str, Any], window: Window) -> None:
        """Record the entries of the last step in a `Window`.

        Gymnasium moves the entries of ended SAME_STEP rows to ``final_info``. Where such a row has none, its entries
        may be those of the reset: floating ones become NaN, and others, which cannot say that they are unknown, are
        an error.

        Raises:
            ValueError: an entry of an ended row is unknown and not floating (on a device: `check_known` raises it).
        """
        final = None
        if self._stream.same_step:
            final = info.get("final_info")
        lost = self._lost_rows(info)

        for name in self._names:
            from_step = as_tuple(name)[0] in self._of_step
            value = self._last_value(name, info, final, from_step)
            if lost is not None and value is not None and not from_step:
                value = self._hide(name, value, lost)
            window.put_loose(next_key(name), value)

            if value is not None and name not in self._seen:
                self._seen.add(name)
                # The entry has no root value yet, which batches need.
                if name not in window.columns:
                    if isinstance(value, Tensor):
                        zeros = torch.zeros_like(value)
                    else:
                        zeros = np.zeros_like(value)
                    window.put_loose(name, zeros)

    def _last_value(self, name: NestedKey, info: dict[str, Any], final: Any, from_step: bool) -> Array | None:
        """Return an entry after the step: of ended rows from ``final_info``, which has it or not."""
        stream = self._stream
        value = self.entry(info, name)
        last = None
        if isinstance(final, dict):
            last = self.entry(final, name)

        if last is not None:
            if value is None:
                return last
            return select(stream.ended, last, value)
        if final is None or value is None or from_step:
            return value
        if value.shape[:1] == (stream.num_envs,):
            # it belongs to the reset of the next episode
            return fill_rows(copy_array(value), stream.ended, False)
        return value

    def _lost_rows(self, info: dict[str, Any]) -> Array | None:
        """Return the rows that the env itself has reset without ``final_info``, bool ``[E]``; None if none is."""
        stream = self._stream
        if not stream.resets_itself or stream.any_ended is False:
            return None
        if not isinstance(info.get("final_info"), dict):
            return stream.ended

        told = info.get("_final_info")
        if told is None:  # it is about all ended rows
            return None

        if isinstance(stream.ended, np.ndarray):
            lost = stream.ended & ~np.asarray(told, bool)
        else:
            lost = stream.ended & ~to_torch(told, self._device).bool()

        if not self._on_host or lost.any():
            return lost
        return None

    def _hide(self, name: NestedKey, value: Array, lost: Array) -> Array:
        """Return the entry with NaN in the lost rows, see `record`."""
        if value.shape[:1] != (self._stream.num_envs,):
            return value
        if as_tuple(name)[0] == ACTION_MASK or as_tuple(name)[0] in self._of_reset:
            # Masks of last observations may be empty, and a marker is not about them.
            return fill_rows(copy_array(value), lost, False)

        if isinstance(value, Tensor):
            floating = value.is_floating_point()
        else:
            floating = value.dtype.kind in "fc"

        if floating:
            return fill_rows(copy_array(value), lost, float("nan"))
        if self._on_host:
            self._refuse_lost(name, lost, value)
        else:  # asking whether a row is lost would sync at each step
            before = self._lost.get(name)
            self._lost[name] = lost.any() if before is None else before | lost.any()

        return value

    def check_known(self) -> None:
        """Raise ValueError if an entry of an ended row was unknown and not floating; syncs with a device if needed."""
        for name, some in self._lost.items():
            if bool(some):
                self._lost = {}
                self._refuse_lost(name)

    def _refuse_lost(
        self, name: NestedKey, rows: Array | None = None, value: Array | None = None
    ) -> NoReturn:
        env = type(self._stream.source.env).__name__
        where = ""
        if rows is not None and value is not None:
            number = int(np.flatnonzero(rows)[0])
            where = f" (env {number} ended, and info says {value[number].tolist()})"

        raise ValueError(
            f"info_keys={[name]}: {env} resets ended envs in the same step and gives no info['final_info'], so "
            f"{name!r} of an episode's last step is unknown: the value in info may be that of the reset{where}. Let "
            "the env pass the last step's entries as a dict, info['final_info'] (dict(info) if these are they), make "
            "it with autoreset_mode=NEXT_STEP, or leave the entry out"
        )

    def entry(self, info: dict[str, Any], name: NestedKey) -> Array | None:
        """Return an entry of ``info`` on the env's device; None if it is missing."""
        value: Any = info
        for part in as_tuple(name):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            return None
        if isinstance(value, dict):
            entries = [(*as_tuple(name), key) for key in value if not str(key).startswith("_")]
            raise TypeError(
                f"info_keys has {name!r}, which is a dict: name its entries, info_keys={entries}. (For returns and "
                "lengths of episodes flatroll.wrappers.RewardSum and StepCounter give a number at every step)"
            )

        if isinstance(value, np.ndarray) and value.dtype == object:
            value = join_numbers(name, value)
            if value is None:
                return None

        if self._on_host:
            if isinstance(value, Tensor):
                return value.numpy(force=True)
            return np.asarray(value)
        return to_torch(value, self._device)

    def check_seen(self, info: dict[str, Any]) -> None:
        """Raise KeyError if an entry was in no step's info; ``info`` is the last info."""
        missing = [name for name in self._names if name not in self._seen]
        if missing:
            names = sorted(str(key) for key in info if not str(key).startswith("_"))
            raise KeyError(
                f"info_keys={missing} were in no step's info; the last one had {names}. A rare entry must "
                "occur in the first batch: use a larger frames_per_batch, or, for episode returns, "
                "flatroll.wrappers.RewardSum"
            )


def join_numbers(name: NestedKey, entries: Array) -> Array | None:
    """Convert an object array ``[E]`` of equal kinds of numbers; 0 or False where an env is silent (None).

    Gymnasium's vector envs keep the infos of single envs as objects where they do not know the type, as of NumPy's
    bools.
    """
    told = np.array([one is not None for one in entries], bool)
    if not told.any():
        return None

    try:
        known = np.array(entries[told].tolist())
    except ValueError:  # of several shapes
        known = entries[told]

    if known.dtype.kind not in "biufc":
        raise TypeError(
            f"info_keys has {name!r}, whose values must be numbers, or arrays of one shape, got {entries[told][0]!r} "
            f"in env {int(np.flatnonzero(told)[0])}: leave it out, or turn it into numbers in a wrapper around the "
            "single env"
        )

    filled = np.zeros((len(entries), *known.shape[1:]), known.dtype)
    filled[told] = known
    return filled
