"""The columns that ``info_keys`` asks for: entries of ``info``, as they came with the observation and with the step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from flatroll.layout.keys import NestedKey, as_tuple, next_key
from flatroll.wrappers.arrays import Array, fill_rows, own, select, to_torch
from flatroll.wrappers.source import layers
from flatroll.wrappers.stream import VectorStream


class InfoColumns:
    """Finds the chosen entries of an env's ``info``, and records those of its steps."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], stream: VectorStream, names: Sequence[NestedKey]
    ) -> None:
        self._stream, self._names = stream, names
        self._device = stream.capabilities.device
        self._on_host = stream.capabilities.framework == "numpy"
        # RecordEpisodeStatistics leaves its entry, of the step, where under SAME_STEP those of the reset are.
        around = (*layers(env), *layers(stream.source.env))
        self._statistics = {layer._stats_key for layer in around if hasattr(layer, "_stats_key")}
        self._seen: set[NestedKey] = set()

    def clear(self) -> None:
        """Forget which entries came, with the columns that they came into."""
        self._seen.clear()

    def record(self, info: dict[str, Any], window: Any) -> None:
        """Put the entries of the step just made into a `Window`.

        Gymnasium moves those of ended SAME_STEP rows to ``final_info``.
        """
        stream = self._stream
        final = info.get("final_info") if stream.same_step else None
        for name in self._names:
            value = self.entry(info, name)
            last = self.entry(final, name) if isinstance(final, dict) else None
            if last is not None:
                value = last if value is None else select(stream.ended, last, value)
            elif final is None or value is None or as_tuple(name)[0] in self._statistics:
                pass
            elif value.shape[:1] == (stream.num_envs,):
                value = fill_rows(own(value), stream.ended, False)  # it belongs to the next episode's reset
            window.put_loose(next_key(name), value)
            if value is not None and name not in self._seen:
                self._seen.add(name)
                if name not in window.columns:  # it came with no observation yet: all batches have both
                    zeros = torch.zeros_like(value) if isinstance(value, Tensor) else np.zeros_like(value)
                    window.put_loose(name, zeros)

    def entry(self, info: dict[str, Any], name: NestedKey) -> Array | None:
        """An entry of ``info`` where the env's arrays are; None if it is not there."""
        value: Any = info
        for part in as_tuple(name):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            return None
        if isinstance(value, dict):
            entries = [(*as_tuple(name), key) for key in value if not key.startswith("_")]
            raise TypeError(
                f"info_keys has {name!r}, which is a dict: name its entries, info_keys={entries}. (For returns and "
                "lengths of episodes flatroll.wrappers.RewardSum and StepCounter give a number at every step)"
            )
        if self._on_host:
            return value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
        return to_torch(value, self._device)

    def check_seen(self, info: dict[str, Any]) -> None:
        """Raise KeyError if an entry was in no step's info; ``info`` is the last one."""
        missing = [name for name in self._names if name not in self._seen]
        if missing:
            names = sorted(key for key in info if not key.startswith("_"))
            raise KeyError(
                f"info_keys={missing} were in no step's info; the last one had {names}. An entry that comes only "
                "now and then must come in the first batch: take more frames_per_batch. (For the return of episodes: "
                "flatroll.wrappers.RewardSum, whose entry comes with every step)"
            )
