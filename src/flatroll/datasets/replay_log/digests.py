"""Digests of rows: 64 bits for each row, of the bytes of its columns, and a checksum of the rows of each env."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import NEXT_KNOWN, NestedKey, next_key
from flatroll.layout.tensordict_seam import get_entry

Words = npt.NDArray[np.uint64]
#: Columns of at most this many bytes a row are digested all at once, wider ones row by row.
_NARROW = 512
#: Odd constants of the mixing steps; digits of the square roots of 2 and 3.
_FIRST = np.uint64(0x6A09E667F3BCC909)
_SECOND = np.uint64(0xBB67AE8584CAA73B)
_HALF = np.uint64(32)
_PART = np.uint64(29)


def digest_rows(columns: Sequence[Tensor]) -> Words:
    """Return a digest of each row of columns ``[N, ...]``; it depends on every bit of the row.

    >>> x = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [0.0, 1.0]])
    >>> first, second, third = digest_rows([x, torch.zeros(3, dtype=torch.bool)])
    >>> bool(first == third), bool(first == second)
    (True, False)
    """
    rows = len(columns[0])
    narrow: list[npt.NDArray[np.uint8]] = []
    total = np.zeros(rows, np.uint64)

    for number, column in enumerate(columns):
        data = _bytes_of_rows(column)
        width = data.shape[1]
        if width <= _NARROW:
            narrow.append(data)
            continue

        flat: Any = data.reshape(-1)
        memory = memoryview(flat)
        digests = [
            xxhash.xxh3_64_intdigest(memory[at : at + width], number) for at in range(0, rows * width, width)
        ]
        total += np.array(digests, np.uint64)

    if narrow:
        width = sum(data.shape[1] for data in narrow)
        # Whole words of 8 bytes: zeros at the end.
        padding = np.zeros((rows, -width % 8), np.uint8)
        words = np.concatenate([*narrow, padding], axis=1).view(np.uint64)
        places = np.arange(1, words.shape[1] + 1, dtype=np.uint64)
        total += mix(words ^ (places * _FIRST)).sum(axis=1, dtype=np.uint64)
    return mix(total)


def mix(words: Words) -> Words:
    """Mix the bits of each word: one-to-one, so different words stay different."""
    mixed = words ^ (words >> _HALF)
    mixed *= _FIRST
    mixed ^= mixed >> _PART
    mixed *= _SECOND
    mixed ^= mixed >> _HALF
    return mixed


def digest_batch(
    batch: TensorDictBase,
    final: TensorDictBase | None,
    keys: Iterable[NestedKey],
    obs_keys: Iterable[NestedKey],
    marks: Mapping[str, NestedKey],
) -> Words:
    """Return the digests of a batch's rows.

    Args:
        batch: rows ``[N]``.
        final: the next observations that no row holds; None if the batch has all.
        keys: the columns to digest.
        obs_keys: the observations whose next ones are digested at the ends of runs, where no row holds them.
        marks: ``is_init_key`` and ``traj_key``.
    """
    columns = [get_entry(batch, key) for key in keys]
    digests = digest_rows(columns)

    if final is not None:
        rows = final.get("row").cpu().numpy()
        lasts = [get_entry(final, next_key(key)) for key in obs_keys]
    else:
        at_end = run_ends(batch, **marks)
        known = batch.get(NEXT_KNOWN, None)
        if known is not None:
            at_end = at_end & known
        ends = at_end.nonzero().squeeze(-1)
        rows = ends.cpu().numpy()
        lasts = [get_entry(batch, next_key(key)).index_select(0, ends) for key in obs_keys]

    if lasts and len(rows):
        digests[rows] = mix(digests[rows] + digest_rows(lasts))
    return digests


def checksums(digests: Words, counts: npt.NDArray[np.int64]) -> Words:
    """Return a checksum of the rows of each env, which lie one env after the other."""
    words: Any = digests
    memory = memoryview(words).cast("B")
    ends = np.cumsum(counts) * 8
    begins = ends - counts * 8
    found = [
        xxhash.xxh3_64_intdigest(memory[begin:end])
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    return np.array(found, np.uint64)


def _bytes_of_rows(column: Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of each row, uint8 ``[N, width]``: the column's own memory where it is contiguous."""
    plain = column.detach().cpu().contiguous()
    rows = len(plain)
    if not plain.numel():
        return np.zeros((rows, 0), np.uint8)
    flat = plain.reshape(-1).view(torch.uint8)
    return flat.numpy().reshape(rows, -1)
