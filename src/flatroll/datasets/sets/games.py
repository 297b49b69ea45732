"""`AtariDQNExperienceReplay` and `GenDGRLExperienceReplay`: games."""

from collections.abc import Iterator
from typing import Any, Unpack

from tensordict import TensorDictBase
from typing_extensions import override

from flatroll.datasets.base import BaseDatasetExperienceReplay, DatasetOptions, slices
from flatroll.datasets.formats.atari import read_atari_dqn
from flatroll.datasets.formats.gen_dgrl import read_gen_dgrl
from flatroll.datasets.formats.robots import files_in
from flatroll.datasets.ids import unknown_id
from flatroll.layout.keys import TRAJ_IDS

_PROCGEN = [
    "bigfish",
    "bossfight",
    "caveflyer",
    "chaser",
    "climber",
    "coinrun",
    "dodgeball",
    "fruitbot",
    "heist",
    "jumper",
    "leaper",
    "maze",
    "miner",
    "ninja",
    "plunder",
    "starpilot",
]
_PARTS = ("1M_E", "1M_S", "10M", "25M", "level_1_S", "level_40_S", "level_1_E", "level_40_E")


class AtariDQNExperienceReplay(BaseDatasetExperienceReplay):
    """A replay log of an Atari DQN agent (`read_atari_dqn`): single frames, or stacks of them.

    Args:
        dataset_id: game and run, such as ``"Pong/5"``.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the folder of the ``.gz`` files.
            ``frame_stack={"observation": 4}`` gives stacks ``[4, 84, 84]``; on disk every frame stands once.
        num_slices, slice_len: draw slices of games, so many or so long, instead of single rows.
        strict_len: slices of the whole ``slice_len`` only. Default True.
        replacement: draw with replacement. Default True.

    Raises:
        ValueError: no such run.
    """

    kind = "atari"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        strict_len: bool = True,
        replacement: bool = True,
        **options: Unpack[DatasetOptions],
    ) -> None:
        stacks = dict(options.get("frame_stack") or {})
        if set(stacks) - {"observation"}:
            raise ValueError(f"frame_stack can name 'observation', got {stacks}")
        self._stack = stacks.get("observation")
        slices(options, num_slices, slice_len, strict_len, replacement)
        super().__init__(dataset_id, batch_size, **options)

    @override
    def _check_id(self) -> None:
        game, _, run = self.dataset_id.partition("/")
        if not game.isalnum() or run not in ("1", "2", "3", "4", "5"):
            raise ValueError(
                f"dataset_id must be a game and a run from 1 to 5, 'Pong/5', got {self.dataset_id!r}"
            )

    @override
    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"options": {"frame_stack": self._stack}}

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return read_atari_dqn(source, frame_stack=self._stack)


class GenDGRLExperienceReplay(BaseDatasetExperienceReplay):
    """A set of Gen-DGRL: games of Procgen, an archive of pickled arrays (`read_gen_dgrl`); no code in it is run.

    Args:
        dataset_id: game and category, such as ``"bigfish-1M_E"``.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the ``.tar.xz`` file.

    Raises:
        ValueError: no such set.
    """

    kind = "gen_dgrl"
    #: Names of all sets.
    available_datasets = tuple(f"{game}-{part}" for game in _PROCGEN for part in _PARTS)

    @override
    def _check_id(self) -> None:
        if self.dataset_id not in self.available_datasets:
            raise ValueError(
                f"dataset_id must be a game and a category, such as 'bigfish-1M_E', see available_datasets: "
                f"{unknown_id(type(self).__name__, self.dataset_id, self.available_datasets)}"
            )

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        episodes = 0
        for path in files_in(source, (".xz", ".tar", ".gz")):
            first = episodes
            for episode in read_gen_dgrl(path):
                episode[TRAJ_IDS] = episode[TRAJ_IDS] + first
                episodes = int(episode[TRAJ_IDS][-1]) + 1
                yield episode
