"""The backends of recurrent modules by name, and the choice of ``"auto"``."""

import importlib.util
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flatroll.layout.checks import check_choice
from flatroll.modules.backends.packing import DENSE_STEPS, Backend, RunIndex, States, packed, padded
from flatroll.modules.backends.scan import scanned, scanned_by_row

#: Maps a network, rows ``[N, input_size]``, states ``[N, num_layers, H]`` (read at first rows) and a bool
#: ``[N]`` that marks first rows, to outputs ``[N, H]`` and the states after each row. No shape depends on
#: where runs begin.
ByRow: TypeAlias = Callable[[nn.RNNBase, Tensor, States, Tensor], tuple[Tensor, States]]

#: From this many rows per step on, the stock network's matrix products are faster.
WIDE = 128


def fastest_backend(net: nn.RNNBase, rows: Tensor, index: RunIndex) -> str:
    """Return the backend of ``"auto"``, ``"packed"`` or ``"scan"``, based on benchmarks.

    Packed on other devices than the CPU and for two directions; never ``"triton"``, which has not been benchmarked.
    On the CPU scan, but packed if a step has many rows, or for an LSTM whose long runs form dense stretches, which
    have a fused kernel.
    """
    if not isinstance(net, (nn.GRU, nn.LSTM)):
        return "scan"

    steps = len(index.batch_sizes)
    runs = len(index.first)
    wide = len(rows) >= WIDE * steps
    fused = net.mode == "LSTM" and steps >= DENSE_STEPS * runs
    if net.bidirectional or rows.device.type != "cpu" or wide or fused:
        return "packed"
    return "scan"


def automatic(net: nn.RNNBase, rows: Tensor, states: States, index: RunIndex) -> tuple[Tensor, States]:
    """Compute with the fastest backend: ``recurrent_backend="auto"``."""
    return BACKENDS[fastest_backend(net, rows, index)](net, rows, states, index)


#: Backends that expect runs in rank order (longest first).
BACKENDS: dict[str, Backend] = {"auto": automatic, "packed": packed, "scan": scanned, "pad": padded}
#: Backends that expect rows in batch order. `register_by_row` adds those of the outer ring.
BY_ROW: dict[str, ByRow] = {}


def register_by_row(name: str, backend: ByRow) -> None:
    """Add a backend that takes rows in batch order."""
    BY_ROW[name] = backend


def by_row(name: str, net: nn.RNNBase) -> ByRow | None:
    """Return the backend's function for rows in batch order; None if it needs rows in packed order."""
    if torch.compiler.is_compiling() and name in ("auto", "scan") and not net.bidirectional:
        return scanned_by_row
    return BY_ROW.get(name)


def check_backend(name: str, net: nn.RNNBase) -> None:
    """Raise ValueError or ImportError if the backend cannot run this network.

    Raises:
        ValueError: the backend is unknown, or cannot run this kind of network.
        ImportError: it is ``"triton"``, which is not installed.
    """
    check_choice("recurrent_backend", name, (*BACKENDS, *BY_ROW))
    if name in ("scan", "triton") and net.bidirectional:
        raise ValueError(f"recurrent_backend={name!r} does not support bidirectional networks: use 'packed'")
    if name in ("packed", "pad") and not isinstance(net, (nn.GRU, nn.LSTM)):
        raise ValueError(
            f"recurrent_backend={name!r} needs the stock network, got a python-based one: use 'auto', 'scan' "
            f"or 'triton', or module.make_cudnn_based()"
        )
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise ImportError('recurrent_backend="triton" needs triton: pip install "flatroll[triton]"')
