"""The interface of a collector's log, and the registry of what opens one.

The room that writes logs, `flatroll.datasets`, is in the outer ring: it registers its function here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from typing import Any, Protocol

from tensordict import TensorDict

from flatroll.layout.keys import NestedKey
from flatroll.rollouts.env_facts import EnvFacts
from flatroll.wrappers.arrays import Array


@dataclass(frozen=True, kw_only=True)
class LoggedEnv:
    """How the env of a log was made.

    Attributes:
        facts: what the collector knows of the env.
        make: the function that the collector was given, if it was given one.
        max_frames_per_traj: see `Collector`.
        info_keys: see `Collector`.
    """

    facts: EnvFacts
    make: Callable[[], Any] | None
    max_frames_per_traj: int | None
    info_keys: tuple[NestedKey, ...]


class StepLog(Protocol):
    """Receives the resets and rows of one runner."""

    def choose_seed(self, seed: int | None, *, continues: bool) -> int | None:
        """Return the seed of the env's next reset.

        Args:
            seed: that of the collector; None if it has none.
            continues: whether all steps since the last reset have been recorded.
        """

    def note_reset(self, seed: int | None) -> None:
        """Record that all envs were reset with this seed."""

    def note_rows(self, batch: TensorDict, final: TensorDict | None, mask: Array) -> None:
        """Record a batch, before its window is cleared.

        Args:
            batch: flat rows ``[N]``.
            final: next observations that no row holds, if the batch has no others.
            mask: bool ``[steps, E]``, the cells of the runner's window that are the rows.
        """

    def close(self) -> None:
        """End the log."""


Opener = Callable[[str | PathLike[str], LoggedEnv, Any], StepLog]

_openers: list[Opener] = []


def register_log(opener: Opener) -> None:
    """Set the function that opens a log, given its path, the env and the runner; the first one stays."""
    if not _openers:
        _openers.append(opener)


def open_log(path: str | PathLike[str], env: LoggedEnv, runner: Any) -> StepLog:
    """Open the log of a runner, to append to it."""
    if not _openers:
        import_module("flatroll.datasets")  # registers its function
    return _openers[0](path, env, runner)
