"""`Buffer`: what the parts of a replay buffer ask of it."""

import weakref
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.samplers.sampler import Sampler
from flatroll.buffers.storages.storage import Storage, StorageOwner
from flatroll.buffers.transforms.transform import TransformLike
from flatroll.buffers.writers import Writer


class Buffer(StorageOwner, Protocol):
    """What storages, step writers, row logs, handles and ensembles ask of the buffer that they belong to.

    `ReplayBuffer` implements it. Rows are numbered as they were written; row r is in one of ``ring.capacity`` slots.
    ``write_lock`` is taken before ``lock``, never after it. Who holds ``lock`` keeps it for microseconds, and never
    while rows are copied: what was read without it is valid if ``ring.unchanged_since(draw)`` says so afterwards.
    `StorageOwner`, its base class, has the attributes that a storage needs: ``ring``, ``lock``, ``write_lock``,
    ``started``, ``enter_process``, ``overwrite`` and ``read_drawn``.

    Attributes:
        storage: where the rows are kept, by slot.
        sampler, writer: which rows are drawn, and where new ones go.
        transforms: applied to samples in this order; ``inv`` to what is stored, in the reverse order.
        batch_size: rows ``N`` of a sample; None if ``sample(batch_size)`` names them.
        generator: CPU generator of all draws, used under ``lock``; None for torch's global one.
        markers: keys of the markers by which trajectories are told apart, from the first batch on; None if they are
            not followed.
        step_writers: the step writers of the buffer, whose rows may wait; they are flushed before a save or a copy.
    """

    storage: Storage
    sampler: Sampler
    writer: Writer
    transforms: list[TransformLike]
    batch_size: int | None
    generator: torch.Generator | None
    markers: BoundaryKeys | None
    step_writers: weakref.WeakSet[Any]

    def extend(
        self, data: Any, final: TensorDictBase | None = None, *, update_priority: bool | None = None
    ) -> Tensor:
        """Store the ``N`` rows of ``data``; return their positions, int64 ``[N]`` (``[N, ndim]`` if ndim > 1)."""
        ...

    def next_sample(self, batch_size: int | None) -> tuple[Any, dict[str, Tensor], bool]:
        """Return a sample ``[N]``, its info (``"index"`` is int64 ``[N]`` or ``[N, ndim]``), and whether a pass over
        the rows ended with it (without replacement)."""
        ...

    def made_ahead(self) -> list[Any]:
        """Return copies of the prefetched samples; wait for those that are being made."""
        ...

    def tables(self, ahead: list[Any]) -> dict[str, Any]:
        """Return the state without the rows, for a save; ``ahead`` are the prefetched samples.

        The caller holds ``write_lock`` and ``lock``.
        """
        ...

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise the error of ``load_state_dict(state)`` if there is one; change nothing."""
        ...
