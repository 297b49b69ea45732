"""Replay logs of Atari DQN agents, gzipped NumPy arrays of single frames: `read_atari_dqn` and its data set class."""

import gzip
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay, DatasetOptions, slices
from flatroll.datasets.formats.npy import ArrayStream
from flatroll.layout.checks import check_path
from flatroll.layout.export import Array, from_numpy

_NAME = re.compile(r"\$store\$_observation_ckpt\.([0-9]{1,9})\.gz")
_KINDS = ("observation", "action", "reward", "terminal")
_MOST_PER_BYTE = 1100  # DEFLATE expands one byte to at most 1032


def read_atari_dqn(
    path: str | Path, *, frame_stack: int | None = None, chunk_rows: int = 2048
) -> Iterator[TensorDict]:
    """Yield the steps of a replay log as flat batches, part after part, at most ``chunk_rows`` rows at a time.

    The folder has ``$store$_observation_ckpt.N.gz`` (uint8 ``[n, 84, 84]``), ``…_action_…``, ``…_reward_…`` and
    ``…_terminal_…`` (``[n]``) for each part N. The frame after the end of a game, or of a part, is in no file: the row
    has its own one there, and ``("collector", "next_known")`` is False. Games have no truncation; a part's last game
    is cut.

    Args:
        path: of the folder.
        frame_stack: give stacks ``[frame_stack, 84, 84]`` of the game's last frames, zeros before its first one.
            Default: single frames.
        chunk_rows: default 2048, 14 MB of frames.

    Raises:
        FileNotFoundError: no such files, or one of the four is missing.
        ValueError: they differ in their rows, or a file is damaged or claims more than it can hold.

    Source: Agarwal, Schuurmans & Norouzi, An Optimistic Perspective on Offline Reinforcement Learning (2020).
    """
    folder = check_path("path", path).absolute()
    parts = sorted(int(match[1]) for file in folder.iterdir() if (match := _NAME.fullmatch(file.name)))
    if not parts:
        raise FileNotFoundError(f"{folder} has no $store$_observation_ckpt.<number>.gz")

    games = 0
    for part in parts:
        names = {kind: folder / f"$store$_{kind}_ckpt.{part}.gz" for kind in _KINDS}
        if missing := [name.name for name in names.values() if not name.is_file()]:
            raise FileNotFoundError(f"{folder} has no {missing[0]}")
        for batch in _part(names, games, frame_stack, chunk_rows):
            games = int(batch["collector", "traj_ids"][-1])
            yield batch
        games += 1


def _part(
    names: dict[str, Path], game: int, frame_stack: int | None, chunk_rows: int
) -> Iterator[TensorDict]:
    with ExitStack() as stack:
        opened = {kind: stack.enter_context(gzip.open(name)) for kind, name in names.items()}
        streams = {
            kind: ArrayStream(file, str(names[kind]), names[kind].stat().st_size * _MOST_PER_BYTE)  # type: ignore[arg-type]
            for kind, file in opened.items()
        }
        counts = {names[kind].name: stream.rows for kind, stream in streams.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"{names['observation'].parent}: the files of a part must have one row for each step, got {counts}"
            )
        yield from _steps(streams, game, frame_stack, chunk_rows)


def _steps(
    streams: dict[str, ArrayStream], game: int, frame_stack: int | None, chunk_rows: int
) -> Iterator[TensorDict]:
    """Yield the rows of one part; of the frames one more is read, that of the row after."""
    total = streams["observation"].rows
    first = 0
    begins = True
    depth = frame_stack or 1
    frames = streams["observation"].read(1)

    # Frames before the first row, for its stack.
    history = np.zeros((depth - 1, *frames.shape[1:]), frames.dtype)
    age = 0  # of the first row, within its game

    while first < total:
        count = min(chunk_rows, total - first)
        frames = np.concatenate([frames, streams["observation"].read(count - (first + count == total))])
        columns = {kind: streams[kind].read(count) for kind in _KINDS[1:]}

        terminal = columns["terminal"].astype(bool)
        starts = np.concatenate([[begins], terminal[:-1]])
        known = ~terminal
        if first + count == total:
            known[-1] = False
        later = np.where(known, np.arange(1, count + 1), np.arange(count))  # index of each row's next frame

        seen: Array = frames
        run = np.zeros(count, np.int64)
        if frame_stack:
            run = np.maximum.accumulate(np.where(starts, np.arange(count), -age))
            seen = _stacks(np.concatenate([history, frames]), np.arange(count) - run, depth, terminal)

        yield from_numpy(
            {
                "observation": seen[:count],
                "action": columns["action"],
                "is_init": starts[:, None],
                "collector.traj_ids": game + np.cumsum(starts) - begins,
                "collector.next_known": known,
                "next.observation": seen[later],
                "next.reward": columns["reward"].astype(np.float32).reshape(-1, 1),
                "next.terminated": terminal[:, None],
                "next.truncated": np.zeros((count, 1), bool),
                "next.done": terminal[:, None],
            }
        )

        game += int(starts.sum()) - begins + int(terminal[-1])
        if frame_stack:
            age = 0 if terminal[-1] else int(count - run[-1])
            history = np.concatenate([history, frames[:count]])[count:]
        begins = bool(terminal[-1])
        first = first + count
        frames = frames[count:]


def _stacks(frames: Array, ages: Array, depth: int, terminal: Array) -> Any:
    """Stacks ``[N or N + 1, depth, *frame]`` of frames that have ``depth - 1`` more before them.

    Args:
        frames: ``[depth - 1 + M, *frame]``, M is N, or N + 1 if the row after is there.
        ages: int64 ``[N]``, how many rows of the same game come before each row.
        depth: frames of a stack.
        terminal: bool ``[N]``.
    """
    after = 0 if terminal[-1] else ages[-1] + 1
    ages = np.append(ages, after)[: len(frames) - depth + 1]
    stacks = np.lib.stride_tricks.sliding_window_view(frames, depth, axis=0)
    stacks = np.moveaxis(stacks, -1, 1).copy()

    for back in range(1, depth):  # the frame `back` steps ago belongs to another game
        stacks[ages < back, depth - 1 - back] = 0
    return stacks


class AtariDQNExperienceReplay(BaseDatasetExperienceReplay):
    """A replay log of an Atari DQN agent (`read_atari_dqn`): single frames, or stacks of them.

    Args:
        dataset_id: game and run, such as ``"Pong/5"``.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the folder of the ``.gz`` files.
            ``frame_stack={"observation": 4}`` gives stacks ``[4, 84, 84]``; on disk every frame is stored once.
        num_slices, slice_len: draw slices of games, this many or of this length, instead of single rows.
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
            raise ValueError(f"frame_stack can only name 'observation', got {stacks}")
        self._stack = stacks.get("observation")
        slices(options, num_slices, slice_len, strict_len, replacement)
        super().__init__(dataset_id, batch_size, **options)

    @override
    def _check_id(self) -> None:
        game, _, run = self.dataset_id.partition("/")
        if not game.isalnum() or run not in ("1", "2", "3", "4", "5"):
            raise ValueError(
                f"dataset_id must be a game and a run from 1 to 5, such as 'Pong/5', got {self.dataset_id!r}"
            )

    @override
    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"options": {"frame_stack": self._stack}}

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return read_atari_dqn(source, frame_stack=self._stack)
