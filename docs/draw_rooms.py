"""Draws the rooms of the library and who imports whom, from the imports: ``python -m docs.draw_rooms``."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.shape.imports import OUTER_ROOMS, Graph, grouped, import_graph, is_outer

PICTURE = Path(__file__).parent / "img" / "rooms.png"
WIDTH, GAP, ROW_GAP, LINE = 2.4, 0.4, 0.7, 0.3  # a card, between cards, between their rows, a line of text
OUTER_COLOUR = "#A03010"  # of folders of the outer ring
COLOURS = {
    "sharing": "#E8E8E8",
    "layout": "#E8E8E8",
    "kernels": "#E8E8E8",
    "disk": "#E8E8E8",
    "specs": "#E8E8E8",
    "wrappers": "#CFE4F3",
    "rollouts": "#A9D0EA",
    "buffers": "#FCE3B6",
    "modules": "#CDEBDD",
    "estimators": "#9FDCC0",
    "trees": "#F9C9B6",
    "datasets": "#F9C9B6",
    "text": "#F9C9B6",
    "deploy": "#F9C9B6",
}


def levels(graph: Graph) -> dict[str, int]:
    """How many arrows the longest way down from each node has; 0 for what imports nothing."""
    found: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((level(target) for target in graph.get(name, ())), default=-1)
        return found[name]

    for name in graph:
        level(name)
    return found


def folders(room: str, graph: Graph) -> list[str]:
    """The folders of a room, each before those that it imports."""
    files = {file: targets for file, targets in graph.items() if file.startswith(f"{room}.")}
    inside = {file.split(".")[1] for file in files if file.count(".") > 1}
    level = levels(grouped(files, 2))
    return sorted(inside, key=lambda folder: (-level[f"{room}.{folder}"], folder))


def draw(axes: Axes, graph: Graph) -> None:
    """Cards in rows, each room above the rooms that it imports.

    An arrow that follows from two others is left out.
    """
    rooms = grouped(graph, 1)
    level = levels(rooms)
    rows = [[room for room in COLOURS if level[room] == row] for row in range(max(level.values()) + 1)]
    columns = max(map(len, rows))
    floor = 0.0
    corners: dict[str, tuple[float, float, float]] = {}  # left edge, lower edge, upper edge
    for row in rows:
        heights = {room: LINE * (len(folders(room, graph)) + 1.8) for room in row}
        ceiling = floor + max(heights.values())
        indent = (columns - len(row)) * (WIDTH + GAP) / 2
        for i, (room, height) in enumerate(heights.items()):
            low = floor if floor else ceiling - height  # lower edges in line, in the lowest row upper ones
            corners[room] = (indent + i * (WIDTH + GAP), low, low + height)
        floor = ceiling + ROW_GAP

    for room, (left, low, high) in corners.items():
        axes.add_patch(Rectangle((left, low), WIDTH, high - low, facecolor=COLOURS[room], edgecolor="0.4"))
        axes.text(left + 0.12, high - 1.1 * LINE, room, weight="bold", size=19)
        for i, folder in enumerate(folders(room, graph), 1):
            colour = OUTER_COLOUR if is_outer(f"{room}.{folder}") or room in OUTER_ROOMS else "black"
            axes.text(left + 0.3, high - (i + 1.2) * LINE, f"{folder}/", size=15, color=colour)
        arrows = sorted(rooms[room] - {far for near in rooms[room] for far in rooms[near]})
        for below in arrows:
            # towards where the arrow goes, so that few of them cross, but within the cards
            apart = 0.2 * (corners[below][0] - left)
            shift = max(-0.4 * WIDTH, min(0.4 * WIDTH, apart))
            start = (left + WIDTH / 2 + shift, low)
            end = (corners[below][0] + WIDTH / 2 - shift, corners[below][2])
            axes.annotate(
                "", end, start, arrowprops={"arrowstyle": "-|>", "color": "0.35", "shrinkB": 1}, zorder=0
            )
    axes.set(xlim=(-0.1, columns * (WIDTH + GAP) - GAP + 0.1), ylim=(-0.1, floor - ROW_GAP + 0.1))
    axes.set_aspect("equal")
    axes.axis("off")


def main() -> None:
    """Save the picture under docs/img."""
    figure = Figure(figsize=(11, 10), layout="constrained")
    # Without the trainers, which may import every room: their arrows would cross all cards.
    shown = {file: targets for file, targets in import_graph().items() if not file.startswith("trainers")}
    draw(figure.add_subplot(), shown)
    figure.savefig(PICTURE, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
