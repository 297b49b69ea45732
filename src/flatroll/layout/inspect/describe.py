"""Summarises a batch in words: its runs, how they end, their lengths, its columns and bytes."""

import torch
from tensordict import TensorDictBase

from flatroll.layout.boundaries import run_ends
from flatroll.layout.checks import check_rows
from flatroll.layout.inspect.text import Text, html_lines, html_table
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    MASK,
    NEXT_KNOWN,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    is_entry,
    optional_marker,
)


def describe(batch: TensorDictBase) -> str:
    """Return a summary of a batch: rows, runs, how they end, their lengths, and the bytes of each column.

    Args:
        batch: ``[N]`` or ``[*B, T]``. Without a boundary marker only the columns are described.

    >>> from tensordict import TensorDict
    >>> done = torch.tensor([[False], [True], [False]])
    >>> print(describe(TensorDict({"observation": torch.zeros(3, 4), "next": {"done": done}}, [3])))
    3 rows, 51 bytes (17 a row)
    2 runs: 0 terminated, 0 truncated, 1 done without either, 1 cut
    run length: 1 shortest, 1.5 median, 2 longest
    <BLANKLINE>
    column       shape  dtype    bytes/row  bytes
    next.done    [1]    bool             1      3
    observation  [4]    float32         16     48
    """
    check_rows(batch, values=True)
    n = batch.batch_size.numel()

    total = 0
    rows = []
    for key in batch.keys(True, True, is_leaf=is_entry):
        column = batch.get(key)
        name = key if isinstance(key, str) else ".".join(key)
        if not isinstance(column, torch.Tensor):
            rows.append((name, "", "no tensor", "", ""))
            continue

        size = column.numel() * column.element_size()
        total += size
        shape = str(list(column.shape[batch.batch_dims :]))
        dtype = str(column.dtype).removeprefix("torch.")
        rows.append((name, shape, dtype, f"{size // max(n, 1):,}", f"{size:,}"))

    head = f"{n:,} row{'s' * (n != 1)}, {total:,} bytes ({total // max(n, 1):,} a row)"
    columns = ("column", "shape", "dtype", "bytes/row", "bytes")
    lines = [head, *_describe_runs(batch)]
    rows.sort()
    html = html_lines(lines) + html_table(rows, columns, numbers=2)
    return Text("\n".join([*lines, "", *_table([columns, *rows])]), html)


def _describe_runs(batch: TensorDictBase) -> list[str]:
    """Return the lines about runs: their number, ends and lengths."""

    if all(batch.get(key, None) is None for key in (IS_INIT, DONE, TRAJ_IDS)):
        return ["no boundary marker, so no runs"]

    ends = run_ends(batch)
    real = optional_marker(batch, MASK)
    if real is None:
        real = torch.ones_like(ends)
    last = (ends & real).reshape(-1)
    if not bool(last.any()):
        return ["0 runs"]

    flags = []
    for key in (DONE, TERMINATED, TRUNCATED):
        flag = optional_marker(batch, key)
        if flag is None:
            flag = torch.zeros_like(last)
        flags.append(flag.reshape(-1))
    done, terminated, truncated = flags
    kinds = {
        "terminated": terminated,
        "truncated": truncated & ~terminated,
        "done without either": done & ~terminated & ~truncated,
        "cut": ~(done | terminated | truncated),
    }
    counts = [(name, int((last & kind).sum())) for name, kind in kinds.items()]
    shown = ", ".join(f"{count:,} {name}" for name, count in counts if count or name != "done without either")

    # Real rows up to and including each run's last one; differences are the runs' lengths.
    real_rows_up_to = real.reshape(-1).cumsum(0)[last]
    lengths = real_rows_up_to.diff(prepend=last.new_zeros(1, dtype=torch.int64)).sort().values

    k = len(lengths)
    median = (lengths[(k - 1) // 2] + lengths[k // 2]).item() / 2

    known = optional_marker(batch, NEXT_KNOWN)
    lost = torch.zeros_like(last)
    if known is not None:
        lost = last & ~known.reshape(-1)
    hidden = int(lost.sum())
    cut_off = int((lost & kinds["truncated"]).sum())

    lines = [f"{k:,} run{'s' * (k != 1)}: {shown}"]
    if hidden:
        lines.append(f"{hidden:,} of these ends have no last observation, {cut_off:,} of them truncated")
    lines.append(
        f"run length: {int(lengths[0]):,} shortest, {median:,g} median, {int(lengths[-1]):,} longest"
    )
    return lines


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Format columns two spaces apart, the last two (numbers) right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        padded = [c.ljust(w) for c, w in zip(cells[:3], widths[:3], strict=True)]
        padded += [c.rjust(w) for c, w in zip(cells[3:], widths[3:], strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines
