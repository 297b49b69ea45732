"""The progress bar of a collector."""

from typing import Any

from tensordict import TensorDict

from flatroll.layout.keys import DONE, NestedKey


class Progress:
    """A tqdm bar of the rows collected; it tells the mean return of each batch where RewardSum is in the stack.

    Args:
        total: rows in all, -1 for no end.
        done: rows collected already.
        returns: the key of the returns, or None.
    """

    def __init__(self, total: int, done: int, returns: NestedKey | None = None) -> None:
        from tqdm.auto import tqdm

        self._returns = returns
        self._bar: Any = tqdm(total=None if total < 0 else total, unit="frame", unit_scale=True, initial=done)

    def show(self, batch: TensorDict) -> None:
        """Count the rows of a batch."""
        self._bar.update(len(batch))
        returns = None if self._returns is None else batch.get(self._returns, None)
        if returns is not None:
            ended = returns[batch.get(DONE)]
            if len(ended):
                self._bar.set_postfix({"return": f"{ended.mean().item():.1f}"})

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
