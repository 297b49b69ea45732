"""Writes rows, samples slices of them and trains on these, while the process's own memory stays below a limit.

``python -m benchmarks.disk.more_than_memory [--rows 10000000] [--limit_mib 2048] [--folder PATH]``

The limit is on the process's anonymous memory (``RssAnon`` of Linux). Pages of mapped files do not count, since the
system reclaims them on demand. A thread checks every 20 ms and ends the process if it exceeds the limit.
"""

import argparse
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn

from flatroll.buffers import DiskStorage, ReplayBuffer, SliceSampler

OBSERVATION = 64  # numbers of an observation: rows of 281 bytes
ENVS, EPISODE, LENGTH = 64, 200, 32


def own_memory() -> dict[str, int]:
    """The process's memory in MiB: ``RssAnon`` its own, ``RssFile`` pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        line.split(":")[0]: int(line.split()[1]) >> 10
        for line in lines
        if line.startswith(("RssAnon", "RssFile"))
    }


class Watch(threading.Thread):
    """Notes the most memory, and ends the process if it is more than ``limit`` MiB."""

    def __init__(self, limit: int) -> None:
        super().__init__(daemon=True)
        self.limit, self.most = limit, 0

    def run(self) -> None:
        """Look, until the process ends."""
        while True:
            self.most = max(self.most, own_memory()["RssAnon"])
            if self.most > self.limit:
                print(f"{self.most} MiB of own memory, the limit is {self.limit}", flush=True)
                os._exit(1)
            time.sleep(0.02)


def make_batch(first: int, steps: int, model: torch.Tensor) -> TensorDict:
    """``steps`` steps of 64 envs, env after env; rewards are a linear function of observations."""
    rows = ENVS * steps
    step = (first + torch.arange(steps)).repeat(ENVS)
    observation = torch.randn(rows, OBSERVATION)
    env = torch.arange(ENVS).repeat_interleave(steps)
    return TensorDict(
        {
            "observation": observation,
            "is_init": (step % EPISODE == 0).unsqueeze(1),
            "collector": {"traj_ids": env * 10**9 + step // EPISODE},
            "next": {
                "reward": (observation @ model).unsqueeze(1),
                "done": (step % EPISODE == EPISODE - 1).unsqueeze(1),
            },
        },
        [rows],
    )


def run(rows: int, folder: Path, samples: int, limit: int) -> float:
    """Write, sample and train; return the last loss over the first one."""
    watch = Watch(limit)
    watch.start()
    torch.manual_seed(0)
    model = torch.randn(OBSERVATION) / OBSERVATION**0.5
    storage = DiskStorage(rows, folder)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=LENGTH), batch_size=32 * LENGTH)
    begin, steps = time.perf_counter(), 100
    for first in range(0, rows // ENVS, steps):
        buffer.extend(make_batch(first, min(steps, rows // ENVS - first), model))
    storage.flush()
    took = time.perf_counter() - begin
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(
        f"written: {len(buffer):,} rows, {size / 2**30:.2f} GiB in {len(list(folder.glob('*.rows')))} files, "
        f"{took:.0f} s; own memory at most {watch.most} MiB",
        flush=True,
    )
    network = nn.Linear(OBSERVATION, 1)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    losses: list[float] = []
    begin = time.perf_counter()
    for _ in range(samples):
        batch = buffer.sample()
        goes_on = batch["is_init"][1:] | (batch["collector", "traj_ids"].diff() == 0).unsqueeze(1)
        assert bool(goes_on.all()), "a slice joins two trajectories"
        loss = (network(batch["observation"]) - batch["next", "reward"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    took = time.perf_counter() - begin
    memory = own_memory()
    print(
        f"trained on {samples} samples of 32 slices of {LENGTH} rows, {took / samples * 1e3:.2f} ms each: loss "
        f"{losses[0]:.3f} to {losses[-1]:.4f}; own memory at most {watch.most} MiB of {limit}, now "
        f"{memory['RssAnon']}, and {memory['RssFile']} MiB of mapped pages",
        flush=True,
    )
    storage.close()
    return losses[-1] / losses[0]


def main() -> None:
    """Run it in a new folder, which goes afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--limit_mib", type=int, default=2048)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        run(given.rows, folder, given.samples, given.limit_mib)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
