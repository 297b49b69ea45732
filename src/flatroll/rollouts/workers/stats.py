"""`Tally`: counts what a worker has delivered, for ``stats()``."""

from dataclasses import dataclass
from typing import Any

from flatroll.rollouts.workers.messages import Note


@dataclass
class Tally:
    """Counts of the workers that stood at one place of the team, one after the other."""

    frames: int = 0
    windows: int = 0
    held: int = 0
    waited: float = 0.0
    lag_least: int | None = None
    lag_most: int | None = None
    lag_sum: float = 0.0
    lag_count: int = 0

    def count(self, note: Note, fresh: int, version: int) -> None:
        """Count a window that was delivered while the policy had this version."""
        self.frames += fresh
        self.windows += 1
        self.held, self.waited = note.held, note.waited
        if note.versions is not None:
            oldest, mean, newest = note.versions
            least, most = version - newest, version - oldest
            self.lag_least = least if self.lag_least is None else min(self.lag_least, least)
            self.lag_most = most if self.lag_most is None else max(self.lag_most, most)
            self.lag_sum += version - mean
            self.lag_count += 1

    def facts(self) -> dict[str, Any]:
        """The counts by name."""
        mean = self.lag_sum / self.lag_count if self.lag_count else None
        return {
            "frames": self.frames,
            "windows": self.windows,
            "rows_held": self.held,
            "waited": self.waited,
            "policy_lag": {"min": self.lag_least, "mean": mean, "max": self.lag_most},
        }
