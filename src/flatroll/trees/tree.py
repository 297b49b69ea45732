"""`Tree`: a view of a forest, starting at one state."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.layout.checks import check_choice
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    STEP_COUNT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    next_key,
    under_next,
)
from flatroll.layout.tensordict_seam import nest
from flatroll.specs import Composite, make_composite_from_td
from flatroll.trees.rows import GrowingColumns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A forest's transitions, grouped by the state that they leave."""

    offsets: list[int]
    order: list[int]
    target: list[int]
    count: Tensor
    reward: Tensor
    hashes: Tensor
    rows: GrowingColumns
    observation_keys: list[NestedKey]
    action_keys: list[NestedKey]
    done_keys: list[tuple[str, ...]]

    def leaving(self, state: int) -> list[int]:
        """Return the numbers of the transitions that leave a state."""
        return self.order[self.offsets[state] : self.offsets[state + 1]]


class Vertices:
    """The vertices of one tree by their numbers, in breadth-first order; vertex 0 is the root.

    Attributes:
        chains: for each vertex, the transitions from the parent's state to its own, in order; for the root, those up
            to the first branch.
        states: the state at the end of each vertex.
        children: for each vertex, the numbers of its children; None if it is not expanded.
        parents: for each vertex, the numbers of its parents.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.chains: list[list[int]] = []
        self.states: list[int] = []
        self.children: list[list[int] | None] = []
        self.parents: list[list[int]] = []

    def new(self, chain: list[int], state: int) -> int:
        self.chains.append(chain)
        self.states.append(state)
        self.children.append(None)
        self.parents.append([])
        return len(self.chains) - 1


def grow_tree(graph: Graph, root: int, max_depth: int | None, compact: bool) -> "Tree":
    """Build the tree of a state; see `MCTSForest.get_tree`."""
    entering = _count_entering(graph, root) if compact else {}

    def chain_from(edge: int) -> list[int]:
        """Return the transition and those after it, up to a branch, a state that two transitions enter, or the root.

        All other states on the way are entered by one transition only, so that no chain is a cycle, and each
        transition is in one chain.
        """
        chain = [edge]
        while compact:
            state = graph.target[chain[-1]]
            leaving = graph.leaving(state)
            if len(leaving) != 1 or entering[state] > 1 or state == root:
                break
            chain.append(leaving[0])
        return chain

    vertices = Vertices(graph)
    beginning = graph.leaving(root)
    chain = chain_from(beginning[0]) if compact and len(beginning) == 1 else []
    state = graph.target[chain[-1]] if chain else root
    vertices.new(chain, state)
    by_edge = {chain[0]: 0} if chain else {}

    queue = deque([(0, 0)])
    while queue:
        vertex, depth = queue.popleft()
        if max_depth is not None and depth > max_depth:
            continue

        children: list[int] = []
        vertices.children[vertex] = children
        for edge in graph.leaving(vertices.states[vertex]):
            child = by_edge.get(edge)
            if child is None:
                chain = chain_from(edge)
                child = vertices.new(chain, graph.target[chain[-1]])
                by_edge[edge] = child
                queue.append((child, depth + 1))
            children.append(child)
            vertices.parents[child].append(vertex)
    return Tree(vertices, 0)


def _count_entering(graph: Graph, root: int) -> dict[int, int]:
    """Count the reachable transitions that enter each state."""
    entering: dict[int, int] = {root: 0}
    stack = [root]
    while stack:
        for edge in graph.leaving(stack.pop()):
            state = graph.target[edge]
            if state not in entering:
                entering[state] = 0
                stack.append(state)
            entering[state] += 1
    return entering


class Tree:
    """A vertex of a tree with its descendants, as returned by `MCTSForest.get_tree`.

    A vertex is a transition and, in a compact tree, the transitions after it up to the next branch. :attr:`rollout`
    has these rows, :attr:`node_data` the observation at their end. The root's rollout covers the transitions from the
    root's observation to the first branch; it is None if the root branches at once. Each child in :attr:`subtree`
    begins with a different transition: a different action, or a different outcome of the same action.

    Paths that meet share vertices, so a child may have several parents. In a cycle a vertex is its own descendant.
    Lists of paths and of edges expand each vertex once, so they are finite.

    Two trees are equal if they are the same vertex of the same tree. Create trees with `MCTSForest.get_tree`.
    """

    __slots__ = ("_vertices", "node_id")

    def __init__(self, vertices: Vertices, node_id: int) -> None:
        self._vertices = vertices
        #: Number of the vertex in breadth-first order; the root is 0.
        self.node_id = node_id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        return self._vertices is other._vertices and self.node_id == other.node_id

    def __hash__(self) -> int:
        return hash((id(self._vertices), self.node_id))

    def __repr__(self) -> str:
        return (
            f"Tree(node_id={self.node_id}, count={self.count}, children={self.num_children}, "
            f"steps={len(self._chain)}, hash={self.hash})"
        )

    # -- contents of this vertex ------------------------------------------------------------------------------------

    @property
    def _chain(self) -> list[int]:
        return self._vertices.chains[self.node_id]

    @property
    def count(self) -> int:
        """Number of times the vertex's first transition was seen; for the root, times its state was left."""
        graph = self._vertices.graph
        if self.node_id:
            return int(graph.count[self._chain[0]])
        chain = self._chain
        return int(graph.count[chain[:1] or graph.leaving(self._vertices.states[0])].sum())

    @property
    def visits(self) -> int:
        """Alias of :attr:`count`."""
        return self.count

    @property
    def wins(self) -> float:
        """The sum of the rewards of the vertex's first transition over its visits; 0.0 for the root."""
        if self.node_id:
            return float(self._vertices.graph.reward[self._chain[0]])
        return 0.0

    @property
    def hash(self) -> int | None:
        """A 64-bit hash of the vertex's first transition, the same in all forests; None for the root."""
        if self.node_id:
            return int(self._vertices.graph.hashes[self._chain[0]])
        return None

    @property
    def index(self) -> Tensor:
        """Numbers of the children's first transitions in the forest, int64 ``[num_children]``."""
        edges = [self._vertices.chains[child][0] for child in self._child_ids]
        return torch.tensor(edges, dtype=torch.int64)

    @property
    def num_steps(self) -> int:
        """Number of transitions of the vertex, the rows of :attr:`rollout`."""
        return len(self._chain)

    @property
    def rollout(self) -> TensorDict | None:
        """The vertex's transitions as rows ``[T]``, as first seen; None for a root that branches at once."""
        if self._chain:
            return self._vertices.graph.rows.get(torch.tensor(self._chain))
        return None

    @property
    def specs(self) -> Composite:
        """The spec of one row of the forest, with any values: dtypes and shapes of :attr:`rollout`'s entries."""
        return make_composite_from_td(
            self._vertices.graph.rows.get(torch.tensor([0]))[0], unsqueeze_null_shapes=False
        )

    @property
    def node_data(self) -> TensorDict:
        """The observation at the vertex's end, where it branches: a tensordict ``[]``."""
        graph = self._vertices.graph
        keys = graph.observation_keys
        if self._chain:
            edge = self._chain[-1]
            read: list[NestedKey] = [next_key(key) for key in keys]
        else:
            leaving = graph.leaving(self._vertices.states[self.node_id])
            # If no transition leaves the root, use one that enters it.
            if leaving:
                edge = leaving[0]
                read = list(keys)
            else:
                edge = graph.target.index(self._vertices.states[0])
                read = [next_key(key) for key in keys]

        columns = {key: graph.rows.column(entry)[edge].clone() for key, entry in zip(keys, read, strict=True)}
        return nest(columns)

    @property
    def node_observations(self) -> TensorDict:
        """Alias of :attr:`node_data`."""
        return self.node_data

    @property
    def node_observation(self) -> Tensor | TensorDictBase:
        """The observation where the vertex branches: a tensor, or a tensordict if a state has several entries."""
        data = self.node_data
        keys = self._vertices.graph.observation_keys
        if len(keys) == 1:
            return cast(Tensor, data[keys[0]])
        return data

    @property
    def is_terminal(self) -> bool:
        """Whether the vertex's last transition is done; False without done flags, and for a root without rollout."""
        graph = self._vertices.graph
        stored = [key for key in graph.done_keys if key in graph.rows.keys]
        return bool(self._chain) and any(
            bool(graph.rows.column(key)[self._chain[-1]].any()) for key in stored
        )

    # -- actions -----------------------------------------------------------------------------------------------------

    def _actions(self, edges: list[int]) -> Tensor | TensorDict:
        graph = self._vertices.graph
        columns = {key: graph.rows.column(key)[edges] for key in graph.action_keys}
        if len(columns) == 1:
            return next(iter(columns.values()))
        return nest(columns, len(edges))

    @property
    def selected_actions(self) -> Tensor | TensorDict | None:
        """The children's first actions, ``[num_children, *F]``; None without children."""
        if self._child_ids:
            return self._actions(self.index.tolist())
        return None

    @property
    def branching_action(self) -> Any:
        """The vertex's first action, taken in its parent's state; None without rollout."""
        if self._chain:
            return self._actions(self._chain[:1])[0]
        return None

    @property
    def prev_action(self) -> Any:
        """The vertex's last action, which led to :attr:`node_data`; None without rollout."""
        if self._chain:
            return self._actions(self._chain[-1:])[0]
        return None

    def fully_expanded(self, num_actions: int) -> bool:
        """Return whether at least ``num_actions`` different actions were taken here."""
        actions = self.selected_actions
        if actions is None:
            return num_actions <= 0

        columns: list[Any] = [actions] if isinstance(actions, Tensor) else list(actions.values(True, True))
        rows = torch.cat([column.reshape(self.num_children, -1).double() for column in columns], -1)
        return len(set(map(tuple, rows.tolist()))) >= num_actions

    # -- neighbours --------------------------------------------------------------------------------------------------

    @property
    def _child_ids(self) -> list[int]:
        return self._vertices.children[self.node_id] or []

    @property
    def subtree(self) -> "tuple[Tree, ...] | None":
        """The children in the order of their first visits; None if there are none."""
        return tuple(Tree(self._vertices, child) for child in self._child_ids) or None

    @property
    def num_children(self) -> int:
        """Number of children."""
        return len(self._child_ids)

    @property
    def parents(self) -> "tuple[Tree, ...]":
        """All parents, in the order in which they were found; empty for a root without a cycle."""
        return tuple(Tree(self._vertices, parent) for parent in self._vertices.parents[self.node_id])

    @property
    def parent(self) -> "Tree | None":
        """The first of :attr:`parents`; None for the root."""
        if self.node_id:
            return self.parents[0]
        return None

    def __contains__(self, other: "Tree") -> bool:
        """Return whether a vertex of this tree begins with the same transition as ``other``."""
        return any(vertex.hash == other.hash for vertex in self._walk())

    # -- all vertices ------------------------------------------------------------------------------------------------

    def _walk_paths(self) -> "Iterator[tuple[Tree, Path, bool]]":
        """Iterate over vertices breadth first: each with its path and whether this is its first visit."""
        seen = {self.node_id}
        queue: deque[tuple[int, Path, bool]] = deque([(self.node_id, (), True)])
        while queue:
            vertex, path, first = queue.popleft()
            yield Tree(self._vertices, vertex), path, first
            if first:
                for i, child in enumerate(self._vertices.children[vertex] or ()):
                    queue.append((child, (*path, i), child not in seen))
                    seen.add(child)

    def _walk(self) -> "Iterator[Tree]":
        return (vertex for vertex, _, first in self._walk_paths() if first)

    def vertices(self, *, key_type: Literal["hash", "id", "path"] = "hash") -> "dict[Any, Tree]":
        """Return all vertices, breadth first.

        Args:
            key_type: ``"hash"`` (default; None for the root), ``"id"`` or ``"path"``. With ``"path"``, a vertex with
                several paths is listed for each of them, but its descendants only once.
        """
        if check_choice("key_type", key_type, ("hash", "id", "path")) == "path":
            return {path: vertex for vertex, path, _ in self._walk_paths()}
        if key_type == "hash":
            return {vertex.hash: vertex for vertex in self._walk()}
        return {vertex.node_id: vertex for vertex in self._walk()}

    def num_vertices(self, *, count_repeat: bool = False) -> int:
        """Return the number of vertices, or with ``count_repeat`` the number of paths of :meth:`vertices`."""
        return sum(1 for _, _, first in self._walk_paths() if first or count_repeat)

    def edges(self) -> list[tuple[int, int]]:
        """Return the pairs (number of the parent, number of the child), each once, breadth first."""
        children = self._vertices.children
        pairs: list[tuple[int, int]] = []
        for vertex in self._walk():
            pairs += [(vertex.node_id, child) for child in children[vertex.node_id] or ()]
        return list(dict.fromkeys(pairs))

    def valid_paths(self) -> Iterator[Path]:
        """Iterate over the paths to the leaves, as child indices; a path also ends at an already visited vertex."""
        for vertex, path, first in self._walk_paths():
            if not first or not vertex.num_children:
                yield path

    def max_length(self) -> int:
        """Return the length of the longest of :meth:`valid_paths`."""
        return max(len(path) for path in self.valid_paths())

    def get_vertex(self, path: Path) -> "Tree":
        """Return the vertex at the end of a path.

        Raises:
            IndexError: a child of the path does not exist.
        """
        vertex = self.node_id
        for depth, i in enumerate(path):
            children = self._vertices.children[vertex] or []
            if not 0 <= i < len(children):
                raise IndexError(f"path[{depth}] is {i}, but there are {len(children)} children")
            vertex = children[i]
        return Tree(self._vertices, vertex)

    def get_vertex_by_id(self, id: int) -> "Tree":
        """Return the vertex with this number; ValueError if this tree has none."""
        return self._first(f"node_id {id}", lambda vertex: vertex.node_id == id)

    def get_vertex_by_hash(self, hash: int | None) -> "Tree":
        """Return the vertex with this hash; ValueError if this tree has none."""
        return self._first(f"hash {hash}", lambda vertex: vertex.hash == hash)

    def _first(self, name: str, matches: "Callable[[Tree], bool]") -> "Tree":
        found = next((vertex for vertex in self._walk() if matches(vertex)), None)
        if found is None:
            raise ValueError(f"no vertex of this tree has the {name}")
        return found

    def rollout_from_path(self, path: Path) -> TensorDict | None:
        """Return the transitions along a path, including this vertex's own, as rows ``[T]``; None if there are none.

        The rows may have been seen in several trajectories. Here they are one: trajectory ids are those of the last
        row, step counts continue that of the first one, only the first row may be an ``is_init``, and only the last one
        may be done.
        """
        self.get_vertex(path)
        vertex = self.node_id
        edges = list(self._chain)
        for i in path:
            vertex = cast(list[int], self._vertices.children[vertex])[i]
            edges += self._vertices.chains[vertex]
        if edges:
            return _as_one_trajectory(self._vertices.graph.rows.get(torch.tensor(edges)))
        return None

    # -- display -----------------------------------------------------------------------------------------------------

    def to_string(self, node_format_fn: "Callable[[Tree], Any] | None" = None) -> str:
        """Return one line per vertex below this one, depth first: its path and the result of ``node_format_fn``.

        Lines are indented by depth. Repeated vertices are marked, and their descendants are not listed again.

        Args:
            node_format_fn: converts a vertex to a printable object. Default: its ``node_data`` as a dict.
        """
        lines: list[str] = []
        seen: dict[int, Path] = {self.node_id: ()}
        stack: list[tuple[int, Path]] = []
        stack += [(child, (i,)) for i, child in enumerate(self._child_ids)][::-1]

        while stack:
            vertex, path = stack.pop()
            tree = Tree(self._vertices, vertex)
            if node_format_fn is None:
                text = tree.node_data.to_dict()
            else:
                text = node_format_fn(tree)
            again = f" (as {seen[vertex]})" if vertex in seen else ""

            lines.append(f"{' ' * (len(path) - 1)}{path} {text}{again}")
            if not again:
                seen[vertex] = path
                stack += [
                    (child, (*path, i)) for i, child in enumerate(self._vertices.children[vertex] or ())
                ][::-1]
        return "\n".join(lines)

    def plot(
        self,
        backend: Literal["matplotlib"] = "matplotlib",
        figure: Literal["tree", "box"] = "tree",
        info: None = None,
        make_labels: "Callable[[Tree], str] | None" = None,
        *,
        ax: "Axes | None" = None,
        max_vertices: int = 400,
    ) -> "Axes":
        """Draw the tree from left to right, with matplotlib.

        Vertices whose last transition is done have another colour.

        Args:
            backend: ``"matplotlib"``, the only one.
            figure: ``"tree"`` (default): the area of a vertex's mark grows with its count; the width of a line is the
                count of transitions, and it is dashed if it leads to a vertex that is already drawn. ``"box"``:
                vertices are boxes, darker for higher counts; the width is the number of steps, the height the number
                of leaves.
            info: must be None; set labels with ``make_labels``.
            make_labels: function that returns the label of a vertex. Default: action and count if there are few
                vertices.
            ax: axes to draw in. Default: those of a new figure.
            max_vertices: draw at most this many vertices, breadth first, and say so. Default 400.

        Raises:
            ImportError: matplotlib is missing; the message names the extra.
            ValueError: ``backend`` or ``figure`` is unknown, or ``info`` is given.
        """
        if backend != "matplotlib" or figure not in ("tree", "box") or info is not None:
            raise ValueError(
                "plot supports backend='matplotlib' and figure='tree' or 'box', and takes make_labels= in "
                f"place of info=; got backend={backend!r}, figure={figure!r}, info={info!r}"
            )
        try:
            from flatroll.trees.picture import draw
        except ModuleNotFoundError as error:
            raise ImportError(
                'plot draws with matplotlib, which is missing: pip install "flatroll[plot]"'
            ) from error
        return draw(self, figure, ax, make_labels, max_vertices)


def _as_one_trajectory(rows: TensorDict) -> TensorDict:
    """Make the markers of rows ``[T]``, where they are there, those of one trajectory; change the rows in place."""
    ids = rows.get(TRAJ_IDS, None)
    if ids is not None:
        rows.set(TRAJ_IDS, ids[-1:].expand_as(ids).clone())

    is_init = rows.get(IS_INIT, None)
    if is_init is not None:
        is_init[1:] = False  # the rows are a copy

    for key in (STEP_COUNT, under_next(STEP_COUNT)):
        step = rows.get(key, None)
        if step is not None:
            after_first = torch.arange(len(rows), dtype=step.dtype, device=step.device)
            rows.set(key, step[:1] + after_first.view(-1, *[1] * (step.ndim - 1)))

    for key in (DONE, TERMINATED, TRUNCATED):
        flag = rows.get(key, None)
        if flag is not None:
            flag[:-1] = False
    return rows
