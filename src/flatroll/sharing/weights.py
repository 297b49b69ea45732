"""`SharedWeights`: tensors with a version, written by one process and read by others without a lock."""

import os
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from flatroll.sharing.block import Block, Key, Table, dtype_name

if TYPE_CHECKING:
    import torch

# tables of the block
_HEADER = 0
_VALUES = 1
# numbers in the header
_BEGUN = 0
_DONE = 1


class SharedWeights:
    """The state dict of a policy in shared memory, with a version number that counts the updates.

    One process publishes; any number of others fetch, each at its own pace. No process waits for another, and none
    gets a mixture of two versions: version v is in copy v % 2, and a reader reads the copy again if writing of version
    v + 2 began meanwhile. If a writer is killed, the previous version stays valid.

    Args:
        state: tensors by name, as ``module.state_dict()`` gives them. They are version 0.

    Raises:
        TypeError: an entry is not a tensor with a size, such as a lazy parameter before its first use.

    >>> import torch
    >>> policy, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> weights = SharedWeights(policy.state_dict())
    >>> weights.fetch_into(copy.state_dict())
    0
    >>> torch.equal(copy.weight, policy.weight), weights.publish(policy.state_dict()), weights.version
    (True, 1, 1)
    """

    def __init__(self, state: "Mapping[str, torch.Tensor]") -> None:
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a state dict, got {type(state).__name__}")

        rows: dict[Key, torch.Tensor] = {}
        for name, value in state.items():
            rows[name] = _values(name, value).unsqueeze(0)
        header = Table.like({"": np.zeros((1, 2), np.int64)})
        weights = Table.like(rows, rows=1) if rows else Table(1, {})
        self._open(Block([header, weights], slots=2))
        self._write(0, state)

    def _open(self, block: Block) -> None:
        self._block = block
        self._header = block.arrays(table=_HEADER)[""][0]  # int64 [2], of slot 0 only
        self._copies: list[dict[str, torch.Tensor]] = []
        for slot in range(2):
            copies = block.tensors(slot, _VALUES)
            self._copies.append({str(key): values[0] for key, values in copies.items()})

    @property
    def version(self) -> int:
        """Number of the last complete update."""
        return int(self._header[_DONE])

    def publish(self, state: "Mapping[str, torch.Tensor]") -> int:
        """Make these tensors the next version. One process does so, and one of its threads at a time.

        Returns:
            The new version.

        Raises:
            ValueError: names, shapes or data types differ from version 0; nothing is changed.
        """
        self._check(state)
        version = self.version + 1
        self._write(version, state)
        return version

    def _write(self, version: int, state: "Mapping[str, torch.Tensor]") -> None:
        self._header[_BEGUN] = version

        _fence()
        for name, copy in self._copies[version % 2].items():
            copy.copy_(state[name].detach())

        _fence()
        self._header[_DONE] = version

    def fetch_into(self, state: "Mapping[str, torch.Tensor]") -> int:
        """Copy the newest whole version into these tensors, as returned by ``module.state_dict()``.

        Returns:
            Its number.

        Raises:
            ValueError: names, shapes or data types differ from those published; nothing is copied.
        """
        self._check(state)
        while True:
            version = self.version

            _fence()
            for name, copy in self._copies[version % 2].items():
                state[name].detach().copy_(copy)

            _fence()
            if self._header[_BEGUN] < version + 2:  # the copy was not overwritten during the read
                return version

    def _check(self, state: "Mapping[str, torch.Tensor]") -> None:
        shared = self._copies[0]
        if state.keys() != shared.keys():
            missing = sorted(shared.keys() - state.keys())
            added = sorted(state.keys() - shared.keys())
            raise ValueError(
                f"the weights have other names than the shared ones: missing {missing}, new {added}"
            )

        for name, copy in shared.items():
            value = _values(name, state[name])
            if value.shape != copy.shape or value.dtype != copy.dtype:
                raise ValueError(
                    f"weight {name!r} was shared as {dtype_name(copy)} {list(copy.shape)}, got "
                    f"{dtype_name(value)} {list(value.shape)}: a policy that changes its shape needs new workers"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_block, (self._block,)


def _from_block(block: Block) -> SharedWeights:
    weights = SharedWeights.__new__(SharedWeights)
    weights._open(block)
    return weights


def _values(name: str, value: Any) -> "torch.Tensor":
    import torch  # not at the top: a process that only starts others does not need torch

    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        raise TypeError(
            f"weight {name!r} is of type {type(value).__name__}: only tensors whose shape is known can be shared "
            "(call a lazy module once before)"
        )
    return value


_FENCE = Lock()


def _renew_fence() -> None:
    """Replace the lock in a forked process: a thread of the parent may have held it, and does not exist here."""
    global _FENCE
    _FENCE = Lock()


os.register_at_fork(after_in_child=_renew_fence)


def _fence() -> None:
    """Order what this process reads and writes before against what it does afterwards, for processors (such as ARM)
    that do not keep that order. Memory accesses may move into a critical section but not out of it, so one pair of
    acquire and release lets two of them pass each other inside; two pairs do not."""
    for _ in range(2):
        with _FENCE:  # not acquire() and release(): Ctrl-C between the two would leave it locked
            pass
