"""What a folder of rows and versions holds, in words and as a picture: the command ``flatroll inspect``."""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.disk import files
from flatroll.disk.columns import Ragged, Schema
from flatroll.disk.folder import Folder
from flatroll.disk.listing import Listing
from flatroll.disk.loading import ReadOptions, load_version
from flatroll.disk.manifest import Manifest, read_manifest
from flatroll.disk.names import DTYPES, column_key
from flatroll.disk.segments import Segment
from flatroll.disk.tensor_file import DamagedFileError
from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import DONE, IS_INIT, MASK, REWARD, TRAJ_IDS, as_tuple, plain_key

_MARKERS = [as_tuple(key) for key in (IS_INIT, DONE, TRAJ_IDS, MASK)]
_PART = re.compile(r"(member-\d+|rank-\d+-of-\d+)/")
_BINS, _BAR = 10, 40  # lines of a histogram, and characters of its longest bar


class Trajectories(NamedTuple):
    """One value per trajectory, in the order of the rows.

    Args:
        lengths: int64 ``[n]``, numbers of rows.
        returns: float64 ``[n]``, sums of rewards; None without a column of one reward per row.
    """

    lengths: Tensor
    returns: Tensor | None


class Report(NamedTuple):
    """What was found in a folder.

    Args:
        text: a description.
        damage: what is wrong, a line each; empty if all is well.
        trajectories: None without rows, or without a column that says where they begin or end.
    """

    text: str
    damage: list[str]
    trajectories: Trajectories | None


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
    versions, damage = _versions(path, folder.versions(), verify=verify)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            folder.recover()
        except DamagedFileError as error:
            damage.append(str(error))
    damage += [str(warning.message) for warning in caught]
    if verify:
        damage += _damaged_rows(folder.segments)
    count, stats = folder.end - folder.head, folder.stats()
    total = f"{stats['segments']} file{'s' * (stats['segments'] != 1)} of {stats['bytes']:,} bytes"
    lines = [f"{path}: {_rows(folder.head, folder.end)}, {total}", *(versions or ["no version: rows alone"])]
    lines += ["", *_table(folder.columns)] if folder.columns else []
    trajectories = _trajectories(folder) if count else None
    if trajectories is not None:
        lines += ["", f"{len(trajectories.lengths):,} trajectories"]
        lines += _histogram("length", trajectories.lengths)
        if trajectories.returns is not None:
            lines += _histogram("return", trajectories.returns)
    elif count:
        lines += ["", "no column says where trajectories begin or end"]
    for name in files.names(path):
        if _PART.fullmatch(name):  # of an ensemble, or of several processes that saved together
            try:
                part = inspect_folder(path / name.rstrip("/"), verify=verify)
            except ValueError as error:
                damage.append(f"{name.rstrip('/')}: {error}")
            else:
                lines += ["", part.text]
                damage += [f"{name}{text}" for text in part.damage]
    return Report("\n".join(lines), list(dict.fromkeys(damage)), trajectories)


def save_picture(report: Report, file: Path) -> None:
    """Draw the lengths and returns of the trajectories as histograms.

    Raises:
        ImportError: matplotlib is missing; the text names the extra.
        ValueError: there are no trajectories, or matplotlib does not know the file's ending.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "flatroll[plot]"') from error
    if report.trajectories is None:
        raise ValueError("there are no trajectories to draw")
    shown = {name: values for name, values in report.trajectories._asdict().items() if values is not None}
    figure = Figure(figsize=(4.5 * len(shown), 3), layout="constrained")
    for axes, (name, values) in zip(
        figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True
    ):
        axes.hist(values[values.isfinite()].numpy(), bins=30, color="#0072b2")
        axes.set_xlabel(f"{name} of trajectories")
    figure.savefig(file)


def _versions(path: Path, numbers: Iterable[int], *, verify: bool) -> tuple[list[str], list[str]]:
    """A line for each version, and what is wrong with them."""
    lines, damage = [], []
    for number in numbers:
        try:
            manifest = read_manifest(path, number)
            lines.append(_version_line(manifest))
            loaded = load_version(path, manifest, ReadOptions(mapped=False, max_bytes=None))
        except DamagedFileError as error:
            damage.append(f"version {number}: {error}")
            continue
        if verify:
            damage += [f"version {number}: {text}" for text in _damaged_rows(loaded.segments)]
    return lines, damage


def _version_line(manifest: Manifest) -> str:
    state = f", state of {manifest.state.size:,} bytes" if manifest.state else ""
    extra = "" if manifest.extra is None else f", {manifest.extra}"
    return (
        f"version {manifest.version.number}: {_rows(manifest.head, manifest.end)}{state}, line "
        f"{manifest.version.line}, by flatroll {manifest.written_by}{extra}"
    )


def _rows(head: int, end: int) -> str:
    count = end - head
    return f"rows {head} to {end - 1} ({count:,} row{'s' * (count != 1)})" if count else "no rows"


def _damaged_rows(segments: Iterable[Segment]) -> list[str]:
    damage = []
    for segment in segments:
        try:
            segment.read()
        except DamagedFileError as error:
            damage.append(str(error))
    return damage


def _table(columns: Schema) -> list[str]:
    rows = [("column", "dtype", "shape")]
    rows += [
        (name, ("ragged " if column.ragged else "") + column.dtype, str(list(column.shape)))
        for name, column in sorted(columns.items())
    ]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]


def _trajectories(folder: Folder) -> Trajectories | None:
    """Lengths and returns by the boundary rule; rows of padding count as a trajectory of their own."""
    columns: dict[tuple[str, ...], Tensor] = {}
    first = folder.segments[0].first
    for name, column in folder.columns.items():
        key = as_tuple(column_key(name))
        one_value = not column.ragged and column.shape in ((), (1,)) and not DTYPES[column.dtype].is_complex
        if key in (*_MARKERS, REWARD) and one_value:
            parts = [segment.columns[name] for segment in folder.segments]
            joined = torch.cat([part for part in parts if not isinstance(part, Ragged)])
            columns[key] = joined[folder.head - first :].reshape(-1)
    reward = columns.pop(REWARD, None)
    if not set(columns) - {as_tuple(MASK)}:
        return None
    batch = TensorDict(
        {plain_key(key): column for key, column in columns.items()}, [folder.end - folder.head]
    )
    ends = run_ends(batch).nonzero().squeeze(-1)
    # A trajectory has the rows, and of the running sum of rewards the part, from the end before it to its own.
    lengths = ends.diff(prepend=ends.new_tensor([-1]))
    returns = None
    if reward is not None:
        sums = reward.double().cumsum(0)[ends]
        returns = sums.diff(prepend=sums.new_zeros(1))
    return Trajectories(lengths, returns)


def _histogram(name: str, values: Tensor) -> list[str]:
    """Range and mean of values, and how many are in each of ten equal parts of the range (fewer for few integers)."""
    finite = values[values.isfinite()].double()
    if not len(finite):
        return [f"{name}: none that is finite"]
    low, high = float(finite.min()), float(finite.max())
    lines = [f"{name}: {low:g} to {high:g}, mean {float(finite.mean()):g}"]
    if not bool(torch.isfinite(finite.max() - finite.min())):
        return lines
    whole = bool((finite == finite.round()).all()) and high - low < _BINS
    bins = int(high - low) + 1 if whole else _BINS if high > low else 1
    width = 1.0 if whole else (high - low) / bins
    places = (
        ((finite - low) / width).long().clamp_(0, bins - 1)
        if width
        else torch.zeros(len(finite), dtype=torch.int64)
    )
    counts = torch.bincount(places, minlength=bins).tolist()
    digits = len(str(max(counts)))
    for place, count in enumerate(counts):
        bar = "█" * round(_BAR * count / max(counts))
        lines.append(f"{low + place * width:14.6g}  {count:{digits}d}  {bar}".rstrip())
    return lines
