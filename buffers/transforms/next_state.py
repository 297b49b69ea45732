"""Restores next observations in samples of batches that store each observation once."""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.transforms.transform import Transform, keys_argument
from flatroll.layout.boundaries import run_ends
from flatroll.layout.checks import check_flags, check_keys, check_type
from flatroll.layout.delta import signed
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey, flat_column, next_key, require
from flatroll.layout.transfers import upload


class NextStateReconstructor(Transform):
    """Adds ``("next", key)`` to samples of a compact batch, taken from the row after each row.

    ``next[i] = root[i + 1]`` if row i + 1 of the batch follows row i in its trajectory, else ``fill_value``. It
    does not follow at run ends (`flatroll.layout.run_ends`), at the ends of drawn slices, after rows drawn one by
    one, and where the step count does not continue. Two slices of one trajectory side by side are kept apart.

    A storage with ``compact_obs=True`` gives the exact next observation at every row and needs none of this.

    Args:
        keys: root entries to put back, a list or tuple of keys; one string is one key. A nested key goes
            inside a list: ``[("agents", "obs")]``.
        traj_key: integer entry, constant within a trajectory. None: not read.
        done_key: bool entry, True at the last row of an episode. None: not read; without ``traj_key`` too, and without
            ``is_init``, a batch is one trajectory.
        step_count_key: integer entry that rises by one per row, checked if given.
        fill_value: what to write where the next row is unknown, default NaN.
        strict: whether ``traj_key``, ``done_key`` and ``step_count_key`` must be there.

    Raises:
        ValueError: ``keys`` is a tuple of several strings, which may mean one nested key or several keys; or the
            batch has not exactly one batch dimension.
        KeyError: an entry is missing.
        TypeError: an integer entry and a NaN fill value.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"observation": torch.arange(4.0), "collector": {"traj_ids": torch.tensor([0, 0, 1, 1])},
    ...     "next": {"done": torch.zeros(4, 1, dtype=torch.bool)}}, [4])
    >>> NextStateReconstructor()(td)["next", "observation"]
    tensor([1., nan, 3., nan])
    """

    wants_ends = True

    def __init__(
        self,
        keys: NestedKey | Sequence[NestedKey] = ("observation",),
        *,
        traj_key: NestedKey | None = TRAJ_IDS,
        done_key: NestedKey | None = DONE,
        step_count_key: NestedKey | None = None,
        fill_value: float = float("nan"),
        strict: bool = True,
    ) -> None:
        roots = keys_argument("keys", keys)
        check_keys(optional=True, traj_key=traj_key, done_key=done_key, step_count_key=step_count_key)
        check_flags(strict=strict)
        check_type("fill_value", fill_value, (int, float), "a number")
        super().__init__(roots, [next_key(key) for key in roots])

        self.keys = self.in_keys
        self.traj_key = traj_key
        self.done_key = done_key
        self.step_count_key = step_count_key
        self.fill_value = fill_value
        self.strict = strict

    def forward(self, td: TensorDictBase, ends: Tensor | None = None) -> TensorDictBase:
        """A shallow copy of ``td`` (``[N]``) with the next entries; ``ends`` (bool ``[N]``) adds run ends."""
        if td.batch_dims != 1:
            raise ValueError(
                f"NextStateReconstructor takes flat batches [N], got {list(td.batch_size)}: flatten it first"
            )

        ends = self._run_ends(td, ends)
        result = td.clone(recurse=False)
        for key in self.in_keys:
            column = require(td, key)
            if self.fill_value != self.fill_value and not (column.is_floating_point() or column.is_complex()):
                raise TypeError(f"batch[{key!r}] is {column.dtype}, which has no NaN: pass fill_value=0")

            # Row i gets the entry of row i + 1. The last row gets that of row 0, which is overwritten because
            # a run ends there.
            following = torch.roll(column, -1, 0)
            signed(following).masked_fill_(ends.view(-1, *[1] * (column.ndim - 1)), self.fill_value)
            result.set(next_key(key), following)

        return result

    def _run_ends(self, td: TensorDictBase, ends: Tensor | None) -> Tensor:
        """Rows that the next row does not follow, bool ``[N]``: those marked in ``td``, and ``ends``."""
        keys = [key for key in (self.traj_key, self.done_key, self.step_count_key) if key is not None]
        present = [key for key in keys if td.get(key, None) is not None]
        if self.strict:
            for key in keys:
                require(td, key)

        if ends is None and not keys and td.get(IS_INIT, None) is None:
            ends = torch.zeros(len(td), dtype=torch.bool, device=td.device)
            ends[-1:] = True
        elif present or ends is None:
            marked = run_ends(td, done_key=self.done_key, traj_key=self.traj_key)
            if ends is not None:
                marked = marked | upload(ends, marked.device)
            ends = marked

        if self.step_count_key is not None and self.step_count_key in present:
            step = flat_column(require(td, self.step_count_key), td, self.step_count_key)
            ends = ends.clone()
            ends[:-1] |= step[1:] != step[:-1] + 1  # the step count of the next row does not continue
        return ends
