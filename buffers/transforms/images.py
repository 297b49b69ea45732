"""Image transforms: channels first, values in [0, 1], resizing."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import interpolate

from flatroll.buffers.transforms.transform import Transform
from flatroll.layout.checks import as_text, check_choice, check_flags, check_type, check_whole_number
from flatroll.layout.keys import NestedKey

Interpolation = Literal["nearest", "nearest-exact", "bilinear", "bicubic"]
_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic")


class _ImageTransform(Transform):
    """Changes images ``[*B, ..., 3 dimensions]``, by default the entry ``"pixels"``."""

    #: The meaning of the last three dimensions, for errors.
    axes = ""

    def __init__(
        self,
        in_keys: NestedKey | Sequence[NestedKey] | None,
        out_keys: NestedKey | Sequence[NestedKey] | None,
    ) -> None:
        if in_keys is None:
            in_keys = ["pixels"]
        super().__init__(in_keys, out_keys)

    def _entry(self, td: TensorDictBase, key: NestedKey) -> Any:
        """Return the images; check their shape, so that a batch dimension is not mistaken for one of an image."""
        value = super()._entry(td, key)
        check_type(f"{type(self).__name__}: batch[{key!r}]", value, Tensor, "a tensor")
        if value.ndim - td.batch_dims < 3:
            raise ValueError(
                f"{type(self).__name__}: batch[{key!r}] must be [*B, ..., {self.axes}], got {list(value.shape)} in a "
                f"batch {list(td.batch_size)}: add the channel dimension with .unsqueeze"
            )
        return value


class ToTensorImage(_ImageTransform):
    """Converts byte images ``[..., H, W, C]`` to float images ``[..., C, H, W]`` in [0, 1].

    The result has the values in the order in which they were (channels last in memory), so nothing is copied but by
    the cast.

    Args:
        from_int: divide by 255. Default None: unless the images are floating.
        unsqueeze: give images of three dimensions a leading one.
        dtype: of the result, default ``torch.get_default_dtype()``.
        in_keys: entries with images, default ``["pixels"]``. List ``("next", "pixels")`` yourself.
        out_keys: where to write them, default ``in_keys``.
        shape_tolerant: keep the dimensions of images whose last one is not 3, such as ``[C, H, W]``.

    Raises:
        ValueError: ``dtype`` is not floating, though the result is divided by 255.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"pixels": torch.full((2, 10, 11, 3), 255, dtype=torch.uint8)}, [2])
    >>> pixels = ToTensorImage()(td)["pixels"]
    >>> pixels.shape, pixels.dtype, pixels.max()
    (torch.Size([2, 3, 10, 11]), torch.float32, tensor(1.))
    """

    axes = "H, W, C"

    def __init__(
        self,
        from_int: bool | None = None,
        unsqueeze: bool = False,
        dtype: torch.dtype | None = None,
        *,
        in_keys: NestedKey | Sequence[NestedKey] | None = None,
        out_keys: NestedKey | Sequence[NestedKey] | None = None,
        shape_tolerant: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        check_flags(unsqueeze=unsqueeze, shape_tolerant=shape_tolerant)
        if from_int is not None:
            check_flags(from_int=from_int)
        if dtype is None:
            dtype = torch.get_default_dtype()
        check_type("dtype", dtype, torch.dtype, "a torch dtype or None")

        self.from_int = from_int
        self.unsqueeze = unsqueeze
        self.shape_tolerant = shape_tolerant
        self.dtype = dtype
        if from_int is not False and not self.dtype.is_floating_point:  # images are divided by 255
            raise ValueError(f"dtype must be floating unless from_int=False, got {self.dtype}")

    def _apply_transform(self, value: Tensor) -> Tensor:
        """Return images ``[..., H, W, C]`` as ``[..., C, H, W]``.

        Raises:
            ValueError: the images look like ``[..., 3, H, W]`` already.
        """
        scale = self.from_int
        if scale is None:
            scale = not value.is_floating_point()

        if not self.shape_tolerant and value.shape[-3] == 3 and value.shape[-1] > 4:
            raise ValueError(
                f"ToTensorImage takes [..., H, W, C], and images {list(value.shape)} look like [..., C, H, W]: pass "
                "shape_tolerant=True, which keeps the shape of such images"
            )

        if not self.shape_tolerant or value.shape[-1] == 3:
            value = value.movedim(-1, -3)
        value = value.to(self.dtype)
        if scale:
            value = value / 255
        if self.unsqueeze and value.ndim == 3:
            return value.unsqueeze(0)
        return value


class Resize(_ImageTransform):
    """Resizes images ``[..., C, H, W]`` to ``[..., C, w, h]``; apply it after `ToTensorImage`.

    Bilinear and bicubic pixels are weighted means of all the pixels they cover (antialiasing). Integer images are
    interpolated in floating point and rounded.

    Args:
        w: size of the last dimension but one, or a pair ``(w, h)``. As in TorchRL ``w`` comes first, so a
            Gymnasium image, whose rows come first, gets ``w`` rows and ``h`` columns.
        h: size of the last dimension, default ``w``.
        interpolation: ``"nearest"``, ``"nearest-exact"``, ``"bilinear"`` or ``"bicubic"``.
        in_keys: entries with images, default ``["pixels"]``. List ``("next", "pixels")`` yourself.
        out_keys: where to write them, default ``in_keys``.

    Raises:
        ValueError: a size below 1, or an unknown interpolation.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"pixels": torch.rand(2, 3, 210, 160)}, [2])
    >>> Resize(84, in_keys=["pixels"], out_keys=["small"])(td)["small"].shape
    torch.Size([2, 3, 84, 84])
    """

    axes = "C, H, W"

    def __init__(
        self,
        w: int | Sequence[int],
        h: int | None = None,
        interpolation: Interpolation = "bilinear",
        in_keys: NestedKey | Sequence[NestedKey] | None = None,
        out_keys: NestedKey | Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        if isinstance(w, Sequence):
            if len(w) != 2:
                raise ValueError(f"w must be one size or a pair of sizes, got {as_text(w)}")
            w, h = w

        self.w = check_whole_number("w", w)
        if h is None:
            h = self.w
        self.h = check_whole_number("h", h)
        self.interpolation = check_choice("interpolation", interpolation, _INTERPOLATIONS)

    def __repr__(self) -> str:
        return f"Resize({self.w}, {self.h}, {self.interpolation!r}, in_keys={self.in_keys}, out_keys={self.out_keys})"

    def _apply_transform(self, value: Tensor) -> Tensor:
        """Return images ``[..., C, H, W]`` as ``[..., C, w, h]``, in their dtype."""
        if value.shape[-2:] == (self.w, self.h):
            return value

        # Integers up to 2 ** 24 are exact in float32; larger ones need float64. float16 has no kernel on some
        # devices.
        wide = torch.float32
        if value.dtype in (torch.int32, torch.int64, torch.float64):
            wide = torch.float64

        images = value.reshape(-1, *value.shape[-3:]).to(wide)
        smooth = self.interpolation in ("bilinear", "bicubic")
        resized = interpolate(images, (self.w, self.h), mode=self.interpolation, antialias=smooth)
        resized = resized.view(*value.shape[:-2], self.w, self.h)

        if value.is_floating_point():
            return resized.to(value.dtype)
        if value.dtype is torch.bool:
            return resized >= 0.5
        limits = torch.iinfo(value.dtype)  # bicubic interpolation may overshoot
        return resized.round().clamp(limits.min, limits.max).to(value.dtype)
