"""`Buffer`: the interface of a replay buffer that its parts use."""

import weakref
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.samplers.sampler import Sampler
from flatroll.buffers.storages.access import StorageOwner
from flatroll.buffers.storages.storage import Storage
from flatroll.buffers.transforms.transform import TransformLike
from flatroll.buffers.writers import Writer


class Buffer(StorageOwner, Protocol):
    """The interface of a buffer used by storages, step writers, row logs, handles and ensembles.

    `ReplayBuffer` implements it. Rows are numbered as they were written; row r is in one of ``ring.capacity`` slots.
    Lock order: ``write_lock`` before ``lock``. ``lock`` is held for microseconds and never while rows are copied:
    data read without it is valid if ``ring.unchanged_since(draw)`` is True afterwards. Its base class `StorageOwner`
    has the attributes that a storage needs: ``ring``, ``lock``, ``write_lock``, ``started``, ``enter_process``,
    ``overwrite`` and ``read_drawn``.

    Attributes:
        storage: where the rows are kept, by slot.
        sampler, writer: choose the rows to draw, and the slots of new ones.
        transforms: applied to samples in this order; ``inv`` to what is stored, in the reverse order.
        batch_size: rows ``N`` per sample; None if ``sample(batch_size)`` sets it.
        generator: CPU generator of all draws, used under ``lock``; None for torch's global one.
        markers: keys of the trajectory markers, known from the first batch on; None if trajectories are not tracked.
        step_writers: step writers of the buffer; their waiting rows are flushed before a save or a copy.
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

    def prefetched(self) -> list[Any]:
        """Return copies of the prefetched samples; wait for pending ones."""
        ...

    def tables(self, ahead: list[Any]) -> dict[str, Any]:
        """Return the state without the rows, for a save; ``ahead`` are the prefetched samples.

        The caller holds ``write_lock`` and ``lock``.
        """
        ...

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise the error of ``load_state_dict(state)`` if there is one; change nothing."""
        ...
