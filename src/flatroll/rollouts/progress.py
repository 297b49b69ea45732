"""The progress bar of a collector."""

from time import perf_counter
from typing import Any

from tensordict import TensorDict

from flatroll.layout.keys import DONE, NestedKey


class ProgressBar:
    """A tqdm bar of a collector's rows.

    It shows steps per second of collection time (tqdm's own rate includes the learner's time) and, with RewardSum in
    the stack, the mean return of ended episodes.
    """

    def __init__(self, total: int, returns: NestedKey | None) -> None:
        self._total = None if total < 0 else total
        self._returns = returns  # key of the returns
        self._postfix: dict[str, str] = {}
        self._bar: Any = None  # the tqdm bar, created at the first batch

    def show(self, batch: TensorDict, frames: int, began: float) -> None:
        """Count a batch that follows ``frames`` rows and was begun at time ``began`` (of ``perf_counter``)."""
        seconds = perf_counter() - began
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self._total, unit="frame", unit_scale=True, initial=frames)

        self._bar.update(len(batch))
        if self._returns is None:
            returns = None
        else:
            returns = batch.get(self._returns, None)

        if returns is not None and len(ended := returns[batch.get(DONE)]):
            self._postfix["return"] = f"{ended.mean().item():.1f}"
        self._postfix["steps/s"] = self._bar.format_sizeof(len(batch) / seconds)
        self._bar.set_postfix(self._postfix)

    def close(self) -> None:
        """Close the bar; the next batch opens another."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
