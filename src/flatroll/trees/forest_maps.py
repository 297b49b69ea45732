"""The two maps of a forest that one can ask: `NodeMap` from states to transitions, `DataMap` to their rows."""

from typing import Any, TypeAlias, cast

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from flatroll.layout.fast_call import nest

Forest: TypeAlias = Any  # `flatroll.trees.MCTSForest`, whose file imports this one


class NodeMap:
    """Maps observations to the transitions that leave their states; it is ``forest.node_map``.

    ``forest.node_map[data]`` of one observation (batch size ``[]``) is a tensordict ``[K]`` of its K transitions:
    ``"_index"``, their numbers, ``"_hash"``, their hashes, and ``"count"``, how often each was seen, all int64 ``[K]``,
    in the order in which they were first seen. Of ``[N]`` observations it is a lazy stack of N such tensordicts.

    >>> import torch
    >>> from flatroll.trees import MCTSForest
    >>> forest = MCTSForest()
    >>> rows = {"observation": torch.tensor([0, 0]), "action": torch.tensor([1, 2])}
    >>> forest.extend(TensorDict(rows | {"next": {"observation": torch.tensor([5, 6])}}, [2]))
    >>> index = forest.node_map[TensorDict({"observation": torch.tensor(0)})]["_index"]
    >>> index, forest.data_map[index]["next", "observation"]
    (tensor([0, 1]), tensor([5, 6]))
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest

    def __len__(self) -> int:
        """How many states there are, those that are only ends of transitions included."""
        return int(self._forest.num_states)

    def contains(self, item: TensorDictBase) -> Tensor:
        """Which observations ``[*B]`` are states of the forest, bool ``[*B]``."""
        return cast(Tensor, self._forest.states(item) >= 0)

    def __contains__(self, item: TensorDictBase) -> bool:
        """Whether all observations are states of the forest."""
        return bool(self.contains(item).all())

    def __getitem__(self, item: TensorDictBase) -> TensorDictBase:
        states = self._forest.states(item)
        if states.ndim > 1:
            raise ValueError(
                f"observations must be one, or a batch [N] of them, got batch size {list(states.shape)}"
            )
        if bool((states < 0).any()):
            raise KeyError(
                f"{int((states < 0).sum())} of {states.numel()} observations are no states of the forest: "
                "ask contains()"
            )
        found = [self._leaving(int(state)) for state in states.reshape(-1)]
        return found[0] if not states.ndim else cast(TensorDictBase, LazyStackedTensorDict(*found))

    def _leaving(self, state: int) -> TensorDict:
        index = self._forest.children(state)
        return nest(
            {
                "_index": index,
                "_hash": self._forest.hashes[index],
                "count": self._forest.edges.count[index],
            },
            len(index),
        )


class DataMap:
    """Maps transitions to their stored rows; it is ``forest.data_map``.

    ``forest.data_map[index]`` takes numbers of transitions, int64 ``[K]``. ``forest.data_map[data]`` takes observations
    and actions, a tensordict ``[*B]``; of several outcomes it returns the one seen most often. The rows are tensordicts
    of the same batch size, as they were first seen.
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest

    def __len__(self) -> int:
        """How many distinct transitions there are."""
        return len(self._forest)

    def contains(self, item: TensorDictBase) -> Tensor:
        """Which observations and actions ``[*B]`` were seen together, bool ``[*B]``."""
        return cast(Tensor, self._forest.find_edges(item) >= 0)

    def __contains__(self, item: TensorDictBase) -> bool:
        """Whether all of them were seen together."""
        return bool(self.contains(item).all())

    def __getitem__(self, item: TensorDictBase | Tensor) -> TensorDictBase:
        edges = item if isinstance(item, Tensor) else self._forest.find_edges(item)
        outside = (edges < 0) | (edges >= len(self))
        if bool(outside.any()):
            what = "numbers of transitions" if isinstance(item, Tensor) else "pairs of observation and action"
            raise KeyError(
                f"{int(outside.sum())} of {edges.numel()} {what} are not in the forest: ask contains()"
            )
        return cast(TensorDictBase, self._forest.rows(edges.reshape(-1)).reshape(edges.shape))
