"""`TrajectoryReplayBuffer` against a plain list of trajectories: random calls, runs that end, runs that are killed.

`python tests/datasets/trajectories/test_fuzz.py 100 50` makes 100 runs of calls and kills 50 processes.
"""

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from flatroll.datasets import TrajectoryReplayBuffer
from flatroll.datasets.trajectories.sources import share


class Given(NamedTuple):
    """A trajectory as it was added: what is in it follows from ``serial``."""

    number: int
    serial: int
    steps: int
    lanes: int

    @property
    def rows(self) -> int:
        return self.steps * self.lanes

    @property
    def fields(self) -> dict[str, Any]:
        step, lane = torch.meshgrid(torch.arange(self.steps), torch.arange(self.lanes), indexing="ij")
        rewards = (self.serial * 10_000 + step * 100 + lane).double()
        done = (step % 3 == 2)[..., None]
        return {"rewards": rewards, "dones": done, "obs": {"x": torch.stack([rewards, -rewards], -1)}}

    @property
    def column(self) -> list[float]:
        """The rewards, lane after lane."""
        values: list[float] = self.fields["rewards"].T.reshape(-1).tolist()
        return values


def last_rows(given: list[Given], most: int | None) -> list[Given]:
    """The last trajectories, of at most so many rows."""
    kept: list[Given] = []
    for one in reversed(given):
        most = None if most is None else most - one.rows
        if most is not None and most < 0:
            break
        kept.insert(0, one)
    return kept


class Call(NamedTuple):
    """A call to come: its name, what it does, and what the buffer holds after it."""

    name: str
    act: Callable[[TrajectoryReplayBuffer], Any]
    given: list[Given]


class Model:
    """Draws random calls, and knows what the buffer has to hold."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random, self.folder, self.serial = random.Random(seed), folder, 0
        self.size = self.random.choice([None, 60])
        self.options: dict[str, Any] = {
            "auto_save": True,
            "auto_save_path": folder / "run",
            "sync": False,
            "segment_bytes": self.random.choice([600, 5000]),
            "cache_size": 2,
            "max_size": self.size,
            "sample_window_size": self.random.choice([0, 1, 3]),
        }
        self.given: list[Given] = []
        self.saved: list[Given] | None = None
        self.counter = 0

    def draw(self) -> Call:
        names = ["add"] * 6 + ["flush", "clear", "clear_cache", "save", "load", "share", "close", "wrong"]
        name = self.random.choice(names)
        if name == "add":
            added = []
            for _ in range(self.random.randint(1, 3)):
                steps, lanes = self.random.randint(1, 6), self.random.randint(1, 3)
                added.append(Given(self.counter, self.serial, steps, lanes))
                self.counter, self.serial = self.counter + 1, self.serial + 1
            fields = [one.fields for one in added]
            return Call(name, lambda b: b.add_trajectories(fields), last_rows(self.given + added, self.size))
        if name == "clear":
            return Call(name, lambda b: b.clear(), [])
        if name == "save":
            self.saved = self.given
            return Call(name, self.save, self.given)
        if name in ("load", "share") and self.saved:
            ranks = self.random.randint(1, len(self.saved)) if name == "share" else 1
            rank = self.random.randrange(ranks)
            chosen = share([one.rows for one in self.saved], rank, ranks)
            given = last_rows([self.saved[i] for i in chosen], self.size)
            path = self.folder / "saved"
            return Call("load", lambda b: b.load_checkpoint(path, name == "share", rank, ranks), given)
        if name == "wrong" and self.given:
            return Call(name, self.refuse, self.given)
        if name == "close":
            return Call(name, lambda b: b.close(), self.given)
        name = name if name == "clear_cache" else "flush"
        return Call(name, lambda b: getattr(b, name)(), self.given)

    def save(self, buffer: TrajectoryReplayBuffer) -> None:
        shutil.rmtree(self.folder / "saved", ignore_errors=True)
        buffer.save_checkpoint(self.folder / "saved")

    def refuse(self, buffer: TrajectoryReplayBuffer) -> None:
        fields = self.given[0].fields
        for wrong in ({**fields, "new": fields["rewards"]}, {"rewards": fields["rewards"].float()}, 3):
            with pytest.raises((ValueError, TypeError)):
                buffer.add_trajectories([fields, wrong])

    def check(self, buffer: TrajectoryReplayBuffer) -> None:
        """The buffer holds what it should, and samples are of it."""
        assert buffer.trajectory_ids == [one.number for one in self.given]
        assert buffer.total_samples == sum(one.rows for one in self.given)
        for one in self.given:
            found = buffer.trajectory(one.number)
            assert torch.equal(found["rewards"], one.fields["rewards"])
            assert torch.equal(found["obs"]["x"], one.fields["obs"]["x"])
            assert torch.equal(found["dones"], one.fields["dones"])
        if not self.given:
            return
        sample = buffer.sample(30)
        window = self.given[-buffer.sample_window_size :]
        assert set(sample["rewards"].tolist()) <= {value for one in window for value in one.column}
        assert torch.equal(sample["obs"]["x"][:, 1], -sample["rewards"])
        if any(one.steps > 1 for one in self.given):
            assert (buffer.sample_slices(5, 2)["rewards"].view(5, 2).diff() == 100).all()


def run(seed: int, folder: Path, calls: int) -> None:
    """Make some calls, and compare after each."""
    model = Model(seed, folder)
    buffer = TrajectoryReplayBuffer(**model.options)
    for _ in range(calls):
        call = model.draw()
        call.act(buffer)
        if call.name == "close":
            buffer = TrajectoryReplayBuffer(**model.options)
        model.given = call.given
        model.check(buffer)
    buffer.close()


def child(seed: int, folder: Path) -> None:
    """Make calls until killed, and say before each what the buffer has to hold after it, and when it has returned."""
    model = Model(seed, folder)
    buffer = TrajectoryReplayBuffer(**model.options)
    while True:
        call = model.draw()
        print(json.dumps([call.name, call.given]), flush=True)
        call.act(buffer)
        if call.name == "close":
            buffer = TrajectoryReplayBuffer(**model.options)
        model.given = call.given
        print(json.dumps([None, None]), flush=True)


def killed(seed: int, folder: Path) -> int:
    """Kill a process that makes calls; return how many it had made. The folder holds what it should."""
    chosen = random.Random(seed)
    wanted, seconds = chosen.randint(1, 80), chosen.random() * 0.03
    command = [sys.executable, __file__, "child", str(seed), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(wanted)]
        threading.Timer(seconds, process.kill).start()
        lines += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    said = [json.loads(line) for line in lines if line.endswith("\n")]
    begun = [(name, [Given(*one) for one in given]) for name, given in said if name]
    # All that was added since the rows were last replaced, how many rows of it must be there, and what else may be.
    log: list[Given] = []
    least, instead = 0, None
    for i, (name, given) in enumerate(begun):
        returned = i < sum(name is None for name, _ in said)
        if name == "add":
            log += [one for one in given if one not in log]
        elif name in ("clear", "load"):
            instead = given
            if returned:
                log, least, instead = list(given), sum(one.rows for one in given), None
        elif name in ("flush", "save", "close") and returned:
            least = sum(one.rows for one in log)
    model = Model(seed, folder)
    buffer = TrajectoryReplayBuffer(**model.options)
    found = [
        (number, *buffer.trajectory(number)["rewards"].T.reshape(-1).tolist())
        for number in buffer.trajectory_ids
    ]
    buffer.close()
    total = sum(one.rows for one in log)
    states = [columns(log, rows, model.size) for rows in range(least, total + 1)]
    if instead is not None:
        states.append(columns(instead, sum(one.rows for one in instead), model.size))
    assert found in states, (found, begun[-3:])
    return len(begun)


def columns(given: list[Given], rows: int, most: int | None) -> list[tuple[float, ...]]:
    """Number and rows of each trajectory, if only the first rows of all are there, and of these the last ``most``."""
    low = 0 if most is None else rows - most
    starts = [0, *itertools.accumulate(one.rows for one in given)]
    return [
        (one.number, *one.column[: rows - first])
        for one, first in zip(given, starts, strict=False)
        if low <= first < rows
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_random_calls(tmp_path: Path, seed: int) -> None:
    run(seed, tmp_path, 30)


def main() -> None:
    if sys.argv[1] == "child":
        child(int(sys.argv[2]), Path(sys.argv[3]))
    for seed in range(int(sys.argv[1])):
        with tempfile.TemporaryDirectory() as folder:
            run(seed, Path(folder), 60)
    calls = []
    for seed in range(int(sys.argv[2])):
        with tempfile.TemporaryDirectory() as folder:
            calls.append(killed(seed, Path(folder)))
    print(
        f"{sys.argv[1]} runs of 60 calls, {len(calls)} killed after {sum(calls)} calls: all as they should be"
    )


if __name__ == "__main__":
    main()
