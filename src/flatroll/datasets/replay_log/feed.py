"""`Feed`: a policy that takes the actions of rows; `Turns`: which row each env takes in a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatroll.datasets.replay_log.actions import as_tree
from flatroll.disk.tensor_file import DamagedFileError
from flatroll.layout.keys import ACTION
from flatroll.layout.spaces import space_leaves
from flatroll.rollouts.env_facts import EnvFacts
from flatroll.wrappers.stream import VectorStream

Ints = npt.NDArray[np.int64]


class Turns:
    """Which row each env takes next, of rows that lie env after env.

    Args:
        stream: the env. It tells which envs only reset in a step, and so take no row.
        num_envs: E.
    """

    def __init__(self, stream: VectorStream, num_envs: int) -> None:
        self._stream = stream
        self._starts: Ints = np.zeros(num_envs, np.int64)
        self._last: Ints = self._starts
        #: Rows that each env has taken, int64 ``[E]``.
        self.used: Ints = self._starts.copy()

    def load(self, lengths: Ints) -> None:
        """Set how many rows each env has, int64 ``[E]``."""
        self._starts = np.cumsum(lengths) - lengths
        # An env without further rows repeats its last action: what it does is in no row.
        self._last = np.clip(self._starts + lengths - 1, 0, int(lengths.sum()) - 1)

    def take(self) -> Ints:
        """Return the row of each env for the next step, int64 ``[E]``."""
        stream = self._stream
        places: Ints = np.minimum(self._starts + self.used, self._last)
        if stream.same_step or stream.any_ended is False:
            self.used += 1
        else:
            ended: Any = stream.ended
            if isinstance(ended, Tensor):
                ended = ended.cpu().numpy()
            self.used += ~ended  # the others only reset
        return places


class Feed:
    """A policy that takes the actions of a log, env by env."""

    def __init__(self, facts: EnvFacts) -> None:
        self._space = facts.env.single_action_space
        self._on_host = facts.on_host
        self._device = facts.device
        self._leaves: list[Any] = []
        self._parts = len(list(space_leaves(self._space, (ACTION,))))
        self._turns = Turns(facts.stream, facts.num_envs)
        #: The array of its turns: rows that each env has taken, int64 ``[E]``.
        self.used = self._turns.used

    def load(self, leaves: Sequence[Tensor], lengths: Ints) -> None:
        """Set the actions: those of one env after those of another, ``lengths`` of each.

        Raises:
            DamagedFileError: they are not as many as the parts of an action.
        """
        if len(leaves) != self._parts:
            raise DamagedFileError(
                f"the log has {len(leaves)} parts of actions, those of the env have {self._parts}"
            )
        self._leaves = [leaf.numpy() for leaf in leaves]
        self._turns.load(lengths)

    def __call__(self, obs: Any) -> Any:
        """Return the actions of the next step."""
        places = self._turns.take()
        taken = [leaf[places] for leaf in self._leaves]
        if not self._on_host:
            taken = [torch.from_numpy(leaf).to(self._device) for leaf in taken]
        return as_tree(self._space, iter(taken))
