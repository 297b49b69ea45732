"""Times maps and forests beside TorchRL's and a dict: ``python -m benchmarks.trees.bench_trees``.

Thread time, contenders in turns in one process. TorchRL is left out where it is not installed, or with ``--alone``.
"""

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.kernels.rows.row_index import RowIndex
from flatroll.kernels.rows.words import pack_rows
from flatroll.trees import MCTSForest, QueryModule, TensorDictMap

Case = dict[str, Callable[[], object]]


def keys(rows: int, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    return TensorDict({"observation": torch.randn(rows, 4, generator=generator)}, [rows])


def runs(count: int, length: int) -> list[TensorDict]:
    """Runs from one state on, with random observations after it."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        seen = torch.randn(length + 1, 4, generator=generator)
        seen[0] = 0
        after = {"observation": seen[1:], "reward": torch.ones(length, 1), "done": torch.zeros(length, 1) > 0}
        action = torch.randint(100, (length,), generator=generator)
        made.append(TensorDict({"observation": seen[:-1], "action": action, "next": after}, [length]))
    return made


def insert(batch: int, peer: Any) -> Case:
    """New keys get positions, in batches; of all in turn, so that the tables grow."""
    parts = [keys(batch, seed) for seed in range(max(1, 16384 // batch))]

    def ours() -> None:
        query = QueryModule(["observation"])
        for part in parts:
            query(part)

    def by_dict() -> None:
        known: dict[bytes, int] = {}
        for part in parts:
            rows: Any = part["observation"].numpy()
            for row in rows:
                known.setdefault(row.tobytes(), len(known))

    def index_alone() -> None:
        index = RowIndex(2)
        for part in parts:
            index.insert(pack_rows([part["observation"]]))

    def theirs() -> None:
        query = peer.QueryModule(["observation"])
        for part in parts:
            query(part)

    case: Case = {"flatroll": ours, "index alone": index_alone, "dict": by_dict}
    return case | ({"torchrl": theirs} if peer else {})


def contains(peer: Any) -> Case:
    known, asked = keys(2048), keys(2048)[1024:]
    value = TensorDict({"value": torch.zeros(2048)}, [2048])
    mapped = TensorDictMap(query_module=QueryModule(["observation"]))
    mapped[known] = value
    case: Case = {"flatroll": lambda: mapped.contains(asked)}
    if peer:
        theirs = peer.TensorDictMap(
            query_module=peer.QueryModule(["observation"]), storage=peer.LazyTensorStorage(4096)
        )
        theirs[keys(2048)] = value
        case["torchrl"] = lambda: theirs.contains(asked)
    return case


def write(batch: int, peer: Any) -> Case:
    """Rows go into a map under new keys, in batches."""
    parts = [keys(batch, seed) for seed in range(max(1, 4096 // batch))]
    value = TensorDict({"value": torch.zeros(batch)}, [batch])

    def ours() -> None:
        mapped = TensorDictMap(query_module=QueryModule(["observation"]))
        for part in parts:
            mapped[part] = value

    def theirs() -> None:
        query, storage = peer.QueryModule(["observation"]), peer.LazyTensorStorage(16384)
        mapped = peer.TensorDictMap(query_module=query, storage=storage)
        for part in parts:
            mapped[part] = value

    case: Case = {"flatroll": ours}
    return case | ({"torchrl": theirs} if peer else {})


def extend(runs_of: int, length: int, peer: Any) -> Case:
    parts = [run[i : i + length] for run in runs(runs_of, 100) for i in range(0, 100, length)]

    def fill(make: Callable[[], Any]) -> Callable[[], object]:
        def run() -> None:
            forest = make()
            for part in parts:
                forest.extend(part)

        return run

    return {"flatroll": fill(MCTSForest)} | (
        {"torchrl": fill(lambda: peer.MCTSForest(max_size=5000))} if peer else {}
    )


def tree(peer: Any) -> Case:
    root = TensorDict({"observation": torch.zeros(4)})

    def walk(forest: Any) -> Callable[[], object]:
        for run in runs(30, 100):
            forest.extend(run)
        return lambda: forest.get_tree(root)

    return {"flatroll": walk(MCTSForest())} | (
        {"torchrl": walk(peer.MCTSForest(max_size=5000))} if peer else {}
    )


def deep(depth: int) -> MCTSForest:
    """A graph with ``2 ** depth`` ways down."""
    rows = torch.tensor(
        [(2 * d + i, a, 2 * (d + 1) + a) for d in range(depth) for i in range(2) for a in range(2)]
    )
    forest = MCTSForest()
    after = {"observation": rows[:, 2]}
    forest.extend(TensorDict({"observation": rows[:, 0], "action": rows[:, 1], "next": after}, [len(rows)]))
    return forest


def main(arguments: list[str] | None = None) -> str:
    """Print and return the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="without TorchRL")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    peer: Any = None
    if not args.alone and importlib.util.find_spec("torchrl") is not None:
        peer = importlib.import_module("torchrl.data")
    cases: dict[str, tuple[Case, int]] = {
        **{f"insert, batches of {n}": (insert(n, peer), 16384) for n in (64, 1024, 16384)},
        **{f"write, batches of {n}": (write(n, peer), 4096 if n < 4096 else n) for n in (64, 1024, 16384)},
        "contains, 1,024": (contains(peer), 1024),
        "forest extend, runs of 100": (extend(10, 100, peer), 1000),
        "forest extend, single steps": (extend(2, 1, peer), 200),
        "tree of 30 runs of 100": (tree(peer), 1),
    }
    for depth in (200, 400, 800):
        forest, root = deep(depth), TensorDict({"observation": torch.tensor(0)})
        cases[f"tree of diamonds, depth {depth}"] = (
            {"flatroll": lambda f=forest, r=root: f.get_tree(r)},  # type: ignore[misc]
            1,
        )
    lines = []
    for name, (case, rows) in cases.items():
        calls = 20 if name.startswith(("contains", "tree of diamonds")) else 1
        timings = take_turns(case, args.turns, calls, time.thread_time)
        ours = timings["flatroll"]
        for other, timing in timings.items():
            speed = f"{rows / timing.median:,.0f} rows/s" if rows > 1 else f"{timing.median * 1e3:.2f} ms"
            lines.append([name, other, speed, f"{ratio(timing, ours):.1f}"])
    result = table(["what", "by", "speed", "its time over flatroll's"], lines)
    print(result)
    return result


if __name__ == "__main__":
    main()
