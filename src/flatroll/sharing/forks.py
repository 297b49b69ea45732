"""Lets go of descriptors in forked processes, where copies of them would hide from others that a process ended."""

import os
import weakref
from functools import cache
from typing import Any, Protocol


class Forgets(Protocol):
    """Something with descriptors that belong to one process."""

    def forget(self) -> None:
        """Close this process's copies of the descriptors; the other process's stay as they are."""


def forget_in_children(holder: Forgets) -> None:
    """Call ``holder.forget()`` in each process forked from now on, as long as ``holder`` lives.

    Without this a forked process, which has copies of all descriptors, keeps a socket open whose owner was killed: the
    other end would see no end of it.
    """
    _holders().add(holder)


@cache
def _holders() -> "weakref.WeakSet[Any]":
    """All holders of this process, for whom one function runs after a fork."""
    holders: weakref.WeakSet[Any] = weakref.WeakSet()

    def forget() -> None:
        for holder in list(holders):
            holder.forget()

    os.register_at_fork(after_in_child=forget)
    return holders
