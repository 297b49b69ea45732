"""Storages, samplers, transforms and trees: what is stored on a device and drawn from it equals the CPU's."""

import tempfile
from typing import Any

import numpy as np
import torch
from chip_cases import Cases, Sim, rows
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers import (
    Compose,
    DiskStorage,
    ExcludeTransform,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    HindsightTransform,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    LinearScheduler,
    ListStorage,
    MultiStep,
    MultiStepTransform,
    NestedStorageCheckpointer,
    NextObservationDelta,
    NextStateReconstructor,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomCropTensorDict,
    RandomSampler,
    RenameTransform,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Resize,
    SamplerWithoutReplacement,
    SelectTransform,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
    TensorStorageCheckpointer,
    ToTensorImage,
)
from flatroll.rollouts import Collector, rollout
from flatroll.trees import (
    BinaryToDecimal,
    CountSampler,
    HashToInt,
    MCTSForest,
    QueryModule,
    RandomProjectionHash,
    SipHash,
    StateCounter,
    TensorDictMap,
    backup,
    best_edges,
    count_states,
    first_of_state,
    puct,
)
from flatroll.wrappers import NextObservationDelta as DeltaRows
from flatroll.wrappers import as_vector_env

CASES = Cases()


def filled(device: str, buffer: Any, *, batches: int = 3, compact: bool = False) -> Any:
    """The buffer after some batches of a collector; it wraps around if it holds less."""
    collector = Collector(
        as_vector_env(Sim(4, device)),
        lambda obs: obs[:, 2].long() % 4,
        frames_per_batch=40,
        total_frames=40 * batches,
        compact_obs=compact,
        replay_buffer=buffer,
        seed=0,
    )
    for _ in collector:
        pass
    return buffer


def draws(buffer: Any, count: int = 3) -> list[Any]:
    """Samples with their infos."""
    return [buffer.sample(return_info=True) for _ in range(count)]


def add_samplers() -> None:
    """A case for each sampler, over full and compact storages."""
    samplers: dict[str, Any] = {
        "RandomSampler": RandomSampler,
        "SamplerWithoutReplacement": SamplerWithoutReplacement,
        "SliceSampler": lambda: SliceSampler(slice_len=5, strict_length=False),
        "SliceSampler(span)": lambda: SliceSampler(slice_len=4, span=True, pad_output=True),
        "SliceSamplerWithoutReplacement": lambda: SliceSamplerWithoutReplacement(
            slice_len=4, strict_length=False
        ),
        "PrioritizedSampler": lambda: PrioritizedSampler(100, 0.7, 0.5),
        "PrioritizedSliceSampler": lambda: PrioritizedSliceSampler(
            100, 0.7, 0.5, slice_len=4, strict_length=False
        ),
    }
    for name, make in samplers.items():
        for compact in (False, True):

            @CASES.add(
                f"{name}, compact={compact}",
                drives=f"{name.partition('(')[0]} LazyTensorStorage ReplayBuffer",
            )
            def _(d: str, make: Any = make, compact: bool = compact) -> Any:
                storage = LazyTensorStorage(100, device=d, compact_obs=compact)
                buffer = ReplayBuffer(storage=storage, sampler=make(), batch_size=20)
                filled(d, buffer, compact=compact)
                found = draws(buffer)
                if "Prioritized" in type(buffer.sampler).__name__:
                    sample, info = buffer.sample(return_info=True)
                    buffer.update_priority(info["index"], sample["next", "reward"].abs().flatten() + 0.1)
                    found += draws(buffer)
                return found, buffer[:]


add_samplers()


@CASES.add("rows by index", drives="ReplayBuffer")
def _(d: str) -> Any:
    buffer = filled(d, ReplayBuffer(storage=LazyTensorStorage(200, device=d), batch_size=8))
    done = buffer["next", "done"].squeeze(-1)
    at = torch.tensor([3, -1, 7], device=d)
    buffer[at] = buffer[at].clone().set(("next", "reward"), torch.zeros(3, 1, device=d))
    return buffer[done], buffer[at], buffer[5], buffer[2:9:3], buffer["action"], len(buffer)


@CASES.add("single rows", drives="ReplayBuffer TensorDictReplayBuffer")
def _(d: str) -> Any:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10, device=d), batch_size=6)
    for row in rows(d)[:13]:
        buffer.add(row)
    return draws(buffer), buffer[:]


@CASES.add("priorities by key", drives="TensorDictPrioritizedReplayBuffer")
def _(d: str) -> Any:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(100, device=d), batch_size=8, priority_key="td_error"
    )
    buffer.extend(rows(d))
    sample = buffer.sample()
    sample["td_error"] = sample["next", "reward"].abs().flatten()
    buffer.update_tensordict_priority(sample)
    return [buffer.sample() for _ in range(3)]


@CASES.add("the rows of highest value", drives="TensorDictMaxValueWriter")
def _(d: str) -> Any:
    writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10, device=d), writer=writer, batch_size=6)
    buffer.extend(rows(d))
    return buffer[:]["next", "reward"].sort(0).values


@CASES.add("lanes", drives="LazyTensorStorage")
def _(d: str) -> Any:
    storage = LazyTensorStorage(60, device=d, ndim=2)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=3, traj_key="id"), batch_size=12)
    for first in (0, 5):
        steps = torch.arange(first, first + 5, device=d).expand(3, 5)
        lane = torch.arange(3, device=d)[:, None].expand(3, 5)
        buffer.extend(TensorDict({"x": steps.float(), "id": lane * 10 + first}, [3, 5]))
    return draws(buffer), buffer[:]


@CASES.add("lists", drives="ListStorage LazyStackStorage collate")
def _(d: str) -> Any:
    found = []
    for storage in (ListStorage(20), LazyStackStorage(20)):
        buffer = ReplayBuffer(storage=storage, batch_size=5)
        buffer.extend([TensorDict({"x": torch.full((2,), float(i), device=d)}, []) for i in range(7)])
        found.append(buffer.sample())
    return found


@CASES.add("from the device to files", drives="LazyMemmapStorage")
def _(d: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        storage = LazyMemmapStorage(100, scratch_dir=folder)
        buffer = ReplayBuffer(storage=storage, batch_size=8)
        buffer.extend(rows(d).cpu())
        return draws(buffer)


@CASES.add("saved and loaded", drives="ReplayBuffer")
def _(d: str) -> Any:
    def made() -> Any:
        return ReplayBuffer(
            storage=LazyTensorStorage(100, device=d, compact_obs=True),
            sampler=SliceSampler(slice_len=4, strict_length=False),
            batch_size=12,
        )

    first = filled(d, made(), compact=True)
    with tempfile.TemporaryDirectory() as folder:
        first.dumps(folder)
        second = made()
        second.loads(folder)
    third = made()
    third.load_state_dict(first.state_dict())
    return second[:], third[:], draws(second), draws(third)


@CASES.add("n-step returns", drives="MultiStepTransform MultiStep")
def _(d: str) -> Any:
    found = []
    for compact in (False, True):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(100, device=d, compact_obs=compact),
            transform=MultiStepTransform(n_steps=3, gamma=0.9),
            batch_size=20,
        )
        found.append(draws(filled(d, buffer, compact=compact)))
    return found, MultiStep(gamma=0.9, n_steps=3)(rows(d))


@CASES.add("hindsight goals", drives="HindsightTransform")
def _(d: str) -> Any:
    batch = rows(d)
    goal = torch.zeros(len(batch), 3, device=d)
    batch["observation"] = TensorDict(
        {
            "observation": batch["observation"],
            "achieved_goal": batch["observation"] * 1,
            "desired_goal": goal,
        },
        [len(batch)],
    )
    after = batch["next", "observation"]
    batch["next", "observation"] = TensorDict(
        {"observation": after, "achieved_goal": after * 1, "desired_goal": goal}, [len(batch)]
    )

    def reward(achieved: Tensor, desired: Tensor, info: Any) -> Tensor:
        return -(achieved != desired).any(-1).float()

    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100, device=d),
        transform=HindsightTransform(reward_fn=reward),
        batch_size=20,
    )
    buffer.extend(batch)
    return draws(buffer)


@CASES.add("frames stored once", drives="LazyTensorStorage FrameColumn")
def _(d: str) -> Any:
    frames = (torch.arange(30 * 16, device=d) * 7 % 251).byte().view(30, 4, 4)
    stacks = frames.unfold(0, 4, 1).permute(0, 3, 1, 2)
    done = (torch.arange(26, device=d) % 9 == 8)[:, None]
    data = {"observation": stacks[:-1][:26], "next": {"observation": stacks[1:][:26], "done": done}}
    storage = LazyTensorStorage(20, device=d, frame_stack={"observation": 4})
    buffer = ReplayBuffer(storage=storage, batch_size=8)
    for part in TensorDict(data, [26]).split(13):
        buffer.extend(part)
    return draws(buffer), buffer[:]


@CASES.add(
    "transforms of samples",
    drives="Compose SelectTransform ExcludeTransform RenameTransform ToTensorImage Resize NextObservationDelta "
    "NextStateReconstructor RandomCropTensorDict",
)
def _(d: str) -> Any:
    image = (torch.arange(48 * 36 * 3, device=d) * 11 % 255).byte().view(48, 6, 6, 3)
    batch = rows(d)[:48].set("pixels", image)
    transforms = [
        Compose(ToTensorImage(in_keys=["pixels"]), Resize(4, in_keys=["pixels"])),
        Compose(SelectTransform("pixels", "action"), RenameTransform(["action"], ["act"])),
        ExcludeTransform("pixels"),
    ]
    found: list[Any] = []
    for transform in transforms:
        buffer = ReplayBuffer(storage=LazyTensorStorage(100, device=d), transform=transform, batch_size=8)
        buffer.extend(batch)
        found.append(buffer.sample())
    delta = DeltaRows(as_vector_env(Sim(4, d)))
    batch = rollout(delta, lambda obs: obs[:, 2].long() % 4, num_steps=12, seed=0)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100, device=d), transform=NextObservationDelta(), batch_size=8
    )
    buffer.extend(batch)
    found.append(buffer.sample())
    found.append(NextStateReconstructor()(rows(d).exclude(("next", "observation"))))
    crop = RandomCropTensorDict(3, generator=torch.Generator().manual_seed(0))
    return found, crop(TensorDict({"x": torch.arange(20.0, device=d).view(4, 5)}, [4, 5]))


@CASES.add("an ensemble", drives="ReplayBufferEnsemble SamplerEnsemble StorageEnsemble WriterEnsemble")
def _(d: str) -> Any:
    members = [
        ReplayBuffer(
            storage=LazyTensorStorage(60, device=d), batch_size=6, sampler=PrioritizedSampler(60, 0.7, 0.5)
        )
        for _ in range(2)
    ]
    for number, member in enumerate(members):
        member.extend(rows(d, 8 + 4 * number))
    buffer = ReplayBufferEnsemble(*members, batch_size=12, p=[0.3, 0.7])
    sample, info = buffer.sample(return_info=True)
    return sample, info, draws(buffer)


@CASES.add("prefetched samples", drives="ReplayBuffer")
def _(d: str) -> Any:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, device=d), batch_size=8, prefetch=2)
    buffer.extend(rows(d))
    return buffer.sample().shape, sorted(buffer.sample().keys(True, True), key=str)


@CASES.add("between devices", drives="LazyTensorStorage")
def _(d: str) -> Any:
    on_cpu = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    on_device = ReplayBuffer(storage=LazyTensorStorage(100, device=d), batch_size=8)
    on_cpu.extend(rows(d))
    on_device.extend(rows("cpu"))
    return draws(on_cpu), draws(on_device)


@CASES.add("counts of states", drives="CountSampler StateCounter count_states first_of_state")
def _(d: str) -> Any:
    cells = TensorDict({"cell": torch.tensor([0] * 9 + [1, 2, 2], device=d)}, [12])
    sampler = CountSampler("cell")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, device=d), sampler=sampler, batch_size=5)
    buffer.extend(cells)
    counter = StateCounter("cell")
    counter.add(cells)
    return draws(buffer), counter.count(cells), count_states(cells, "cell"), first_of_state(cells, "cell")


@CASES.add(
    "maps of states",
    drives="TensorDictMap QueryModule SipHash HashToInt BinaryToDecimal",
)
def _(d: str) -> Any:
    values = TensorDictMap(
        query_module=QueryModule(in_keys=["cell"]), storage=LazyTensorStorage(10, device=d)
    )
    keys = TensorDict({"cell": torch.arange(3, device=d)}, [3])
    values[keys] = TensorDict({"total": torch.arange(3.0, device=d)}, [3])
    numbers = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=d)
    bits = torch.tensor([[1, 0, 1], [0, 1, 1]], device=d)
    decimal = BinaryToDecimal(3, device=d, dtype=torch.int64)
    return values[keys], values.contains(keys), SipHash()(numbers), HashToInt()(numbers), decimal(bits)


@CASES.add("a forest", drives="MCTSForest Tree")
def _(d: str) -> Any:
    forest = MCTSForest()
    forest.extend(rows(d))
    return len(forest)


for checkpointer in (
    FlatStorageCheckpointer,
    TensorStorageCheckpointer,
    NestedStorageCheckpointer,
    H5StorageCheckpointer,
):

    @CASES.add(checkpointer.__name__, drives=checkpointer.__name__)
    def _(d: str, checkpointer: Any = checkpointer) -> Any:
        def made() -> Any:
            storage = LazyTensorStorage(100, device=d)
            return ReplayBuffer(storage=storage, batch_size=8, checkpointer=checkpointer())

        first, second = made(), made()
        first.extend(rows(d))
        with tempfile.TemporaryDirectory() as folder:
            first.dumps(folder)
            second.loads(folder)
        return second[:]


@CASES.add("lists and ensembles, saved", drives="ListStorageCheckpointer StorageEnsembleCheckpointer")
def _(d: str) -> Any:
    def made() -> tuple[Any, Any]:
        items = ReplayBuffer(storage=ListStorage(20), batch_size=5)
        members = [ReplayBuffer(storage=LazyTensorStorage(60, device=d), batch_size=6) for _ in range(2)]
        return items, ReplayBufferEnsemble(*members, batch_size=12)

    items, ensemble = made()
    items.extend([TensorDict({"x": torch.full((2,), float(i), device=d)}, []) for i in range(7)])
    for number in range(2):
        ensemble[number].extend(rows(d))
    others = made()
    with tempfile.TemporaryDirectory() as folder:
        for number, (one, other) in enumerate(zip((items, ensemble), others, strict=True)):
            one.dumps(f"{folder}/{number}")
            other.loads(f"{folder}/{number}")
    return others[0].sample(), others[1].sample()


@CASES.add("from the device to a log on disk", drives="DiskStorage DiskStorageCheckpointer")
def _(d: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        storage = DiskStorage(100, folder)
        buffer = ReplayBuffer(storage=storage, batch_size=8)
        buffer.extend(rows(d))
        found = buffer[:]
        storage.close()
    return found


@CASES.add("a given tensor as the storage", drives="TensorStorage ImmutableDatasetWriter TensorColumn")
def _(d: str) -> Any:
    buffer = ReplayBuffer(
        storage=TensorStorage(rows(d), device=d), writer=ImmutableDatasetWriter(), batch_size=8
    )
    return draws(buffer)


@CASES.add("priorities of items", drives="PrioritizedReplayBuffer LinearScheduler")
def _(d: str) -> Any:
    buffer = PrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(50, device=d), batch_size=8
    )
    index = buffer.extend(rows(d)[:40])
    buffer.update_priority(index, torch.arange(1.0, 41.0, device=d))
    scheduler = LinearScheduler(buffer.sampler, "beta", 1.0, 10)
    scheduler.step()
    return draws(buffer)


@CASES.add("rows of another process", drives="BufferHandle")
def _(d: str) -> Any:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, device=d), batch_size=8)
    handle = buffer.handle()
    handle.extend(rows(d))
    return handle.sample()


@CASES.add("step by step", drives="StepWriter")
def _(d: str) -> Any:
    buffer = ReplayBuffer(storage=LazyTensorStorage(40, device=d), batch_size=8)
    with buffer.writer_for(2, window=2) as writer:
        for t in range(6):
            now = np.array([10.0 + t, 20.0 + t + 9 * (t > 3)])
            step = {"observation": now, ("next", "observation"): now + 1, ("next", "reward"): np.ones(2)}
            writer.write({**step, ("next", "terminated"): np.array([False, t == 3])})
        read = writer.read([1, 2], 0)
    return buffer[:], read


@CASES.add(
    "hashes and scores",
    drives="RandomProjectionHash TensorMap NodeMap DataMap Edges backup best_edges puct ucb",
)
def _(d: str) -> Any:
    hashed = RandomProjectionHash(n_components=4, init_method=lambda x: x.fill_(0.5)).to(d)
    words = hashed(torch.arange(30.0, device=d).view(3, 10))
    count, total = torch.zeros(4, dtype=torch.int64, device=d), torch.zeros(4, device=d)
    path = torch.tensor([2, 0], device=d)
    backup(path, 8.0, count=count, total=total, reward=torch.tensor([1.0, 2.0], device=d), gamma=0.5)
    parent = torch.tensor([5, 5, 4, 5], device=d)
    score = puct(total, count, torch.full((4,), 0.25, device=d), parent.float().long())
    forest = MCTSForest()
    moves = {"observation": torch.tensor([0, 0], device=d), "action": torch.tensor([1, 2], device=d)}
    forest.extend(TensorDict(moves | {"next": {"observation": torch.tensor([5, 6], device=d)}}, [2]))
    node = forest.node_map[TensorDict({"observation": torch.tensor(0, device=d)})]["_index"]
    known = forest.data_map[node]["next", "observation"]
    return words.isfinite().all(), count, total, score, best_edges(score, parent), node, known


@CASES.parametrized
def test_equal(name: str) -> None:
    CASES.check(name)
