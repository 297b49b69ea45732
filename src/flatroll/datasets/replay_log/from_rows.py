"""Writes a log of rows that were collected without one: plays their actions, and compares every row."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.datasets.replay_log.digests import digest_rows
from flatroll.datasets.replay_log.feed import Ints, Turns
from flatroll.datasets.replay_log.replay import ReplayMismatchError
from flatroll.disk.beside import write_beside
from flatroll.layout.checks import check_key_names
from flatroll.layout.keys import ACTION, ENV, ENV_STEP, ID_BITS, TRAJ_IDS, NestedKey, as_tuple
from flatroll.layout.tensordict_seam import get_entry, leaves
from flatroll.rollouts.arguments import EnvSource
from flatroll.rollouts.batch_columns import ColumnKeys
from flatroll.rollouts.collector import Collector
from flatroll.wrappers.adapt_env import find_stream

Columns = dict[NestedKey, Tensor]


def write_log(
    path: Path,
    batches: Sequence[TensorDictBase],
    create_env_fn: EnvSource,
    *,
    seed: int | None,
    options: Mapping[str, Any],
) -> None:
    """Write a log of batches; see `flatroll.datasets.ReplayLog.from_rows`."""
    columns = _join(batches)
    ids = columns[TRAJ_IDS].cpu().numpy()
    options = {**options, "track_envs": ENV in columns}

    with Collector(create_env_fn, frames_per_batch=1, **options) as probe:
        env: Any = probe.env
        made = ColumnKeys(env, check_key_names("info_keys", options["info_keys"]))
        num_envs = env.num_envs
    if ENV in columns:
        made.claim("track_envs", ENV, ENV_STEP)

    repeated = {key: column for key, column in columns.items() if is_action(key) or not made.has_writer(key)}
    envs = (ids & ((1 << ID_BITS) - 1)) % num_envs
    played = PlayedRows(repeated, envs, num_envs)
    with (
        write_beside(path) as beside,
        Collector(
            create_env_fn,
            played,
            frames_per_batch=len(batches[0]),
            seed=seed,
            writer=int(ids[0]) >> ID_BITS,
            interruptor=played,
            log=beside,
            **options,
        ) as collector,
    ):
        played.begin(collector.env)
        row = 0
        while row < len(ids):
            batch = collector.rollout()
            assert batch is not None  # there is no buffer that takes it
            _compare(batch, columns, row, envs)
            row += len(batch)


class PlayedRows:
    """A policy that repeats the actions of rows, and what their policy wrote besides.

    Args:
        columns: what it writes in each row.
        envs: the env of each row, int64 ``[N]``.
        num_envs: E.
    """

    def __init__(self, columns: Columns, envs: Ints, num_envs: int) -> None:
        # Env after env; the rows of each stay in order.
        order = torch.from_numpy(np.argsort(envs, kind="stable"))
        self._columns = {key: column[order] for key, column in columns.items()}
        self._lengths = np.bincount(envs, minlength=num_envs)
        self._turns: Turns | None = None
        self.in_keys: list[NestedKey] = []
        self.out_keys: list[NestedKey] = list(self._columns)

    def begin(self, env: Any) -> None:
        """Play the rows in this env."""
        stream = find_stream(env)
        assert stream is not None  # a collector adapts its env
        self._turns = Turns(stream, len(self._lengths))
        self._turns.load(self._lengths)

    def is_set(self) -> bool:
        """Return whether all rows were played: the last batch may have fewer than the others."""
        assert self._turns is not None
        return bool((self._turns.used >= self._lengths).all())

    def __call__(self, data: TensorDictBase) -> TensorDictBase:
        """Write the columns of the next step."""
        assert self._turns is not None
        places = torch.from_numpy(self._turns.take())
        for key, column in self._columns.items():
            data.set(key, column[places.to(column.device)])
        return data


def is_action(key: NestedKey) -> bool:
    """Return whether a column is the action, or a part of it."""
    return as_tuple(key)[0] == ACTION


def _join(batches: Sequence[TensorDictBase]) -> Columns:
    """Return the columns of all batches."""
    keys = list(leaves(batches[0]))
    if not any(map(is_action, keys)) or TRAJ_IDS not in keys:
        raise KeyError(
            f"rows must have {ACTION!r} and {TRAJ_IDS!r}, as those of a collector have: they have {keys}"
        )
    for number, batch in enumerate(batches):
        if others := leaves(batch).keys() ^ set(keys):
            raise ValueError(
                f"batch {number} must have the same entries as the first: {sorted(map(str, others))} are not in both"
            )
    return {key: torch.cat([get_entry(batch, key) for batch in batches]) for key in keys}


def _compare(batch: TensorDictBase, columns: Columns, row: int, envs: Ints) -> None:
    """Raise ReplayMismatchError unless a batch's rows are those of the columns, from a row on."""
    made = leaves(batch)
    end = row + len(batch)
    for key, column in columns.items():
        if key not in made:
            raise KeyError(f"the env and its actions make no {key!r}: leave it out of the rows")
        pair = [digest_rows([each]) for each in (made[key], column[row:end])]
        different = np.flatnonzero(pair[0][: len(pair[1])] != pair[1])
        if len(different):
            first = row + int(different[0])
            raise ReplayMismatchError(
                f"row {first:,}, of env {envs[first]}, has another {key!r} than the env makes: rows must be all rows "
                "of one collector from its first reset on, in its batches, and create_env_fn, seed and options those "
                "that it had",
                first,
            )
