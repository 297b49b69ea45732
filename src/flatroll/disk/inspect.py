"""Describes a folder of rows and versions as text and as a picture, for ``flatroll inspect``."""

import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.disk import files
from flatroll.disk.checkpoint import read_tree
from flatroll.disk.folder import Folder, Listing
from flatroll.disk.manifest import Manifest, read_manifest
from flatroll.disk.segments import Ragged, Schema, column_key, damaged_rows
from flatroll.disk.state_tree import DamagedState
from flatroll.disk.tensor_file import DTYPES, DamagedFileError
from flatroll.layout.boundaries import run_ends, starts_from
from flatroll.layout.keys import DONE, IS_INIT, MASK, REWARD, TRAJ_IDS, as_tuple, plain_key

_PART = re.compile(r"(member-\d+|rank-\d+-of-\d+)/")
_INIT, _DONE, _IDS, _MASK, _REWARD = (as_tuple(key) for key in (IS_INIT, DONE, TRAJ_IDS, MASK, REWARD))
_FLAGS = {_INIT, _DONE, _MASK}  # bool
_PLAIN = {key: key for key in (*_FLAGS, _IDS, _REWARD)}
# The corresponding keys in folders of `TrajectoryReplayBuffer`.
_LANE = ("_trajectory", "lane")
_STORED = {_LANE: _IDS, ("_trajectory", "done"): _DONE, ("rewards",): _REWARD, _REWARD: _REWARD}
_BINS = 10  # lines of a histogram
_BAR = 40  # and characters of its longest bar
# colour-blind safe
_BLUE = "#0072b2"
_GREEN = "#009e73"
_RED = "#d55e00"


class Trajectories(NamedTuple):
    """One value per trajectory, in the order of their first rows.

    Args:
        lengths: int64 ``[n]``, numbers of rows.
        returns: float64 ``[n]``, sums of rewards; None without a column of one reward per row.
        ended: bool ``[n]``, whether the last row is done; None without such a column.
    """

    lengths: Tensor
    returns: Tensor | None
    ended: Tensor | None


class RowSpan(NamedTuple):
    """Rows ``first ... end - 1``: of a file, or of a version.

    Args:
        name: of the file, or ``"version 3"``.
        first: number of the first row.
        end: number after that of the last row.
    """

    name: str
    first: int
    end: int


class Report(NamedTuple):
    """The contents of a folder.

    Args:
        text: a description.
        damage: one line per problem; empty if there is none.
        trajectories: None without rows, or without a column that marks their starts or ends.
        title: name of the folder and its number of rows.
        files: rows of each file, in order.
        versions: rows of each version, the newest first.
    """

    text: str
    damage: list[str]
    trajectories: Trajectories | None
    title: str
    files: list[RowSpan]
    versions: list[RowSpan]


def inspect_folder(path: Path, *, verify: bool = False) -> Report:
    """Describe a folder of rows and versions: schema, rows, trajectories, versions, damage; then its members, if an
    ensemble or several processes saved to it.

    Args:
        path: of the folder.
        verify: read all rows of all versions and check them. Default False: the states and the headers alone.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds nothing, or other files, or needs a later version of the package.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Folder(folder, write=True) as writer:
    ...         done = torch.tensor([False, True, True])
    ...         writer.append({"next/done": done, "next/reward": torch.ones(3)})
    ...     print(inspect_folder(Path(folder)).text.replace(folder, "PATH"))  # doctest: +ELLIPSIS
    PATH: rows 0 to 2 (3 rows), 1 file of ... bytes
    no version: rows alone
    <BLANKLINE>
    column       dtype    shape
    next/done    bool     []
    next/reward  float32  []
    <BLANKLINE>
    2 trajectories
    2 ended, 0 open
    length: 1 to 2, mean 1.5
                 1  1  ████████████████████████████████████████
                 2  1  ████████████████████████████████████████
    return: 1 to 2, mean 1.5
                 1  1  ████████████████████████████████████████
                 2  1  ████████████████████████████████████████
    """
    folder = Folder(path)
    if Listing.of(path).is_empty:
        raise ValueError("it holds neither rows nor versions")

    lines_of_versions, versions, damage = _versions(path, verify=verify)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            folder.recover()
        except DamagedFileError as error:
            damage.append(str(error))
    damage += [str(warning.message) for warning in caught]

    if verify:
        damage += [text for text in damaged_rows(folder.segments) if not any(text in line for line in damage)]

    count = folder.end - folder.head
    stats = folder.stats()
    total = f"{stats['segments']} file{'s' * (stats['segments'] != 1)} of {stats['bytes']:,} bytes"
    rows = _rows(folder.head, folder.end)
    lines = [f"{path}: {rows}, {total}", *(lines_of_versions or ["no version: rows alone"])]

    if versions and folder.end > versions[0].end:
        since = _rows(max(folder.head, versions[0].end), folder.end)
        lines.append(f"after {versions[0].name}: {since}, which a DiskStorage or Folder.recover() has, too")
    if folder.columns:
        lines += ["", *_table(folder.columns)]

    trajectories = _trajectories(folder) if count else None
    if trajectories is not None:
        lines += ["", *_describe(trajectories)]
    elif count:
        lines += ["", "no column says where trajectories begin or end"]

    for name in files.names(path):
        if _PART.fullmatch(name):  # part of an ensemble, or of a save by several processes
            try:
                part = inspect_folder(path / name.rstrip("/"), verify=verify)
            except ValueError as error:
                damage.append(f"{name.rstrip('/')}: {error}")
            else:
                lines += ["", part.text]
                damage += [f"{name}{text}" for text in part.damage]

    stretches = [RowSpan(str(segment.name), segment.first, segment.end) for segment in folder.segments]
    title = f"{path.resolve().name}: {rows}"
    return Report("\n".join(lines), list(dict.fromkeys(damage)), trajectories, title, stretches, versions)


def _describe(trajectories: Trajectories) -> list[str]:
    """How many trajectories there are and have ended, and histograms of their lengths and returns."""
    lines = [f"{len(trajectories.lengths):,} trajectories"]
    if trajectories.ended is not None:
        ended = int(trajectories.ended.sum())
        lines.append(f"{ended:,} ended, {len(trajectories.ended) - ended:,} open")

    lines += _histogram("length", trajectories.lengths)
    if trajectories.returns is not None:
        lines += _histogram("return", trajectories.returns)
    return lines


def save_picture(report: Report, file: Path) -> None:
    """Draw files and versions as ranges of rows, and histograms of the trajectories' lengths and returns.

    Raises:
        ImportError: matplotlib is missing; the message names the extra.
        ValueError: there are no trajectories, or matplotlib does not support the file's suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "flatroll[plot]"') from error

    if report.trajectories is None:
        raise ValueError("there are no trajectories to draw")
    lengths, returns, _ = report.trajectories
    shown = {"length": lengths}
    if returns is not None:
        shown["return"] = returns

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    figure.suptitle(report.title)
    top, *below = figure.subplot_mosaic([["log"] * len(shown), list(shown)], height_ratios=(1, 2)).values()
    _draw_log(top, report)
    for axes, (name, values) in zip(below, shown.items(), strict=True):
        _draw_histogram(axes, name, values[values.isfinite()].double())
    figure.savefig(file, dpi=150)


def _draw_log(axes: Any, report: Report) -> None:
    """Draw a bar per version and one of all files, in alternating blues, red where damaged."""
    bars = [*reversed(report.versions)]
    for place, version in enumerate(bars, 1):
        axes.barh(place, version.end - version.first, left=version.first, height=0.6, color=_GREEN)

    for number, part in enumerate(report.files):
        colour = _BLUE
        if any(part.name in line for line in report.damage):
            colour = _RED
        axes.barh(
            0, part.end - part.first, left=part.first, height=0.6, color=colour, alpha=1 - number % 2 * 0.4
        )

    count = len(report.files)
    axes.set_yticks(range(len(bars) + 1), [f"{count} file{'s' * (count != 1)}", *(bar.name for bar in bars)])
    label = f"row ({len(report.damage)} damaged)" if report.damage else "row"
    axes.set_xlabel(label)
    _plain(axes)


def _draw_histogram(axes: Any, name: str, values: Tensor) -> None:
    """Values in at most thirty equal parts of their range, and their mean."""
    whole = bool((values == values.round()).all())
    if len(values) and whole and float(values.max() - values.min()) < 1e6:
        # Whole numbers: bins centred on them.
        low = int(values.min())
        high = int(values.max())
        width = 1 + (high - low) // 30
        edges: Any = torch.arange(low, high + 1 + width, width).numpy() - 0.5
    else:
        edges = 30
    axes.hist(values.numpy(), bins=edges, color=_BLUE)

    label = f"{name} of a trajectory"
    if len(values):
        mean = float(values.mean())
        axes.axvline(mean, color=_RED, linestyle="--")
        label += f" (mean {mean:.5g})"
        # With few values, a bar is narrower than the picture.
        if float(values.max() - values.min()) < 6 and whole:
            axes.set_xlim(float(values.min()) - 3, float(values.max()) + 3)

    axes.xaxis.get_major_locator().set_params(integer=whole)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(label)
    axes.set_ylabel("trajectories")
    _plain(axes)


def _plain(axes: Any) -> None:
    """Numbers with commas, and no frame but the two axes."""
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.spines[["top", "right"]].set_visible(False)


def _versions(path: Path, *, verify: bool) -> tuple[list[str], list[RowSpan], list[str]]:
    """A line for each version, its rows, and what is wrong with them."""
    lines = []
    stretches = []
    damage = []

    folder = Folder(path)
    for number in folder.versions():
        try:
            manifest = read_manifest(path, number)
            lines.append(_version_line(manifest))
            stretches.append(RowSpan(f"version {number}", manifest.head, manifest.end))
            loaded = folder.read_version(number)
            facts = manifest.extra
            if isinstance(facts, dict) and facts.get("kind") in ("run", "buffer", "ensemble"):
                extra = read_tree(loaded, manifest.end - manifest.head)["others"].get("extra")
                if isinstance(extra, dict) and extra:
                    values = ", ".join(f"{str(name)[:60]} = {_short(value)}" for name, value in extra.items())
                    lines[-1] += f"\n  extra values: {values[:1000]}"
        except (DamagedFileError, DamagedState) as error:
            damage.append(f"version {number}: {error}")
            continue

        if verify:
            damage += [f"version {number}: {text}" for text in damaged_rows(loaded.segments)]
    return lines, stretches, damage


def _version_line(manifest: Manifest) -> str:
    state = ""
    if manifest.state:
        state = f", state of {manifest.state.size:,} bytes"

    facts = manifest.extra.items() if isinstance(manifest.extra, dict) else [("note", manifest.extra)]
    extra = "".join(f", {name}: {value}" for name, value in facts if value is not None)
    return (
        f"version {manifest.version.number}: {_rows(manifest.head, manifest.end)}{state}, line "
        f"{manifest.version.line}, by flatroll {manifest.written_by}{extra}"
    )


def _short(value: Any) -> str:
    """A scalar or a short text as it is, of other values the type and size."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {list(value.shape)}"
    if isinstance(value, list | tuple | dict | bytes) or (isinstance(value, str) and len(value) > 60):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)[:60]


def _rows(head: int, end: int) -> str:
    count = end - head
    if count:
        return f"rows {head} to {end - 1} ({count:,} row{'s' * (count != 1)})"
    return "no rows"


def _table(columns: Schema) -> list[str]:
    rows = [("column", "dtype", "shape")]
    for name, column in sorted(columns.items()):
        dtype = "ragged " * column.ragged + column.dtype
        rows.append((name, dtype, str(list(column.shape))))

    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]


def _trajectories(folder: Folder) -> Trajectories | None:
    """Return lengths and returns of runs by the boundary rule; padding counts as a separate trajectory.

    Runs of the same trajectory, such as those of interleaved envs, are joined: a run continues the previous run of its
    id, unless that one is done or this one begins with ``is_init``.
    """
    columns: dict[tuple[str, ...], Tensor] = {}
    first = folder.segments[0].first
    schema = {as_tuple(column_key(name)): (name, column) for name, column in folder.columns.items()}
    wanted = _STORED if _LANE in schema else _PLAIN

    for key in wanted.keys() & schema.keys():
        name, column = schema[key]
        one_value = not column.ragged and column.shape in ((), (1,)) and not DTYPES[column.dtype].is_complex
        if one_value and (wanted[key] not in _FLAGS or column.dtype == "bool"):
            parts = [segment.columns[name] for segment in folder.segments]
            joined = torch.cat([part for part in parts if not isinstance(part, Ragged)])
            columns[wanted[key]] = joined[folder.head - first :].reshape(-1)

    reward = columns.pop(_REWARD, None)
    if not set(columns) - {_MASK}:
        return None

    batch = TensorDict(
        {plain_key(key): column for key, column in columns.items()}, [folder.end - folder.head]
    )

    ends = run_ends(batch)
    starts = starts_from(ends)
    first_rows = starts.nonzero().squeeze(-1)
    last_rows = ends.nonzero().squeeze(-1)
    run_of_row = starts.cumsum(0) - 1

    done = columns.get(_DONE)
    joins = _number_trajectories(columns, first_rows, last_rows)
    trajectory = joins[run_of_row]
    count = int(joins.max()) + 1

    # the last row of the last run of each trajectory
    lasts = last_rows.new_zeros(count).scatter_reduce(0, joins, last_rows, "amax")

    returns = None
    if reward is not None:
        returns = torch.zeros(count, dtype=torch.float64).index_add_(0, trajectory, reward.double())
    ended = None if done is None else done[lasts]
    return Trajectories(trajectory.bincount(), returns, ended)


def _number_trajectories(
    columns: dict[tuple[str, ...], Tensor], first_rows: Tensor, last_rows: Tensor
) -> Tensor:
    """Return the trajectory number of each run, int64 ``[runs]``, in order of the trajectories' first runs."""
    ids = columns.get(_IDS)
    done = columns.get(_DONE)
    is_init = columns.get(_INIT)
    runs = torch.arange(len(first_rows))
    if ids is None or is_init is None:  # no marker links a run to an earlier one
        return runs

    order = ids[first_rows].argsort(stable=True)  # group the runs of each id, in order
    before = order[:-1]
    after = order[1:]
    goes_on = (ids[first_rows[before]] == ids[first_rows[after]]) & ~is_init[first_rows[after]]
    if done is not None:
        goes_on &= ~done[last_rows[before]]

    begins = torch.cat([goes_on.new_ones(1), ~goes_on])
    first_run = order[begins][begins.cumsum(0) - 1]  # in this order: the first run of each trajectory
    joined = torch.empty_like(runs).scatter_(0, order, first_run)
    return ((joined == runs).cumsum(0) - 1)[joined]


def _histogram(name: str, values: Tensor) -> list[str]:
    """Range and mean of values, and how many are in each of ten equal parts of the range (fewer for few integers)."""
    finite = values[values.isfinite()].double()
    if not len(finite):
        return [f"{name}: none that is finite"]
    low = float(finite.min())
    high = float(finite.max())
    lines = [f"{name}: {low:g} to {high:g}, mean {float(finite.mean()):g}"]
    if not bool(torch.isfinite(finite.max() - finite.min())):
        return lines

    whole = bool((finite == finite.round()).all()) and high - low < 2**53
    # Whole numbers get bins of a whole width: the smallest for which ten bins are enough.
    if whole:
        width = float(int(high - low) // _BINS + 1)
    else:
        width = (high - low) / _BINS

    places = ((finite - low) / width).long().clamp_(0, _BINS - 1)
    counts = torch.bincount(places).tolist()
    digits = len(str(max(counts)))
    for place, count in enumerate(counts):
        bar = "█" * round(_BAR * count / max(counts))
        lines.append(f"{low + place * width:14.6g}  {count:{digits}d}  {bar}".rstrip())
    return lines
