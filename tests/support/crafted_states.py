"""States that somebody wrote, or that a disk damaged: the script of `test_crafted_states`, in a process of its own.

    python crafted_states.py [MUTATIONS PER KIND] [SEED]

A state is refused, and then nothing has changed, or it is loaded, and then the buffer works.
"""

import copy
import faulthandler
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from flatroll.disk.state_tree import from_plain

CAPACITY, LENGTH = 40, 7
MARKED = {"is_init", ("next", "done")}


def batch(first: int, rows: int) -> TensorDict:
    """Rows that are their own numbers, with stacks of frames, in trajectories of ``LENGTH`` rows."""
    number = torch.arange(first, first + rows)
    step = (number % LENGTH)[:, None]
    frames = number[:, None] - torch.minimum(torch.arange(3).flip(0), step)  # the first frame is repeated
    return TensorDict(
        {
            "observation": frames[..., None].expand(-1, -1, 4).contiguous(),
            "number": number,
            "state": torch.where(step % 4 == 0, number[:, None].float() + 1, 0.0),
            "is_init": step == 0,
            "collector": {"traj_ids": number // LENGTH},
            "next": {
                "observation": torch.cat([frames[:, 1:], number[:, None] + 1], 1)[..., None].expand(
                    -1, -1, 4
                ),
                "reward": number[:, None].float(),
                "done": step == LENGTH - 1,
            },
        },
        [rows],
    )


def memory(**options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(CAPACITY, **options)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"storage": memory()},
    "slices": lambda: {"storage": memory(), "sampler": SliceSampler(slice_len=4)},
    "compact": lambda: {"storage": memory(compact_obs=True), "sampler": SliceSampler(slice_len=4)},
    "files": lambda: {"storage": LazyMemmapStorage(CAPACITY, compact_obs=True)},
    "frames": lambda: {
        "storage": memory(compact_obs=True, frame_stack={"observation": 3}),
        "sampler": SliceSampler(slice_len=4, by="start"),
    },
    "zstd": lambda: {"storage": memory(codec={"observation": "zstd"}, sparse=["state"])},
    "zstd frames": lambda: {
        "storage": memory(frame_stack={"observation": 3}, codec={"observation": "zstd"}),
        "sampler": SliceSampler(slice_len=4),
    },
    "prioritized": lambda: {"storage": memory(), "sampler": PrioritizedSampler(CAPACITY, 0.7, 0.5)},
    "prioritized slices": lambda: {
        "storage": memory(compact_obs=True),
        "sampler": PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=4),
        "prefetch": 1,
    },
    "pass": lambda: {"storage": memory(), "sampler": SamplerWithoutReplacement()},
    "pass of slices": lambda: {"storage": memory(), "sampler": SliceSamplerWithoutReplacement(slice_len=4)},
    "best": lambda: {"storage": memory(), "writer": TensorDictMaxValueWriter(rank_key="number")},
    "items": lambda: {"storage": ListStorage(CAPACITY)},
}


def new(kind: str) -> ReplayBuffer:
    return ReplayBuffer(batch_size=8, generator=torch.Generator().manual_seed(0), **KINDS[kind]())


def filled(kind: str, rows: int) -> ReplayBuffer:
    """A buffer in the middle of its life: overwritten, sampled, with open trajectories."""
    buffer, first = new(kind), 0
    while first < rows:
        buffer.extend(batch(first, 13))
        first += 13
    for _ in range(2):
        _, info = buffer.sample(return_info=True)
        if "index_generation" in info:
            buffer.update_priority(info["index"], torch.rand(len(info["index"])), info["index_generation"])
    return buffer


def use(buffer: Any) -> None:
    """Whatever a buffer is for; only what says why it cannot be done may stop it."""
    newest: Any = None
    for first in (None, 10_000, 20_000, 30_000):
        if first is not None:
            newest = buffer.extend(batch(first, 17))
        if len(buffer):
            rows = buffer[:]
            assert len(rows) == len(buffer)
            for _ in range(3):
                _, info = buffer.sample(return_info=True)
                if "index_generation" in info:
                    buffer.update_priority(
                        info["index"], torch.rand(len(info["index"])), info["index_generation"]
                    )
        buffer.state_dict()
    rows, want = (
        buffer[newest],
        batch(30_000, 17),
    )  # what is written after the load is right, whatever the state was
    for got, row in zip(rows, want, strict=True):
        assert same(got["number"], row["number"]) and same(got["observation"], row["observation"])


def same(left: Any, right: Any) -> bool:
    """Whether two states agree, bit by bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, TensorDictBase):
        return same(dict(left.items(True, True)), dict(right.items(True, True)))
    if isinstance(left, torch.Tensor):
        return left.dtype is right.dtype and same(left.numpy(), right.numpy())
    if isinstance(left, np.ndarray):
        return bool(
            left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    if hasattr(left, "__dict__") and not isinstance(left, type):
        return same(vars(left), vars(right))
    return bool(left == right)


def state_of(buffer: Any) -> dict[str, Any]:
    """The state of a buffer, with its tables as arrays, in which every field can be changed."""
    state: dict[str, Any] = buffer.state_dict()
    if "items" in state["storage"]:
        state["storage"]["items"] = from_plain(state["storage"]["items"])
    return state | {name: from_plain(state[name]) for name in ("ring", "ahead")}


# -- by name: what once ended the process, never ended, or was taken in silence ----------------------------------------


def put(path: str, value: Any, *, at: Any = None, field: str | None = None) -> Callable[[Any], None]:
    """Set what stands at ``path`` of a state, or its entry ``at``; ``value`` may be a function of it."""

    def change(state: Any) -> None:
        *way, last = path.split("/")
        for name in way:
            state = state[int(name) if name.isdigit() else eval(name) if name.startswith("(") else name]
        last_key: Any = int(last) if last.isdigit() else eval(last) if last.startswith("(") else last
        target = state[last_key] if field is None else state[last_key][field]
        if at is None and field is None:
            state[last_key] = value(target) if callable(value) else value
        else:
            target[slice(None) if at is None else at] = value(target) if callable(value) else value

    return change


DONE, NUMBER = "storage/columns/('next','done')/values", "storage/columns/number/values"
CRAFTED: list[tuple[str, Callable[[Any], None]]] = [
    ("slices", put("ring/fragments", lambda table: table[:0])),
    ("slices", put("ring/fragments", lambda table: table[:1])),
    ("slices", put("ring/fragments", lambda table: table[:3])),
    ("slices", put("ring/fragments", np.zeros(64))),
    ("slices", put("ring/fragments", 10**6, field="chain")),
    ("slices", put("ring/fragments", -1, field="chain")),
    ("slices", put("ring/fragments", 2**40, field="first")),
    ("slices", put("ring/fragments", lambda firsts: firsts[::-1].copy(), field="first")),
    ("slices", put("ring/state", 2**40, field="end")),
    ("slices", put("ring/state", -5, field="first")),
    ("slices", put("ring/state", 2**40, field="free")),
    ("slices", put("ring/state", 2**40, field="slots")),
    ("slices", put("ring/capacity", -5)),
    ("slices", put("ring/capacity", 2**40)),
    ("compact", put("ring/fragments", 10**6, field="pool")),
    ("compact", put("ring/fragments", 0, field="pool")),
    ("compact", put("ring/spare", lambda spare: spare[:1])),
    ("compact", put("storage/pool/observation/values", lambda values: values[:2])),
    ("compact", put("storage/pool", {})),
    ("plain", put("ring/state", -5, field="head")),
    ("plain", put("ring/state", 2**40, field="written")),
    ("plain", put("ring/state", 10**6, field="head")),
    ("plain", put(DONE, lambda values: values[:5])),
    ("plain", put(DONE, lambda values: values.int())),
    ("plain", put(DONE, lambda values: values[:, :0])),
    ("slices", put(DONE, lambda values: values[:, :0])),
    ("slices", put(DONE, lambda values: values.expand(-1, 3))),
    ("plain", put(NUMBER, lambda values: values.to("meta"))),
    ("plain", put(NUMBER, lambda values: values.to_sparse())),
    ("plain", put("generator", torch.zeros(5, dtype=torch.uint8))),
    ("plain", put("generator", torch.zeros(5056, dtype=torch.uint8))),
    ("plain", put("keys", ("reward",))),
    ("plain", put("storage/structure", 5)),
    ("frames", put("storage/columns/observation/refs", 10**6, at=0)),
    ("frames", put("storage/columns/observation/refs", -1, at=0)),
    ("frames", put("storage/columns/observation/refs", 2**31 - 1)),
    ("frames", put("storage/columns/observation/refs", lambda refs: torch.full_like(refs, 2**31 - 1))),
    ("frames", put("storage/columns/observation/frames/columns", [])),
    ("zstd", put("storage/columns/observation/sizes", 2**40, at=0)),
    ("zstd", put("storage/columns/observation/sizes", lambda sizes: -sizes)),
    ("zstd", put("storage/columns/observation/rows", lambda rows: torch.zeros_like(rows))),
    ("zstd", put("storage/columns/state/filled", 10**6, at=0)),
    ("zstd", put("storage/columns/state/rows", 5)),
    ("prioritized", put("sampler/priority", torch.nan, at=3)),
    ("prioritized", put("sampler/priority", -1.0, at=3)),
    ("prioritized", put("sampler/priority", lambda values: values[:3])),
    ("prioritized", put("sampler/highest", torch.inf)),
    ("prioritized", put("sampler/written", 2**40)),
    ("prioritized", put("sampler/alpha", -1.0)),
    ("prioritized slices", put("ahead", [5])),
    ("pass", put("sampler/pass/left", 10**6, at=0)),
    ("pass", put("sampler/pass/left", lambda left: left[:1].expand(5))),
    ("pass of slices", put("sampler/pass/left", -1, at=(1, 0))),
    ("pass of slices", put("sampler/pass/left", 2**40, at=(0, 0))),
    ("best", put("ring/ranked/1", 10**6, at=0)),
    ("best", put("ring/ranked/1", 0)),
    ("best", put("ring/ranked/1", lambda heap: np.zeros_like(heap))),
    ("best", put("ring/ranked/0", 10**6, field="live")),
    ("best", put("ring/ranked/0", -5, field="live")),
    ("best", put("ring/ranked/2", np.nan, at=0)),
    ("items", put("storage/items", lambda items: items[:5])),
]

#: Of tables that a load makes anew: whatever they say, the buffer is that of the good state.
REBUILT: list[tuple[str, Callable[[Any], None]]] = [
    ("compact", put("ring/state", 2**40, field="spare")),
    ("slices", put("ring/state", 2**40, field="live")),
    ("slices", put("ring/chains", 2**40, field="total")),
    ("slices", put("ring/chains", -1, field="last")),
    ("slices", put("ring/table", 10**6, field="chain")),
    ("slices", put("ring/table", lambda table: table[:1])),
]


def refused(kind: str, crafted: Any) -> bool:
    """Load a state in a used and in a new buffer; whether it was refused (then nothing may have changed)."""
    verdicts = []
    for buffer in (filled(kind, 30), new(kind)):
        before = buffer.state_dict()
        try:
            buffer.load_state_dict(crafted)
        except (ValueError, MemoryError) as error:  # in words of the library
            verdicts.append(type(error).__name__)
            assert same(buffer.state_dict(), before), "a refused state changed the buffer"
        else:
            verdicts.append("")
        use(buffer)
    assert bool(verdicts[0]) == bool(verdicts[1]), verdicts
    return bool(verdicts[0])


def open_trajectories_stay() -> None:
    """A refusal cuts nothing: the rows that come next continue the open trajectory."""
    buffer, twin = filled("slices", 30), filled("slices", 30)
    state = buffer.state_dict()
    state["generator"] = state["generator"][:10]
    try:
        buffer.load_state_dict(state)
        raise AssertionError("a generator of the wrong size was taken")
    except ValueError:
        pass
    for one in (buffer, twin):
        one.extend(batch(39, 5))
    assert same(buffer.state_dict(), twin.state_dict()) and same(buffer.sample(), twin.sample())


def ensembles() -> None:
    """All members are checked before any of them is loaded."""
    rb = ReplayBufferEnsemble(filled("plain", 30), filled("slices", 30), batch_size=8)
    other = ReplayBufferEnsemble(filled("plain", 60), filled("slices", 60), batch_size=8)
    state, before = other.state_dict(), rb.state_dict()
    state["members"][1]["ring"] = from_plain(state["members"][1]["ring"])
    state["members"][1]["ring"]["state"]["end"] = 2**40
    try:
        rb.load_state_dict(state)
        raise AssertionError("the state of a damaged member was taken")
    except ValueError:
        assert same(rb.state_dict(), before)


# -- at random ---------------------------------------------------------------------------------------------------------


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all parts of a state, inner ones too."""
    if path:
        yield path
    inner = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in inner:
        yield from leaves(value, (*path, key))


NUMBERS = [-5, -1, 0, 1, 3, 41, 2**31, 2**40, 2**62, 2**63 - 1]


def mutated(value: Any, draw: random.Random) -> Any:
    """Something else in the place of ``value``."""
    if isinstance(value, torch.Tensor) and draw.random() < 0.9:
        ways: list[Callable[[Any], Any]] = [
            lambda t: t[:0],
            lambda t: t[: len(t) // 2],
            lambda t: torch.cat([t, t]),
            lambda t: t.flip(0),
            lambda t: t.double(),
            lambda t: t.to(torch.int16),
            lambda t: t[:1].expand(t.shape),
            lambda t: t.to("meta"),
            lambda t: t.to_sparse(),
            lambda t: t.unsqueeze(-1),
            lambda t: torch.full_like(t, draw.choice(NUMBERS) % 127),
            lambda t: t.repeat_interleave(2, 0)[::2],
        ]
        changed = draw.choice(ways)(value.clone())
        if (
            draw.random() < 0.5
            and changed.layout is torch.strided
            and changed.numel()
            and not changed.is_meta
        ):
            changed = changed.contiguous()
            limit = changed.dtype
            number = draw.choice(NUMBERS)
            if not limit.is_floating_point and limit is not torch.bool:
                number = max(min(number, torch.iinfo(limit).max), torch.iinfo(limit).min)
            changed.view(-1)[draw.randrange(changed.numel())] = number
        return changed
    if isinstance(value, np.ndarray) and draw.random() < 0.95:
        if value.dtype.names and len(value) and draw.random() < 0.7:
            changed, name = value.copy(), draw.choice(value.dtype.names)
            column = changed[name]
            number = draw.choice(NUMBERS)
            at: Any = draw.choice([slice(None), draw.randrange(len(column))])
            column[at] = max(min(number, np.iinfo(column.dtype).max), np.iinfo(column.dtype).min)
            return changed
        others: list[Callable[[Any], Any]] = [
            lambda a: a[:0],
            lambda a: a[: len(a) // 2],
            lambda a: a[::-1].copy(),
            lambda a: np.concatenate([a, a]),
            lambda a: np.zeros_like(a),
            lambda a: np.zeros(len(a)),
            lambda a: a[:, None],
        ]
        return draw.choice(others)(value)
    if isinstance(value, dict) and value and draw.random() < 0.5:
        return dict(list(value.items())[1:])
    choices = [None, True, "x", 2.5, float("nan"), [], {}, (), torch.zeros(3), *NUMBERS]
    return draw.choice(choices)


def fuzz(kind: str, count: int, seed: int) -> tuple[int, int]:
    """Mutate the state of a buffer ``count`` times; return how many were refused and loaded."""
    draw, buffer = random.Random(f"{kind} {seed}"), filled(kind, 60)
    packed, tables = buffer.state_dict(), state_of(buffer)
    verdicts = [0, 0]
    for i in range(count):
        crafted, path = copy.deepcopy(packed if draw.random() < 0.2 else tables), ()
        for _ in range(draw.choice([1, 1, 1, 2])):
            path = draw.choice(list(leaves(crafted)))
            target = crafted
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = mutated(target[path[-1]], draw)
        print(kind, seed, i, path, file=sys.stderr, flush=True)  # of the one that ends the process
        verdicts[0 if refused(kind, crafted) else 1] += 1
    return verdicts[0], verdicts[1]


def main(count: int = 15, seed: int = 0) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    for kind in KINDS:
        assert not refused(kind, filled(kind, 60).state_dict()), f"a good state of {kind} was refused"
    taken = []
    for number, (kind, change) in enumerate(CRAFTED):
        state = copy.deepcopy(state_of(filled(kind, 60)))
        change(state)
        print("crafted", number, kind, file=sys.stderr, flush=True)
        if not refused(kind, state):
            taken.append((number, kind))
    assert not taken, f"crafted states that were loaded: {taken}"
    for kind, change in REBUILT:
        good = state_of(filled(kind, 60))
        bad, buffer, twin = copy.deepcopy(good), new(kind), new(kind)
        change(bad)
        buffer.load_state_dict(bad)
        twin.load_state_dict(good)
        assert same(buffer.state_dict(), twin.state_dict()) and same(buffer.sample(), twin.sample())
        use(buffer)
    open_trajectories_stay()
    ensembles()
    for kind in KINDS:
        print(kind, *fuzz(kind, count, seed), flush=True)
    print("all right")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
