"""How the runs of a flat batch are computed, by name."""

from torch import Tensor, nn

from flatroll.modules.packing import DENSE_STEPS, Backend, RunIndex, States, packed, padded
from flatroll.modules.scan import scanned

#: From so many rows per step on, the stock network's matrix products are the faster ones.
WIDE = 128


def choice(net: nn.RNNBase, rows: Tensor, index: RunIndex) -> str:
    """What ``"auto"`` takes, ``"packed"`` or ``"scan"``, by the measurements in docs/benchmarks.md.

    Off the CPU and in two directions packed. On the CPU scan, except packed where a step has many rows, and for an
    LSTM where long runs make most steps part of a dense stretch, which has a fused kernel.
    """
    if not isinstance(net, (nn.GRU, nn.LSTM)):
        return "scan"
    steps, runs = len(index.batch_sizes), len(index.first)
    wide = len(rows) >= WIDE * steps
    fused = net.mode == "LSTM" and steps >= DENSE_STEPS * runs
    return "packed" if net.bidirectional or rows.device.type != "cpu" or wide or fused else "scan"


def fastest(net: nn.RNNBase, rows: Tensor, states: States, index: RunIndex) -> tuple[Tensor, States]:
    """The backend ``"auto"``."""
    return BACKENDS[choice(net, rows, index)](net, rows, states, index)


BACKENDS: dict[str, Backend] = {"auto": fastest, "packed": packed, "scan": scanned, "pad": padded}


def check_backend(name: str, net: nn.RNNBase) -> None:
    """Refuse an unknown backend, or one that cannot run this network.

    Raises:
        ValueError: as said.
    """
    if name not in BACKENDS:
        raise ValueError(f"recurrent_backend must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
    if name == "scan" and net.bidirectional:
        raise ValueError(
            "recurrent_backend='scan' runs forward in time, got a bidirectional network: use 'packed'"
        )
    if name in ("packed", "pad") and not isinstance(net, (nn.GRU, nn.LSTM)):
        raise ValueError(
            f"recurrent_backend={name!r} needs the stock network, got a python-based one: use 'auto' or 'scan', "
            f"or module.make_cudnn_based()"
        )
