"""Benchmarks `TrajectoryReplayBuffer.sample` over a plain gather of the same number of rows, in one run.

``python -m benchmarks.disk.bench_trajectories [--rows 4096]``
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatroll.datasets import TrajectoryReplayBuffer

STEPS, ENVS, COUNT, TURNS = 100, 8, 100, 60


def trajectory(number: int) -> dict[str, Any]:
    """800 rows with the fields of an RLinf trajectory of states."""
    return {
        "actions": torch.randn(STEPS, ENVS, 7),
        "rewards": torch.randn(STEPS, ENVS, 1) + number,
        "dones": torch.zeros(STEPS + 1, ENVS, 1, dtype=torch.bool),
        "prev_logprobs": torch.randn(STEPS, ENVS, 7),
        "prev_values": torch.randn(STEPS + 1, ENVS, 1),
        "curr_obs": {"states": torch.randn(STEPS, ENVS, 32)},
        "next_obs": {"states": torch.randn(STEPS, ENVS, 32)},
    }


def leaves(fields: dict[str, Any]) -> list[Tensor]:
    return [
        leaf for value in fields.values() for leaf in (leaves(value) if isinstance(value, dict) else [value])
    ]


def cpu(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    """Print the ratio, with all rows in files and with all in memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    rows = parser.parse_args().rows
    torch.set_num_threads(1)
    for flushed in (False, True):
        buffer = TrajectoryReplayBuffer(sample_window_size=0, segment_bytes=(4 if flushed else 512) << 20)
        for number in range(COUNT):
            buffer.add_trajectories([trajectory(number)])
        if flushed:
            buffer.flush()
        columns = [leaf.clone() for leaf in leaves(buffer.sample(buffer.total_samples))]

        def gather(columns: list[Tensor] = columns) -> list[Tensor]:
            drawn = torch.randint(len(columns[0]), (rows,))
            return [column.index_select(0, drawn) for column in columns]

        took: dict[str, list[float]] = {"sample": [], "gather": []}
        for _ in range(TURNS):
            took["sample"].append(cpu(lambda buffer=buffer: buffer.sample(rows)))  # type: ignore[misc]
            took["gather"].append(cpu(gather))
        ratios = [a / b for a, b in zip(took["sample"][5:], took["gather"][5:], strict=True)]
        print(
            f"sample({rows}) of {buffer.total_samples:,} rows {'in files' if flushed else 'in memory'}: "
            f"{statistics.median(took['sample']) * 1e3:.2f} ms of processor time, "
            f"{statistics.median(ratios):.2f} x a plain gather of {len(columns)} columns"
        )
        buffer.close()


if __name__ == "__main__":
    main()
