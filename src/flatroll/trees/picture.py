"""A tree as a picture."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
# `flatroll.trees.Tree`, which cannot be imported here because its file imports this one.
Tree: TypeAlias = Any

# from Okabe and Ito's colours, like the timeline
INK = "#37424d"
LINE = "#9aa7b4"
NODE = "#0072b2"
DONE = "#d55e00"
_HALO = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.4}
_LABELLED = 60  # maximum number of vertices that are labelled by default


class Shown(NamedTuple):
    """What is drawn of V vertices.

    Attributes:
        x: ``[V]``, steps from the root.
        y: ``[V]``, a row for each leaf, downwards; of others the middle of their children.
        spans: ``[V, 2]``, the rows of the first and the last leaf.
        counts: ``[V]``.
        done: bool ``[V]``, whether the last transition is done.
        texts: labels, or none.
    """

    trees: list[Tree]
    x: Floats
    y: Floats
    spans: Floats
    counts: Floats
    done: NDArray[np.bool_]
    texts: list[str]


def draw(
    tree: Tree, figure: str, ax: "Axes | None", make_labels: Callable[[Tree], str] | None, max_vertices: int
) -> "Axes":
    """Draw a tree; see `Tree.plot`."""
    trees, links = _choose(tree, max_vertices)
    texts: list[str] = []
    if make_labels is not None or len(trees) <= _LABELLED:
        label = _label if make_labels is None else make_labels
        texts = [label(vertex) for vertex in trees]

    counts = np.array([vertex.count for vertex in trees], float)
    done = np.array([vertex.is_terminal for vertex in trees])
    shown = Shown(trees, *_place(trees, links), counts, done, texts)

    if ax is None:
        height = min(max(3.0, 1.2 + 0.24 * -shown.y.min()), 12.0)
        ax = Figure(figsize=(9, height), layout="constrained").add_subplot()

    if figure == "box":
        _draw_boxes(ax, shown)
    else:
        _draw_lines(ax, shown, links)

    total = tree.num_vertices()
    more = ""
    if len(trees) != total:
        more = f" (the first {len(trees)} of {total} are drawn)"

    ax.set_title(f"{total} vertices, {int(counts[0])} visits of the root{more}", loc="left", fontsize=10)
    ax.set(xlabel="steps from the root", yticks=[])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[["top", "right", "left"]].set_visible(False)
    if shown.done.any():
        ax.legend(frameon=False, fontsize=8, loc="best")
    return ax


def _draw_lines(ax: "Axes", shown: Shown, links: list[tuple[int, int, bool]]) -> None:
    """Vertices as marks, with lines between them."""
    x = shown.x
    y = shown.y
    done = shown.done
    number = {vertex.node_id: i for i, vertex in enumerate(shown.trees)}
    share = shown.counts / max(shown.counts.max(), 1.0)

    for style, wanted in (("solid", True), ("dashed", False)):
        bend = 0.0 if wanted else 0.3
        pairs = [(number[a], number[b]) for a, b, first in links if first is wanted]
        lines = [_line(x[[a, b]], y[[a, b]], bend=bend) for a, b in pairs]
        widths = [0.6 + 3.4 * share[b] for _, b in pairs]
        ax.add_collection(LineCollection(lines, linewidths=widths, linestyles=style, colors=LINE, zorder=1))

    sizes = 12 + 150 * share
    for mask, mark, colour, name in ((~done, "o", NODE, "continues"), (done, "s", DONE, "done")):
        if mask.any():
            ax.scatter(x[mask], y[mask], sizes[mask], c=colour, marker=mark, label=name, zorder=2)

    for text, at_x, at_y in zip(shown.texts, x, y, strict=bool(shown.texts)):
        ax.annotate(
            text,
            (at_x, at_y),
            (8, -2.5),
            textcoords="offset points",
            fontsize=7,
            color=INK,
            zorder=3,
            bbox=_HALO,
        )

    ax.margins(0.06, 0.12)


def _draw_boxes(ax: "Axes", shown: Shown) -> None:
    """Draw vertices as boxes: children to the right of their parent, with their number of leaves as height."""
    widths = np.array([max(vertex.num_steps, 1) for vertex in shown.trees])
    left = shown.x - widths
    low = shown.spans[:, 1] - 0.5
    high = shown.spans[:, 0] + 0.5
    shades = 0.15 + 0.6 * shown.counts / max(shown.counts.max(), 1.0)
    for mask, colour, name in ((~shown.done, NODE, "continues"), (shown.done, DONE, "done")):
        if mask.any():
            faces = [(*to_rgb(colour), shade) for shade in shades[mask]]
            sizes = {"width": widths[mask], "height": (high - low)[mask], "left": left[mask]}
            ax.barh(low[mask], **sizes, align="edge", color=faces, edgecolor="white", label=name)

    for text, at_x, at_y in zip(shown.texts, left + 0.05, (low + high) / 2, strict=bool(shown.texts)):
        ax.text(at_x, at_y, text, fontsize=7, color=INK, va="center")


def _line(x: Floats, y: Floats, bend: float) -> Floats:
    """Points ``[K, 2]`` of a line between two, which leaves its straight way by ``bend`` to the right."""
    points = 13 if bend else 2
    way = np.linspace(0, 1, points)
    return np.stack([x[0] + way * (x[1] - x[0]) + 4 * bend * way * (1 - way), y[0] + way * (y[1] - y[0])], -1)


def _choose(tree: Tree, most: int) -> tuple[list[Tree], list[tuple[int, int, bool]]]:
    """The first vertices, breadth first, and lines (parent, child, whether it is the child's first) among them."""
    shown = [tree]
    seen = {tree.node_id}
    links = []
    queue = deque([tree])
    while queue:
        vertex = queue.popleft()
        for child in vertex.subtree or ():
            first = child.node_id not in seen
            if first and len(shown) >= most:
                continue
            links.append((vertex.node_id, child.node_id, first))
            if first:
                seen.add(child.node_id)
                shown.append(child)
                queue.append(child)
    return shown, links


def _place(shown: list[Tree], links: list[tuple[int, int, bool]]) -> tuple[Floats, Floats, Floats]:
    """Places of vertices: ``x``, ``y`` and ``spans`` of `Shown`."""
    number = {vertex.node_id: i for i, vertex in enumerate(shown)}
    children: list[list[int]] = [[] for _ in shown]
    x = np.zeros(len(shown))
    for parent, child, first in links:  # breadth first: parents before their children
        if first:
            a = number[parent]
            b = number[child]
            children[a].append(b)
            x[b] = x[a] + shown[b].num_steps

    y = np.zeros(len(shown))
    row = 0
    order = []
    stack = [0]
    while stack:
        vertex = stack.pop()
        order.append(vertex)
        stack += children[vertex][::-1]
        if not children[vertex]:
            y[vertex] = -row
            row = row + 1

    spans = np.stack([y, y], -1)
    for vertex in reversed(order):  # children before their parents
        if children[vertex]:
            top = children[vertex][0]
            bottom = children[vertex][-1]
            y[vertex] = (y[top] + y[bottom]) / 2
            spans[vertex] = (spans[top, 0], spans[bottom, 1])

    return x, y, spans


def _label(vertex: Tree) -> str:
    """The first action and the count."""
    if not vertex.node_id or not hasattr(vertex.branching_action, "tolist"):
        return f"{vertex.count}"
    action = vertex.branching_action
    if action.numel() == 1:
        text = f"{action.item()}"
    else:
        text = "(" + ", ".join(f"{a:g}" for a in action.tolist()) + ")"
    return f"a={text}, n={vertex.count}"
