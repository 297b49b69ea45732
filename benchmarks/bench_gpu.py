"""Benchmarks on a GPU, beside hand-written loops, rsl_rl, cuDNN and TorchRL.

``make gpu``, ``python -m flatroll bench gpu``

Without a GPU everything runs at small sizes on the CPU, the Triton kernels in Triton's interpreter; this only shows
that it works. Parts whose package is missing are skipped with a message.
"""

import importlib
import importlib.util
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import bench_gae, bench_recurrent, bench_torch_path, bench_updates
from benchmarks.bench_slices import LENGTH, SLICES, filled, micros, stream
from benchmarks.measure.timing import ratio, table, take_turns, waited
from benchmarks.peers import rsl_storage
from flatroll.buffers import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from flatroll.modules.backends import choice
from flatroll.modules.backends.on_triton import scan as triton_scan

Run = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """How large the parts are, on a GPU and in a dry run."""

    envs: tuple[int, ...]
    estimated_rows: int
    #: Sequences, steps, hidden size.
    recurrent: tuple[tuple[int, int, int], ...]
    minibatches: tuple[int, ...]
    stored_rows: int
    turns: int


SIZES = {
    "cuda": Sizes(
        (4096, 16_384), 10_000_000, bench_recurrent.ON_GPU, (64, 256, 2048, 32_768), 1_000_000, turns=11
    ),
    "cpu": Sizes((16,), 2_000, ((4, 8, 16),), (16,), 4_096, turns=1),
}


def collecting(device: str, sizes: Sizes) -> str:
    """A vector step of a torch env, of which each operation is a launch, beside the hand-written loop."""
    counted = bench_torch_path.operations(device, sizes.envs[0])
    return counted + "\n\n" + bench_torch_path.times(sizes.turns, sizes.envs, device, time.perf_counter)


def storing(device: str, sizes: Sizes) -> str:
    """32 steps, GAE and all rows in four minibatches, beside rsl_rl's storage and plain tensors."""
    loops = {
        "flatroll": rsl_storage.with_flatroll,
        "rsl_rl": rsl_storage.with_rsl_rl,
        "plain torch": rsl_storage.by_hand,
    }
    cells = []
    for envs in sizes.envs:
        runs: dict[str, Run] = {name: waited(make(envs, device)) for name, make in loops.items()}
        times = take_turns(runs, sizes.turns)
        of_others = [ratio(times["flatroll"], times[name]) for name in ("rsl_rl", "plain torch")]
        cells.append([f"{envs:,}", *map(micros, times.values()), *(f"{one:.2f}" for one in of_others)])
    header = ["envs", *(f"{name}, µs" for name in loops), "flatroll / rsl_rl", "flatroll / plain torch"]
    return f"{bench_torch_path.STEPS} steps of each env\n\n" + table(header, cells)


def updating(device: str, sizes: Sizes) -> str:
    """Loss, backward pass and optimizer step, beside plain torch."""
    cells = []
    for name, make in bench_updates.CASES.items():
        for count in sizes.minibatches:
            pair = make()
            for module in pair:
                module.to(device)
            batch = bench_updates.rows(count, continuous=name == "SACLoss").to(device)
            runs: dict[str, Run] = {k: waited(run) for k, run in bench_updates.updates(pair, batch).items()}
            times = take_turns(runs, sizes.turns, calls=20)
            cells.append(
                [
                    name,
                    f"{count:,}",
                    *map(micros, times.values()),
                    f"{ratio(times['ours'], times['plain']):.2f}",
                ]
            )
    return table(["", "rows", "ours, µs", "by hand, µs", "ours / by hand"], cells)


def estimating(device: str, sizes: Sizes) -> str:
    """Estimators, beside a copy of what they read, and TorchRL."""
    peer: Any = None
    if importlib.util.find_spec("torchrl"):
        with warnings.catch_warnings(action="ignore"):
            peer = importlib.import_module("torchrl.objectives.value")
    return f"{sizes.estimated_rows:,} rows\n\n" + bench_gae.on_gpu(peer, sizes.estimated_rows, device)


def recurrent(device: str, sizes: Sizes) -> str:
    """Triton's kernels beside cuDNN on packed and padded runs, with products in float32 and TF32."""
    names: tuple[str, ...] = ("triton", "packed", "pad")
    if importlib.util.find_spec("triton") is None:
        names = names[1:]
    elif device == "cpu":  # that of the interpreter's tensors, which the backend itself refuses
        choice.BY_ROW["triton"] = triton_scan.in_runs
    return "\n\n".join(
        f"Products in {'TF32' if tf32 else 'float32'}\n\n"
        + bench_recurrent.on_gpu(tf32, names, sizes.recurrent, device, sizes.turns)
        for tf32 in (False, True)
    )


def scanning(device: str, sizes: Sizes) -> str:
    """Linear recurrences, which scan, beside a GRU."""
    rows = max(sequences * steps for sequences, steps, _ in sizes.recurrent)
    return f"{rows:,} rows\n\n" + bench_recurrent.linear(rows, device)


def peer_buffers(device: str, rows: int) -> dict[str, Run]:
    """Samples of TorchRL's buffers on the device; empty if it is not there, and only those that it can draw."""
    if not importlib.util.find_spec("torchrl"):
        return {}
    with warnings.catch_warnings(action="ignore"):
        from torchrl.data import LazyTensorStorage as PeerStorage
        from torchrl.data import PrioritizedSampler as PeerPrioritized
        from torchrl.data import SliceSampler as PeerSlices
        from torchrl.data import TensorDictReplayBuffer

        samplers: dict[str, Callable[[], Any]] = {
            "slices": lambda: PeerSlices(
                slice_len=LENGTH, traj_key=("collector", "traj_ids"), strict_length=False
            ),
            "prioritized rows": lambda: PeerPrioritized(rows, 0.6, 0.4),
        }
        found: dict[str, Run] = {}
        for name, make in samplers.items():
            try:
                sampler = make()
            except RuntimeError:  # its compiled extension did not load
                continue
            size = SLICES * LENGTH if name == "slices" else 256
            storage = PeerStorage(rows, device=device)
            peer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=size)
            for batch in itertools.islice(stream(1, 64, rows // 4), 4):
                peer.extend(batch)
            found[name] = peer.sample
    return found


def sampling(device: str, sizes: Sizes) -> str:
    """Samples from a storage on the device, and from one on the host by pinned memory."""
    rows, cells = sizes.stored_rows, []
    theirs = peer_buffers(device, rows)

    def to_device(sample: Callable[[], Any]) -> Run:
        def run() -> object:
            data = sample()
            return (data.pin_memory() if device == "cuda" else data).to(device, non_blocking=True)

        return run

    def prioritized(place: str) -> ReplayBuffer:
        sampler = PrioritizedSampler(rows, 0.6, 0.4)
        buffer = ReplayBuffer(LazyTensorStorage(rows, device=place), sampler=sampler, batch_size=256)
        for batch in itertools.islice(stream(1, 64, rows // 4), 4):
            index = buffer.extend(batch)
            buffer.update_priority(index, torch.rand(len(index)) + 0.1)
        return buffer

    for name in ("slices", "prioritized rows"):
        there, here = (
            filled(rows, device=place)[0] if name == "slices" else prioritized(place)
            for place in (device, "cpu")
        )
        runs: dict[str, Run] = {
            "on the device": waited(there.sample),
            "pinned": waited(to_device(here.sample)),
        }
        if name in theirs:
            runs["torchrl"] = waited(theirs[name])
        times = take_turns(runs, sizes.turns, calls=10)
        peer = ["-", "-"]
        if "torchrl" in times:
            peer = [micros(times["torchrl"]), f"{ratio(times['torchrl'], times['on the device']):.1f} x"]
        cells.append([name, micros(times["on the device"]), micros(times["pinned"]), *peer])
    header = ["", "storage on the device, µs", "on the host, pinned, µs", "torchrl on the device, µs"]
    return f"{rows:,} rows\n\n" + table([*header, "torchrl / ours"], cells)


PARTS: dict[str, Callable[[str, Sizes], str]] = {
    "Collecting": collecting,
    "Rollouts and advantages": storing,
    "An update": updating,
    "Estimators": estimating,
    "Recurrent networks": recurrent,
    "Scans": scanning,
    "Samples": sampling,
}


def main() -> None:
    """Print the tables."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        print(f"On {torch.cuda.get_device_name()}, torch {torch.__version__}")
    elif "TRITON_INTERPRET" not in os.environ:  # triton has read it by now: begin again
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.bench_gpu"],
            {**os.environ, "TRITON_INTERPRET": "1"},
        )
    else:
        print("No CUDA device here: a dry run on the CPU, whose times say nothing")
        torch.set_num_threads(1)
    for name, part in PARTS.items():
        begun = time.perf_counter()
        try:
            text = part(device, SIZES[device])
        except ModuleNotFoundError as missing:
            text = f"Left out: {missing.name} is not installed"
        print(f"\n## {name}\n\n{part.__doc__}\n\n{text}\n\n({time.perf_counter() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
