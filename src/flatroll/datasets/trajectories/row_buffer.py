"""The buffer of the rows of trajectories, which nobody else changes."""

from pathlib import Path
from typing import Any, NoReturn

from tensordict import TensorDictBase
from typing_extensions import override

from flatroll.buffers import ReplayBuffer


class RowBuffer(ReplayBuffer):
    """The rows of a `TrajectoryReplayBuffer`, to be sampled and read. Only that one stores and removes rows, since it
    keeps what is known of each trajectory; the methods of `ReplayBuffer` that would do so raise RuntimeError.
    """

    def store(self, rows: TensorDictBase) -> None:
        """Store the rows of whole trajectories."""
        super().extend(rows)

    def forget(self) -> None:
        """Remove all rows."""
        super().empty()

    @override
    def extend(self, data: Any, final: Any = None, *, update_priority: bool | None = None) -> NoReturn:
        raise _refusal("extend", "add_trajectories")

    @override
    def empty(self) -> NoReturn:
        raise _refusal("empty", "clear")

    @override
    def load_version(self, path: Path, number: int | None, strict: bool) -> NoReturn:
        raise _refusal("loads", "load_checkpoint (of what save_checkpoint wrote)")

    @override
    def load_state_dict(self, state: dict[str, Any]) -> NoReturn:
        raise _refusal("load_state_dict", "load_checkpoint (of what save_checkpoint wrote)")


def _refusal(what: str, instead: str) -> RuntimeError:
    return RuntimeError(
        f"{what} would change rows of trajectories without the TrajectoryReplayBuffer's knowledge: call its {instead}"
    )
