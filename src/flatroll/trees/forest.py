"""`MCTSForest`: the transitions of many trajectories as a graph of states, from which trees are extracted."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from flatroll.kernels.rows.words import hash_words
from flatroll.layout.boundaries import run_ends
from flatroll.layout.checks import check_key_names, check_type, check_whole_number
from flatroll.layout.final import check_final, next_values, read_final
from flatroll.layout.keys import (
    MASK,
    NEXT_KNOWN,
    NestedKey,
    as_tuple,
    marker,
    next_key,
    observation_keys,
    plain_key,
    require,
    under_next,
    without_next,
)
from flatroll.layout.tensordict_seam import get_entry, nest
from flatroll.trees.rows import GrowingColumns, RowNumbers, flat_columns, room_for
from flatroll.trees.tensor_map import TensorDictMap
from flatroll.trees.tree import Graph, Tree, grow_tree

Array = NDArray[Any]
_DONE_KEYS: list[NestedKey] = ["done", "terminated", "truncated"]


def _named(name: str, keys: object) -> list[NestedKey]:
    """Return a key, a list of keys or None as a list."""
    if keys is None:
        return []
    return check_key_names(name, keys, one=True)


def _in_keys(one: TensorDictMap | None) -> list[Any]:  # tensordict annotates a wider type than keys have
    """Return the in-keys of a map; none without one."""
    if one is None:
        return []
    return list(one.in_keys)


def _size_limit(
    max_size: int | None, data_map: TensorDictMap | None, node_map: TensorDictMap | None
) -> int | None:
    """Return the one limit of a forest and its maps, or None; ValueError if they differ."""
    limits = {one.max_size for one in (data_map, node_map) if one is not None and one.max_size}
    if max_size is not None:
        limits.add(check_whole_number("max_size", max_size))
    if len(limits) > 1:
        raise ValueError(f"max_size and the maps' max_size must be equal, got {sorted(limits)}")
    return next(iter(limits), None)


class Edges(NamedTuple):
    """The distinct transitions of a forest, numbered in order of first occurrence.

    Attributes:
        source, target: int64 ``[E]``, numbers of the state before and after.
        pair: int64 ``[E]``, number of (state, action); two outcomes of one action share it.
        count: int64 ``[E]``, how often it was seen.
        reward: float64 ``[E]``, sum of its rewards over these times.
    """

    source: Tensor
    target: Tensor
    pair: Tensor
    count: Tensor  # type: ignore[assignment]  # hides the method of tuples
    reward: Tensor


class MCTSForest:
    """Collects transitions (observation, action) -> next observation, and extracts trees from them.

    Equal observations are one *state*, so trajectories that meet share their continuations: a forest is a graph, with
    transpositions, and with cycles if the env has them. A transition seen again is counted; an action with two outcomes
    has two transitions. Observations and actions are compared exactly. The forest is in host memory, whatever the
    batches' device.

    Args:
        data_map: an empty `TensorDictMap` whose in-keys name the observations and the actions. Default None. Only its
            keys and ``max_size`` are used; the forest stores transitions in its own memory.
        node_map: an empty `TensorDictMap` whose in-keys name the observations, and by whose hash modules states are
            compared. Default None.
        max_size: maximum number of distinct transitions; a batch that does not fit is refused as a whole. Default:
            that of the maps, or no limit.
        done_keys: names of the done flags under ``"next"``. Default ``"done"``, ``"terminated"``, ``"truncated"``.
        reward_keys: names of the rewards under ``"next"``, which are summed. Default ``"reward"``.
        observation_keys: entries that form a state. Default: those of the first batch
            (`flatroll.layout.observation_keys`).
        action_keys: entries that form an action. Default ``"action"``.
        excluded_keys: entries, at the root or under ``"next"``, that are not stored.
        consolidated: accepted for compatibility, without effect.

    >>> forest = MCTSForest()
    >>> runs = [([0, 123, 392], [1, 2, 3], [123, 392, 989]), ([0, 123], [1, 6], [123, 235])]
    >>> for seen, actions, then in runs:
    ...     columns = {"observation": torch.tensor(seen), "action": torch.tensor(actions)}
    ...     forest.extend(TensorDict(columns | {"next": {"observation": torch.tensor(then)}}, [len(seen)]))
    >>> tree = forest.get_tree(TensorDict({"observation": torch.tensor(0)}))
    >>> tree.rollout["action"], tree.selected_actions, [child.count for child in tree.subtree]
    (tensor([1]), tensor([2, 6]), [1, 1])
    >>> print(tree.to_string())
    (0,) {'observation': tensor(989)}
    (1,) {'observation': tensor(235)}
    """

    def __init__(
        self,
        *,
        data_map: TensorDictMap | None = None,
        node_map: TensorDictMap | None = None,
        max_size: int | None = None,
        done_keys: Sequence[NestedKey] | NestedKey | None = None,
        reward_keys: Sequence[NestedKey] | NestedKey | None = None,
        observation_keys: Sequence[NestedKey] | NestedKey | None = None,
        action_keys: Sequence[NestedKey] | NestedKey | None = None,
        excluded_keys: Sequence[NestedKey] | None = None,
        consolidated: bool | None = None,
    ) -> None:
        for name, one in (("data_map", data_map), ("node_map", node_map)):
            if one is not None:
                check_type(name, one, TensorDictMap, "a TensorDictMap or None")

        self.done_keys = _named("done_keys", done_keys) or _DONE_KEYS
        self.reward_keys = _named("reward_keys", reward_keys) or ["reward"]
        of_nodes = _in_keys(node_map)
        of_data = _in_keys(data_map)
        self.observation_keys = _named("observation_keys", observation_keys) or of_nodes

        if data_map is not None and not self.observation_keys:
            raise ValueError(
                "data_map also needs observation_keys or node_map, to distinguish observations from actions"
            )
        of_data = [key for key in of_data if key not in self.observation_keys]
        self.action_keys = _named("action_keys", action_keys) or of_data or ["action"]
        self.excluded_keys = {plain_key(as_tuple(key)) for key in _named("excluded_keys", excluded_keys)}
        needed = self.excluded_keys & {*self.observation_keys, *self.action_keys, "observation"}
        if needed:
            raise ValueError(
                f"excluded_keys must not name observations or actions, got {sorted(map(str, needed))}"
            )

        self.max_size = _size_limit(max_size, data_map, node_map)

        self._state_columns = None
        if node_map is not None:
            self._state_columns = node_map.query_module.columns

        self._states = RowNumbers(["observation"])
        self._pairs = RowNumbers(["state", *self.action_keys])
        self._edges = RowNumbers(["pair", "target"])
        self._rows = GrowingColumns()

        # For each transition: source, target, pair, count, and the sum of its rewards; with spare capacity.
        self._numbers: Array = np.empty((4, 0), np.int64)
        self._rewards_of: Array = np.empty(0)
        self._graph: Graph | None = None

    def __len__(self) -> int:
        """Number of distinct transitions."""
        return len(self._edges)

    @property
    def num_states(self) -> int:
        """Number of distinct states."""
        return len(self._states)

    @property
    def edges(self) -> Edges:
        """The distinct transitions; views that the next :meth:`extend` may invalidate."""
        source, target, pair, count = torch.from_numpy(self._numbers[:, : len(self)]).unbind(0)
        return Edges(source, target, pair, count, torch.from_numpy(self._rewards_of[: len(self)]))

    def rows(self, edges: Tensor) -> TensorDict:
        """The stored rows of transitions (numbers int64 ``[K]``), as they were first seen: a tensordict ``[K]``."""
        return self._rows.get(edges)

    def states(self, observations: TensorDictBase) -> Tensor:
        """Numbers of the states of observations ``[*B]``, int64 ``[*B]``; -1 for unknown ones."""
        if not len(self):
            return torch.full(observations.batch_size, -1)
        found = self._states.find(self._read_states(observations))
        return found.reshape(observations.batch_size)

    def children(self, state: int) -> Tensor:
        """Numbers of the transitions that leave a state, int64 ``[K]``, in the order in which they were first seen.

        A state that is not known, such as -1, has none.
        """
        if 0 <= state < self.num_states:
            leaving = self._get_graph().leaving(state)
        else:
            leaving = []
        return torch.tensor(leaving, dtype=torch.int64)

    # -- writing ---------------------------------------------------------------------------------------------------

    def extend(
        self,
        rollout: TensorDictBase,
        *,
        return_node: bool = False,
        final: TensorDictBase | None = None,
    ) -> Tree | None:
        """Add the transitions of a batch; on an error nothing is added.

        Args:
            rollout: rows ``[N]`` or ``[*B, T]`` with observations, actions and, under ``"next"``, the observations
                after them; rewards and done flags if there are any. Of a compact batch, which has no next
                observations, they are those of the next rows. Padding by its mask is left out.
            return_node: return the tree of the first row's observation. Default False.
            final: with a compact batch, ``collector.final``: the next observations of the last rows of its runs.

        Raises:
            KeyError: an entry is missing.
            TypeError: an entry has another dtype or shape than in the batches before.
            ValueError: rows whose next observation is not known.
            RuntimeError: there would be more than ``max_size`` transitions.
        """
        keys = self.observation_keys or observation_keys(rollout)
        columns = self._check_batch(rollout, keys, final)
        counts = [(numbers, len(numbers)) for numbers in (self._states, self._pairs, self._edges)]

        done = False
        try:
            self._insert(columns, keys)
            done = True
        finally:
            if not done:
                for numbers, count in counts:
                    numbers.truncate(count)

        self.observation_keys = keys
        self._graph = None

        if return_node and len(columns[self.action_keys[0]]):
            first = nest({key: columns[key][:1] for key in keys}, 1)
            return self.get_tree(first)
        return None

    def add(self, step: TensorDictBase, *, return_node: bool = False) -> Tree | None:
        """Add one transition, a tensordict ``[]``; see :meth:`extend`."""
        return self.extend(step.unsqueeze(0), return_node=return_node)

    def _check_batch(
        self, rollout: TensorDictBase, keys: list[NestedKey], final: TensorDictBase | None
    ) -> dict[NestedKey, Tensor]:
        """The columns ``[N, *F]`` of a batch, with next observations and without padding."""
        if not rollout.batch_dims:
            raise ValueError("rollout must have a batch dimension, got a single row: use add()")
        if not keys:
            raise KeyError("rollout has no observation: name its entries by observation_keys=")

        for key in (*keys, *self.action_keys):
            require(rollout, key)

        columns = flat_columns(rollout)
        for key, column in columns.items():
            if column.requires_grad or not column.is_cpu:
                columns[key] = column.detach().cpu()

        known = None
        if any(get_entry(rollout, next_key(key)) is None for key in keys):
            known = self._fill_next(rollout, columns, keys, final)

        if get_entry(rollout, NEXT_KNOWN) is not None:
            seen = marker(rollout, NEXT_KNOWN).reshape(-1).cpu()
            known = seen if known is None else known & seen

        if get_entry(rollout, MASK) is not None:
            real = marker(rollout, MASK).reshape(-1).cpu()
            columns = {key: column[real] for key, column in columns.items()}
            if known is not None:
                known = known[real]

        if known is not None and not bool(known.all()):
            unknown = (~known).nonzero().squeeze(-1)
            raise ValueError(
                f"the next observation of {len(unknown)} rows is not known, the first is row {int(unknown[0])}: "
                "pass final=collector.final with a compact batch, or leave these rows out"
            )
        return columns

    def _fill_next(
        self,
        rollout: TensorDictBase,
        columns: dict[NestedKey, Tensor],
        keys: list[NestedKey],
        final: TensorDictBase | None,
    ) -> Tensor:
        """Add next observations to the columns of a compact batch; return which rows have one, bool ``[N]``."""
        # The next observation of the last row of a run is not in the following row.
        known = ~run_ends(rollout).reshape(-1).cpu()
        at = None
        last = {}
        if final is not None:
            read = read_final(final.cpu(), keys)
            at = check_final(read, columns, len(known))
            last = read.next
            if set(last) == set(keys):
                known[at] = True

        for key in keys:
            columns[next_key(key)] = next_values(columns[key], at, last.get(key))
        return known

    def _insert(self, columns: dict[NestedKey, Tensor], keys: list[NestedKey]) -> None:
        """Number the transitions of columns ``[N, *F]``, count them, and store the new ones."""
        from flatroll.kernels.rows.hash_table import count_edges, number_edges  # numba

        rows = len(columns[keys[0]])
        before = len(self)
        both_columns = [(columns[key], columns[next_key(key)]) for key in keys]
        if self._state_columns is None and all(now.dtype == later.dtype for now, later in both_columns):
            self._states.names = keys
            states, now, floats = self._states.prepare([now for now, _ in both_columns])
            _, later, floats_later = self._states.prepare([later for _, later in both_columns])
        else:
            both = [torch.cat(pair) for pair in both_columns]
            states, words, floats = self._states.prepare(self._states_of_columns(both, keys))
            now = words[:rows]
            later = words[rows:]
            floats_later = floats

        # The kernel writes the numbers of states over these zeros.
        zeros = torch.zeros(rows, dtype=torch.int64)
        pairs, pair_words, _ = self._pairs.prepare([zeros, *(columns[key] for key in self.action_keys)])
        edges = self._edges.index or self._edges.prepare([zeros, zeros])[0]
        tables = [index.hashed for index in (states, pairs, edges)]
        counts = np.array([table.count for table in tables])

        made = np.empty((5, rows), np.int64)
        new = number_edges(
            tables[0].reserve(2 * rows),
            tables[1].reserve(rows),
            tables[2].reserve(rows),
            counts,
            (now.numpy(), floats),
            (later.numpy(), floats_later),
            pair_words.numpy(),
            made,
        )

        for table, count in zip(tables, counts.tolist(), strict=True):
            table.count = count
        if self.max_size is not None and len(self) > self.max_size:
            raise RuntimeError(
                f"{new} new transitions do not fit: the forest has {before} of at most "
                f"{self.max_size}. Nothing was added"
            )

        stored = columns
        if self.excluded_keys:
            left_out = self.excluded_keys
            stored = {k: column for k, column in columns.items() if not {k, without_next(k)} & left_out}
        if new < rows:
            first = torch.from_numpy(made[4, :new])
            stored = {key: column[first] for key, column in stored.items()}

        reward = self._rewards(columns, rows)
        if before + new > len(self._rewards_of):
            room = room_for(before + new)
            numbers = np.empty((4, room), np.int64)
            rewards = np.empty(room)
            numbers[:, :before] = self._numbers[:, :before]
            rewards[:before] = self._rewards_of[:before]
            self._numbers = numbers
            self._rewards_of = rewards

        self._rows.append(stored, new)
        count_edges(self._numbers, self._rewards_of, before, new, made, reward.numpy())

    def _rewards(self, columns: dict[NestedKey, Tensor], rows: int) -> Tensor:
        """The sum of all rewards of each row, float64 ``[N]``; zeros if there are none."""
        total: Tensor | None = None
        for key in self.reward_keys:
            column = columns.get(under_next(key))
            if column is not None:
                values = column.double()
                if values.numel() == rows:
                    values = values.reshape(rows)
                else:
                    values = values.reshape(rows, prod(column.shape[1:])).sum(-1)
                total = values if total is None else total + values
        if total is None:
            return torch.zeros(rows, dtype=torch.float64)
        return total.contiguous()

    def _read_states(self, rows: TensorDictBase) -> list[Tensor]:
        keys = self.observation_keys
        for key in keys:
            require(rows, key)
        return self._states_of_columns(list(flat_columns(rows, keys).values()), keys)

    def _states_of_columns(self, columns: list[Tensor], keys: list[NestedKey]) -> list[Tensor]:
        """Return the values that identify states: the observations, or the node map's hashes of them."""
        self._states.names = keys
        if self._state_columns is None:
            return columns
        return self._state_columns(nest(dict(zip(keys, columns, strict=True)), len(columns[0])))

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def node_map(self) -> "NodeMap":
        """From observations to the transitions that leave their states."""
        return NodeMap(self)

    @property
    def data_map(self) -> "DataMap":
        """From transitions, by their numbers or by observation and action, to their rows."""
        return DataMap(self)

    def find_edges(self, rows: TensorDictBase) -> Tensor:
        """Numbers of the transitions of observations and actions ``[*B]``, int64 ``[*B]``; -1 for unknown ones.

        Of several outcomes it is the one seen most often, the first of those seen equally often.
        """
        size = rows.batch_size
        if not len(self):
            return torch.full(size, -1)

        states = self._states.find(self._read_states(rows))
        for key in self.action_keys:
            require(rows, key)
        actions = flat_columns(rows, self.action_keys)
        pairs = self._pairs.find([states, *actions.values()])

        by_count = self.edges.count.argsort(descending=True, stable=True)
        order = by_count[self.edges.pair[by_count].argsort(stable=True)]
        first = torch.searchsorted(self.edges.pair[order], pairs).clamp_(max=len(order) - 1)
        return torch.where(pairs < 0, -1, order[first]).reshape(size)

    def get_child(self, root: TensorDictBase) -> TensorDict:
        """The stored rows of transitions: of observations and actions ``[*B]``, with ``"next"``; see `DataMap`.

        Raises:
            KeyError: one was not seen.
        """
        return cast(TensorDict, self.data_map[root])

    def get_tree(self, root: TensorDictBase, *, max_depth: int | None = None, compact: bool = True) -> Tree:
        """Extract the tree rooted at an observation. Each state is expanded once; see `Tree`.

        Time and memory are proportional to the number of reachable transitions, not of paths. A tree is a snapshot: it
        does not change when the forest grows.

        Args:
            root: an observation, of batch size ``[]`` or ``[1]``.
            max_depth: vertices that many levels below the root are the last to be expanded. Default: all are.
            compact: join transitions that follow one another without a branch into one vertex. Default True; False
                makes each transition a vertex.

        Raises:
            KeyError: the observation was not seen.
        """
        if not len(self):
            raise KeyError("the forest is empty: extend it first")
        if root.batch_size.numel() != 1:
            raise ValueError(f"root must be one observation, got batch size {list(root.batch_size)}")
        if max_depth is not None:
            check_whole_number("max_depth", max_depth, least=0)

        state = int(self.states(root))
        if state < 0:
            seen = {key: require(root, key).tolist() for key in self.observation_keys}
            raise KeyError(f"no transition of the forest begins or ends at the observation {seen}")
        return grow_tree(self._get_graph(), state, max_depth, compact)

    def to_string(self, td_root: TensorDictBase, node_format_fn: Callable[[Tree], Any] | None = None) -> str:
        """The tree of an observation as text; see `Tree.to_string`."""
        return self.get_tree(td_root).to_string(node_format_fn)

    @classmethod
    def valid_paths(cls, tree: Tree) -> Any:
        """The paths of a tree; see `Tree.valid_paths`."""
        yield from tree.valid_paths()

    def _get_graph(self) -> Graph:
        if self._graph is None:
            source, target, pair, count, reward = self.edges
            order = source.argsort(stable=True)
            # Transitions that leave state s are order[offsets[s]:offsets[s + 1]].
            offsets = torch.zeros(self.num_states + 1, dtype=torch.int64)
            offsets[1:] = torch.bincount(source, minlength=self.num_states).cumsum(0)
            assert self._states.index is not None and self._pairs.index is not None
            states = hash_words(self._states.index.words)
            actions = self._pairs.index.words[:, 1:]  # the columns after the state number
            self._graph = Graph(
                offsets.tolist(),
                order.tolist(),
                target.tolist(),
                count.clone(),
                reward.clone(),
                hash_words(torch.cat([states[source, None], actions[pair], states[target, None]], -1)),
                self._rows,
                self.observation_keys,
                self.action_keys,
                [under_next(key) for key in self.done_keys],
            )
        return self._graph

    @property
    def hashes(self) -> Tensor:
        """A hash of each transition, int64 ``[E]``, computed from values, not numbers, so equal in all forests."""
        if len(self):
            return self._get_graph().hashes
        return torch.empty(0, dtype=torch.int64)


class NodeMap:
    """Maps observations to the transitions that leave their states; it is ``forest.node_map``.

    ``forest.node_map[data]`` of one observation (batch size ``[]``) is a tensordict ``[K]`` of its K transitions:
    ``"_index"``, their numbers, ``"_hash"``, their hashes, and ``"count"``, how often each was seen, all int64 ``[K]``,
    in the order in which they were first seen. Of ``[N]`` observations it is a lazy stack of N such tensordicts.

    >>> forest = MCTSForest()
    >>> rows = {"observation": torch.tensor([0, 0]), "action": torch.tensor([1, 2])}
    >>> forest.extend(TensorDict(rows | {"next": {"observation": torch.tensor([5, 6])}}, [2]))
    >>> index = forest.node_map[TensorDict({"observation": torch.tensor(0)})]["_index"]
    >>> index, forest.data_map[index]["next", "observation"]
    (tensor([0, 1]), tensor([5, 6]))
    """

    def __init__(self, forest: MCTSForest) -> None:
        self._forest = forest

    def __len__(self) -> int:
        """Number of states, including those that only end transitions."""
        return self._forest.num_states

    def contains(self, item: TensorDictBase) -> Tensor:
        """Which observations ``[*B]`` are states of the forest, bool ``[*B]``."""
        return self._forest.states(item) >= 0

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
                f"{int((states < 0).sum())} of {states.numel()} observations are not states of the forest: "
                "check with contains()"
            )

        found = [self._read_transitions(int(state)) for state in states.reshape(-1)]
        if not states.ndim:
            return found[0]
        return cast(TensorDictBase, LazyStackedTensorDict(*found))

    def _read_transitions(self, state: int) -> TensorDict:
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

    def __init__(self, forest: MCTSForest) -> None:
        self._forest = forest

    def __len__(self) -> int:
        """Number of distinct transitions."""
        return len(self._forest)

    def contains(self, item: TensorDictBase) -> Tensor:
        """Which observations and actions ``[*B]`` were seen together, bool ``[*B]``."""
        return self._forest.find_edges(item) >= 0

    def __contains__(self, item: TensorDictBase) -> bool:
        """Whether all of them were seen together."""
        return bool(self.contains(item).all())

    def __getitem__(self, item: TensorDictBase | Tensor) -> TensorDictBase:
        if isinstance(item, Tensor):
            edges = item
            what = "numbers of transitions"
        else:
            edges = self._forest.find_edges(item)
            what = "pairs of observation and action"

        outside = (edges < 0) | (edges >= len(self))
        if bool(outside.any()):
            raise KeyError(
                f"{int(outside.sum())} of {edges.numel()} {what} are not in the forest: check with contains()"
            )
        return self._forest.rows(edges.reshape(-1)).reshape(edges.shape)
