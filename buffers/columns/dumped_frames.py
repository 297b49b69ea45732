"""Cuts dumped frames by the rows that add them, so that files of rows can be laid end to end."""

import torch
from torch import Tensor

from flatroll.buffers.columns.base import Dumped, check_values
from flatroll.buffers.index.ring import Array
from flatroll.buffers.index.saved_tables import damaged


def by_row(dumped: Dumped, added: Array) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what a column of frames dumped, cut by the ``added[i]`` frames of row i.

    Where frames have any number of values, these numbers are a tensor of their own, ``each``.
    """
    cut, frames = {}, torch.from_numpy(added)
    row = torch.repeat_interleave(frames)  # of each frame
    for name, values in dumped.items():
        if isinstance(values, Tensor):
            cut[f"frames.{name}"] = values, frames
        else:
            cut[f"frames.{name}.each"] = values[1], frames
            cut[f"frames.{name}"] = values[0], torch.zeros_like(frames).index_add_(0, row, values[1])
    return cut


def frames_of(dumped: Dumped) -> tuple[Tensor, dict[str, Tensor | tuple[Tensor, Tensor]]]:
    """Return how many frames each row adds, and what their column dumped; ValueError if these do not fit.

    It undoes `by_row`.
    """
    ragged = {name: pair for name, pair in dumped.items() if isinstance(pair, tuple)}
    pieces: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
    added = list[Tensor]()
    for name, (values, lengths) in ragged.items():
        each = ragged.get(f"{name}.each")
        if each is not None:
            check_values("sizes", each[0], torch.int64, ())
            if bool(((each[0] < 0) | (each[0] > len(values))).any()) or int(each[0].sum()) != len(values):
                raise damaged("the sizes of its frames do not add up")
            pieces[name.removeprefix("frames.")] = values, each[0]
        else:
            added.append(lengths)
            if not name.endswith(".each"):
                pieces[name.removeprefix("frames.")] = values
    if not all(torch.equal(one, added[0]) for one in added):
        raise damaged("its rows add other numbers of frames and of their sizes")
    return added[0], pieces
