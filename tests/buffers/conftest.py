"""A world of writers whose observation says where it comes from, and a list that models the ring."""

import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rings are filled with batches that they cannot hold: no warning."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore:the batch has .* rows, the storage holds"))


@dataclass(frozen=True)
class Step:
    """One transition: step ``step`` of episode ``episode`` of writer ``writer``."""

    writer: int
    episode: int
    step: int
    terminated: bool
    truncated: bool

    @property
    def traj(self) -> int:
        return self.writer * 1000 + self.episode

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@dataclass
class Writer:
    """Episodes of random length; now and then one is abandoned without done."""

    number: int
    random: random.Random
    longest: int = 12
    abandon: float = 0.05
    episode: int = 0
    step: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        self.length = self.random.randint(1, self.longest)

    def next(self) -> Step:
        last = self.step == self.length - 1
        end = self.random.choice(["terminated", "truncated", "both"]) if last else ""
        made = Step(
            self.number, self.episode, self.step, end in ("terminated", "both"), end in ("truncated", "both")
        )
        self.step += 1
        if last or self.random.random() < self.abandon:
            self.step, self.length = 0, self.random.randint(1, self.longest)
            self.episode += 1
        return made


def observation(writer: int, episode: int, step: int, kind: str) -> Any:
    """An observation that is (writer, episode, step), in some dtype or nesting."""
    if kind == "scalar":
        return torch.tensor(writer * 1_000_000 + episode * 1000 + step)
    if kind == "stack":  # as envs stack: the first frame of an episode is repeated
        frames = [(writer * 50 + episode * 13 + max(0, at) * 3) % 256 for at in range(step - 3, step + 1)]
        return torch.tensor(frames, dtype=torch.uint8).view(4, 1, 1).expand(4, 2, 3).clone()
    where = torch.tensor([writer, episode, step])
    if kind == "dict":
        return {"eye": where.to(torch.uint8).expand(2, 3).clone(), "body": {"leg": where / 3}}
    return where.to(getattr(torch, kind))


def to_batch(steps: list[Step], kind: str = "float32", ids: str = "unique", without: Any = ()) -> TensorDict:
    """The batch of these transitions, with the true next observation, and the markers.

    ``ids``: "unique" per trajectory, "writer" for the number of the writer, "" for none.
    """

    def column(name: str) -> torch.Tensor:
        return torch.tensor([[getattr(s, name)] for s in steps])

    def stacked(shift: int) -> dict[str, Any]:
        each = [observation(s.writer, s.episode, s.step + shift, kind) for s in steps]
        if kind == "dict":
            leg = torch.stack([e["body"]["leg"] for e in each])
            return {"eye": torch.stack([e["eye"] for e in each]), "body": {"leg": leg}}
        return {"observation": torch.stack(each)}

    step = column("step")
    root: dict[str, Any] = {
        **stacked(0),
        "is_init": step == 0,
        "step_count": step,
        "next": {
            "reward": step * 0.5,
            "done": column("done"),
            "terminated": column("terminated"),
            "truncated": column("truncated"),
            "step_count": step + 1,
            **stacked(1),
        },
    }
    if ids:
        traj = [s.traj if ids == "unique" else s.writer for s in steps]
        root["collector"] = {"traj_ids": torch.tensor(traj)}
    return TensorDict(root, [len(steps)]).exclude(*without)


def compacted(batch: TensorDict, steps: list[Step]) -> tuple[TensorDict, TensorDict]:
    """What a compact collector gives for it: the batch without next observations, and its *final*."""
    last = len(steps) - 1
    rows = [
        i
        for i, s in enumerate(steps)
        if i == last or s.done or (steps[i + 1].traj, steps[i + 1].step) != (s.traj, s.step + 1)
    ]
    row = torch.tensor(rows)
    keys = [k for k in batch.keys(True, True) if k[0] == "next" and k[1] in ("observation", "eye", "body")]
    final = TensorDict({"row": row, **{k: batch[k][row] for k in keys}}, [len(rows)])
    return batch.exclude(*keys, ("next", "step_count")), final


@dataclass
class Model:
    """The stored transitions by slot, and what follows what, found by looking at all of them."""

    capacity: int
    written: int = 0
    rows: deque[Step] = field(default_factory=deque)

    def extend(self, steps: list[Step]) -> None:
        kept = steps[-self.capacity :]
        self.rows.extend(kept)
        self.written += len(kept)
        while len(self.rows) > self.capacity:
            self.rows.popleft()

    def slots(self) -> dict[int, Step]:
        oldest = self.written - len(self.rows)
        return {(oldest + i) % self.capacity: s for i, s in enumerate(self.rows)}

    def trajectories(self) -> dict[int, list[int]]:
        """Slots of each trajectory in time order."""
        found: dict[int, list[int]] = {}
        slots = self.slots()
        for slot in sorted(slots, key=lambda i: (slots[i].traj, slots[i].step)):
            found.setdefault(slots[slot].traj, []).append(slot)
        return found

    def next_slot(self) -> dict[int, int]:
        following = dict.fromkeys(self.slots(), -1)
        for chain in self.trajectories().values():
            following.update(itertools.pairwise(chain))
        return following

    def starts(self, length: int, strict: bool) -> dict[int, int]:
        """Legal first slots of a slice, and the rows it then has."""
        legal: dict[int, int] = {}
        for chain in self.trajectories().values():
            if len(chain) >= length:
                legal.update(dict.fromkeys(chain[: len(chain) - length + 1], length))
            elif not strict:
                legal[chain[0]] = len(chain)
        return legal


class World:
    """The names above, for tests (test modules cannot import each other)."""

    Model = Model
    to_batch = staticmethod(to_batch)
    compacted = staticmethod(compacted)

    @staticmethod
    def writers(count: int, seed: int, **options: Any) -> list[Writer]:
        source = random.Random(seed)
        return [Writer(i, random.Random(source.random()), **options) for i in range(count)]

    @staticmethod
    def windows(writers: list[Writer], lengths: list[tuple[int, int]]) -> list[Step]:
        """Windows (writer, rows), end to end."""
        return [writers[w].next() for w, n in lengths for _ in range(n)]

    @staticmethod
    def episode(writer: int, episode: int, length: int, end: str = "truncated") -> list[Step]:
        """One whole episode."""
        return [
            Step(
                writer,
                episode,
                i,
                i == length - 1 and end == "terminated",
                i == length - 1 and end == "truncated",
            )
            for i in range(length)
        ]


@pytest.fixture(scope="session")
def world() -> World:
    return World()


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(0)
