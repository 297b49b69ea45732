"""Modules that turn the rows of a tensor into hashes, and hashes into positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from flatroll.kernels.rows.words import hash_words, pack_rows
from flatroll.layout.checks import as_text, check_flags, check_function, check_whole_number
from flatroll.trees.rows import RowNumbers


class HashToInt(nn.Module):
    """Numbers distinct keys from 0 on, in order of first occurrence.

    >>> positions = HashToInt()
    >>> positions(torch.tensor([70, 90, 70]), extend=True)
    tensor([0, 1, 0])
    >>> positions(torch.tensor([90, 80])), len(positions)
    (tensor([1, 2]), 2)
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows = RowNumbers(["key"])

    def __len__(self) -> int:
        return len(self._rows)

    @override
    def forward(self, key: Tensor, extend: bool = False) -> Tensor:
        """Return the number of each key.

        Args:
            key: ``[N]`` or ``[N, *F]``, compared value by value; 0.0 and -0.0 are equal, and so are all NaNs.
            extend: give numbers to keys that have none. Default False: they get ``len(self)``.

        Returns:
            int64 ``[N]``.

        Raises:
            TypeError: the keys differ in dtype or shape from those numbered before.
        """
        if extend:
            return self._rows.insert([key])
        numbers = self._rows.find([key])
        return torch.where(numbers < 0, len(self), numbers)

    def truncate(self, count: int) -> None:
        """Forget the keys with numbers from ``count`` on."""
        self._rows.truncate(count)

    def clear(self) -> None:
        """Forget all keys, and their dtype and shape."""
        self._rows.truncate(0)

    @override
    def get_extra_state(self) -> dict[str, Any]:
        """Return the keys, ordered by number, for ``state_dict()``."""
        return self._rows.state_dict()

    @override
    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)


class SipHash(nn.Module):
    """Hashes rows to 64-bit integers: one fixed function, the same in every process and on every machine.

    It is named after Python's hash, which it replaces. It is not cryptographic: it distributes rows evenly, but
    collisions can be constructed. 0.0 and -0.0 have the same hash, and so have all NaNs.

    Args:
        as_tensor: return a tensor. Default True; False returns a list of ``bytes``, the rows themselves.

    >>> hashes = SipHash()(torch.tensor([[0.1, 0.0], [0.3, 0.4], [0.1, -0.0]]))
    >>> hashes.dtype, bool(hashes[0] == hashes[2]), bool(hashes[0] == hashes[1])
    (torch.int64, True, False)
    """

    def __init__(self, as_tensor: bool = True) -> None:
        super().__init__()
        check_flags(as_tensor=as_tensor)
        self.as_tensor = as_tensor

    @override
    def forward(self, x: Tensor) -> Tensor | list[bytes]:
        """Hash rows ``[N, *F]`` to int64 ``[N]``, or to a list of N ``bytes``."""
        words = pack_rows([x])
        if self.as_tensor:
            return hash_words(words)
        return [row.tobytes() for row in words.cpu().numpy()]


class RandomProjectionHash(SipHash):
    """Hashes rows by a rounded random projection, so that similar rows often share a hash.

    Use it to treat similar observations as one, such as in counts of visits; never where rows must be distinguished:
    two frames that differ in one pixel may get the same hash. Maps use it only if requested.

    Args:
        n_components: numbers that a row is projected to. Default 16.
        dtype_cast: dtype to which they are rounded; the coarser, the more rows share a hash. Default bfloat16.
        as_tensor: see `SipHash`.
        init_method: fills the projection matrix ``[F, n_components]`` in place. Default ``torch.nn.init.normal_``.

    >>> hash_module = RandomProjectionHash(n_components=4)
    >>> hash_module(torch.randn(3, 100)).shape, hash_module.transform.shape
    (torch.Size([3]), torch.Size([100, 4]))
    """

    transform: Tensor | None

    def __init__(
        self,
        *,
        n_components: int | None = None,
        dtype_cast: torch.dtype = torch.bfloat16,
        as_tensor: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
    ) -> None:
        super().__init__(as_tensor)
        if n_components is None:
            n_components = 16
        self.n_components = check_whole_number("n_components", n_components, 1, 2**31)

        if not isinstance(dtype_cast, torch.dtype) or not dtype_cast.is_floating_point:
            raise TypeError(f"dtype_cast must be a floating-point dtype, got {as_text(dtype_cast)}")
        self.dtype_cast = dtype_cast

        self.init_method: Callable[[Tensor], Any] = nn.init.normal_
        if init_method is not None:
            self.init_method = check_function(
                "init_method", init_method, "a function that fills a tensor in place"
            )
        self.register_buffer("transform", None)

    def fit(self, x: Tensor) -> None:
        """Draw the projection for rows like those of ``x`` (``[N, *F]``); the first call of the module does it."""
        self.transform = torch.empty(x[:1].numel(), self.n_components, dtype=torch.float64, device=x.device)
        self.init_method(self.transform)

    @override
    def forward(self, x: Tensor) -> Tensor | list[bytes]:
        """Hash rows ``[N, *F]`` to int64 ``[N]``, or to a list of N ``bytes``."""
        if self.transform is None:
            if not len(x):
                raise ValueError("x must have at least one row at the first call, which sets the projection")
            self.fit(x)
        assert self.transform is not None
        # In float64: the last bits of a product may depend on the number of rows, which could change the
        # rounded result.
        rows = x.reshape(len(x), self.transform.shape[0]).double()
        return super().forward((rows @ self.transform).to(self.dtype_cast))

    @override
    def _load_from_state_dict(self, state_dict: Any, prefix: Any, *args: Any, **kwargs: Any) -> None:
        saved = state_dict.get(f"{prefix}transform")
        if saved is not None:
            self.transform = torch.empty_like(saved)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class BinaryToDecimal(nn.Module):
    """Reads rows of bits, the most significant first, as integers.

    Args:
        num_bits: bits per digit. A row has one or more digits and is read as a number of base ``2 ** num_bits``, so
            that different rows give different numbers.
        device: device of the numbers.
        dtype: integer dtype of the numbers.
        convert_to_binary: count positive values as 1, all others as 0. Default False: all must be 0 or 1.

    Raises:
        ValueError: ``num_bits`` bits do not fit into ``dtype``.

    >>> to_decimal = BinaryToDecimal(num_bits=4, device="cpu", dtype=torch.int32)
    >>> to_decimal(torch.tensor([[0, 0, 1, 0], [1, 0, 0, 1]])), to_decimal(torch.tensor([[0, 0, 1, 0, 0, 0, 0, 1]]))
    (tensor([2, 9], dtype=torch.int32), tensor([33], dtype=torch.int32))
    """

    def __init__(
        self,
        num_bits: int,
        device: torch.device | str,
        dtype: torch.dtype,
        convert_to_binary: bool = False,
    ) -> None:
        super().__init__()
        self.num_bits = check_whole_number("num_bits", num_bits)
        self.device = torch.device(device)
        self.dtype = dtype
        self.convert_to_binary = convert_to_binary

        if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
            raise ValueError(f"dtype must be an integer dtype, got {dtype}")
        self._check_bits("num_bits", num_bits)

    @override
    def forward(self, features: Tensor) -> Tensor:
        """Read bits ``[*B, F]`` as numbers ``[*B]``.

        Raises:
            ValueError: F is not a positive multiple of ``num_bits``, or exceeds the bits of the dtype, or a value is
                neither 0 nor 1.
        """
        bits = features.shape[-1]
        if not bits or bits % self.num_bits:
            raise ValueError(
                f"features must have a positive multiple of num_bits={self.num_bits} bits, got {bits}"
            )
        self._check_bits("the last dim of features", bits)

        ones = features > 0 if self.convert_to_binary else features == 1
        if not self.convert_to_binary and not bool((ones | (features == 0)).all()):
            raise ValueError("features must be 0 or 1: use convert_to_binary=True for others")

        powers = 2 ** torch.arange(bits - 1, -1, -1, device=self.device)
        return torch.where(ones.to(self.device), powers, 0).sum(-1).to(self.dtype)

    def _check_bits(self, name: str, bits: int) -> None:
        most = torch.iinfo(self.dtype).max.bit_length()
        if bits > min(most, 63):
            raise ValueError(f"{name} must be at most {min(most, 63)} for {self.dtype}, got {bits}")
