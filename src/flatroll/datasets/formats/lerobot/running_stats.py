"""Mean, spread and range of columns that are seen piece by piece."""

from typing import Any

import numpy as np

from flatroll.layout.export import Array


class RunningStats:
    """Statistics of rows ``[n, *F]``: for each number of a row, or, of images ``[n, H, W, C]``, for each channel.

    Values are counted in float64; of images, divided by 255. Means and sums of squares of pieces are joined as in
    Chan, Golub, LeVeque (1979), which loses no digits where the mean is large.

    >>> stats = RunningStats()
    >>> stats.add(np.array([1.0, 3.0])), stats.add(np.array([5.0]))
    (None, None)
    >>> stats.summary()["mean"], stats.summary()["max"], stats.summary()["count"]
    ([3.0], [5.0], [3])
    """

    def __init__(self, images: bool = False) -> None:
        self._images = images
        self._rows = self._values = 0
        self._mean: Any = 0.0
        self._squares: Any = 0.0  # summed squares of what values differ from the mean
        self._low: Any = np.inf
        self._high: Any = -np.inf

    def add(self, rows: Array) -> None:
        """Count these rows too."""
        values = rows.astype(np.float64).reshape(len(rows), -1)
        if self._images:
            values = rows.reshape(-1, rows.shape[-1]) / 255.0
        # Infinite values, and squares that are, are as the columns have them: no reason to warn.
        with np.errstate(over="ignore", invalid="ignore"):
            mean, total = values.mean(0), self._values + len(values)
            apart = mean - self._mean
            self._squares += ((values - mean) ** 2).sum(0) + apart**2 * (self._values * len(values) / total)
            self._mean = self._mean + apart * (len(values) / total)
        self._low, self._high = np.minimum(self._low, values.min(0)), np.maximum(self._high, values.max(0))
        self._rows, self._values = self._rows + len(rows), total

    def summary(self) -> dict[str, list[Any]]:
        """Return min, max, mean, std and count, as LeRobot's ``stats.json`` has them."""
        spread = np.sqrt(self._squares / max(self._values, 1))
        numbers = {"min": self._low, "max": self._high, "mean": self._mean, "std": spread}
        shaped = {
            name: (value[:, None, None] if self._images else value).tolist()
            for name, value in numbers.items()
        }
        return {**shaped, "count": [self._rows]}
