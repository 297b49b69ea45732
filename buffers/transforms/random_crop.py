"""Random crops of stored whole trajectories."""

from typing import cast

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor

from flatroll.buffers.columns.column import take_rows
from flatroll.buffers.transforms.transform import Transform
from flatroll.layout.checks import check_cpu_generator, check_keys, check_whole_number
from flatroll.layout.keys import IS_INIT, NestedKey, marker
from flatroll.layout.transfers import upload


class RandomCropTensorDict(Transform):
    """Crops ``sub_seq_len`` consecutive steps of each trajectory of a batch ``[*B, T]``, at a random start.

    Each element of the batch gets a start of its own, uniform over all that leave room, the last one among them. For
    storages whose rows are whole trajectories, ``extend(batch)`` with ``[B, T]``; flat rows are sliced by
    `SliceSampler` instead.

    Where ``is_init`` is stored, the first step of each crop has it True, so that recurrent modules and estimators
    begin there. The last step keeps the env's done flags: a crop that ends in mid-episode is not done, and values
    are bootstrapped from its next observation.

    Args:
        sub_seq_len: steps per crop, at least 1.
        sample_dim: the batch dimension that is time, default -1, the last one.
        mask_key: bool entry ``[*B, T]``, True at the real steps, which come first; only they are cropped. Default
            None: all steps are real.
        init_key: the marker set at first steps, default ``"is_init"``.
        generator: CPU random generator; None is torch's global one.

    Raises:
        ValueError: ``sub_seq_len`` below 1, or a generator of another device.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> batch = TensorDict({"step": torch.arange(10).expand(3, 10)}, [3, 10])
    >>> crop = RandomCropTensorDict(4)(batch)
    >>> crop.batch_size, (crop["step"] - crop["step"][:, :1]).tolist()[0]
    (torch.Size([3, 4]), [0, 1, 2, 3])
    """

    wants_ends = True

    def __init__(
        self,
        sub_seq_len: int,
        sample_dim: int = -1,
        mask_key: NestedKey | None = None,
        *,
        init_key: NestedKey = IS_INIT,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.sub_seq_len = check_whole_number("sub_seq_len", sub_seq_len)
        check_keys(init_key=init_key)
        check_keys(optional=True, mask_key=mask_key)
        check_whole_number("sample_dim", sample_dim, -(2**31), 2**31)

        self.sample_dim = sample_dim
        self.generator = check_cpu_generator(generator)
        self.mask_key = mask_key
        self.init_key = init_key

    def forward(self, td: TensorDictBase, ends: Tensor | None = None) -> TensorDictBase:
        """Return copies of the crops: ``td`` with ``sub_seq_len`` steps along ``sample_dim``.

        Args:
            td: ``[*B, T]``; alone also ``[T]``, one trajectory.
            ends: given by a buffer, whose samples must be whole trajectories; not used otherwise.

        Raises:
            KeyError: the mask is missing.
            TypeError: mask or ``is_init`` is not bool, or an entry with a value per step is not a tensor.
            ValueError: a trajectory is too short, the real steps do not come first, ``td`` has no such dimension, or
                is a flat sample.
        """
        shape = list(td.batch_size)
        length = self.sub_seq_len
        if ends is not None and len(shape) < 2:
            raise ValueError(
                f"RandomCropTensorDict needs samples [*B, T] of whole trajectories, got {shape}: extend the buffer "
                "with batches [B, T], or draw from flat rows with SliceSampler(slice_len=...)"
            )
        if not -len(shape) <= self.sample_dim < len(shape):
            raise ValueError(f"sample_dim={self.sample_dim} is not a dimension of a batch {shape}")

        dim = self.sample_dim % len(shape)
        starts = self._possible_starts(td, dim)
        uniform = torch.rand(starts.shape, dtype=torch.float64, generator=self.generator)
        uniform = upload(uniform, starts.device)
        first = torch.minimum((uniform * starts).long(), starts - 1)  # [*B]; rounding never reaches `starts`

        # In the batch flattened to [prod(B) * T], the crop of element b is rows b * T + first[b] + (0 ...
        # length - 1).
        steps = shape.pop(dim)
        rows = torch.arange(first.numel(), device=first.device).view(-1, 1) * steps + first.view(-1, 1)
        rows = (rows + torch.arange(length, device=first.device)).flatten()

        def crop_column(column: Tensor) -> Tensor:
            flat = column.movedim(dim, len(shape)).flatten(0, len(shape))  # time becomes the last batch dim
            crops = take_rows(flat, upload(rows, flat.device)).view(*shape, length, *flat.shape[1:])
            return crops.movedim(len(shape), dim)

        crop = cast(TensorDictBase, td.apply(crop_column, batch_size=[*shape[:dim], length, *shape[dim:]]))
        for key in td.keys(True, True, is_leaf=is_leaf_nontensor):
            if crop.get(key, None) is None:
                raise TypeError(f"batch[{key!r}] is not a tensor and cannot be cropped: use .exclude")

        if crop.get(self.init_key, None) is not None:
            marker(crop, self.init_key).select(dim, 0).fill_(True)

        return crop

    def _possible_starts(self, td: TensorDictBase, dim: int) -> Tensor:
        """Number of possible starts of each trajectory, int64 ``[*B]``."""
        steps = td.batch_size[dim]
        if steps < self.sub_seq_len:
            raise ValueError(f"sub_seq_len={self.sub_seq_len} is longer than the {steps} steps of the batch")
        if self.mask_key is None:
            others = [size for i, size in enumerate(td.batch_size) if i != dim]
            return torch.full(others, steps - self.sub_seq_len + 1, device=td.device)

        mask = marker(td, self.mask_key).movedim(dim, -1)
        lengths = mask.sum(-1)
        if (mask[..., 1:] & ~mask[..., :-1]).any():
            raise ValueError(f"batch[{self.mask_key!r}] must be True first and then False along time")
        if (lengths < self.sub_seq_len).any():
            raise ValueError(
                f"sub_seq_len={self.sub_seq_len} is longer than the shortest trajectory, which has "
                f"{int(lengths.min())} real steps: leave such trajectories out when you store, or crop less"
            )
        return lengths - (self.sub_seq_len - 1)
