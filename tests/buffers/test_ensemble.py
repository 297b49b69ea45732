"""Several buffers sampled as one: which members, in which form, and back to them."""

import copy
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import interpolate

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NextStateReconstructor,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
    WriterEnsemble,
)
from flatroll.buffers.ensemble import collate_members
from flatroll.layout import run_ends


def member(number: int, rows: int, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), **options)
    if rows:
        buffer.extend(TensorDict({"n": torch.arange(rows) + 1000 * number}, [rows]))
    return buffer


def ensemble(*rows: int, **options: Any) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(*(member(i, n) for i, n in enumerate(rows)), **options)


def ids(sample: Any) -> Any:
    return sample["collector", "buffer_ids"]


# -- which members ---------------------------------------------------------------------------------------------


def test_rows_come_from_the_members_they_are_said_to_come_from() -> None:
    rb = ensemble(3, 5, 7, batch_size=12, generator=torch.Generator().manual_seed(0))
    seen: Counter[int] = Counter()
    for sample in itertools.islice(rb, 600):
        assert sample.batch_size == torch.Size([3, 4]) and ids(sample).dtype is torch.int64
        assert torch.equal(sample["n"] // 1000, ids(sample))
        seen.update(ids(sample)[:, 0].tolist())
    assert sum((c - 600) ** 2 / 600 for c in seen.values()) < 14  # 2 degrees of freedom
    assert len(rb) == 15


def test_probabilities() -> None:
    rb = ensemble(3, 5, 7, p=[1, 0, 3], num_buffer_sampled=2, generator=torch.Generator().manual_seed(0))
    seen = Counter(itertools.chain(*(ids(rb.sample(2)).flatten().tolist() for _ in range(1000))))
    assert set(seen) == {0, 2} and abs(seen[0] - 500) < 80
    rb.sampler.p = "sampleable"
    seen = Counter(itertools.chain(*(ids(rb.sample(2)).flatten().tolist() for _ in range(1500))))
    assert sum((seen[i] - 200 * n) ** 2 / (200 * n) for i, n in enumerate((3, 5, 7))) < 14
    rb.sampler.p = torch.tensor([0.0, 1.0, 0.0])
    assert set(ids(rb.sample(10)).flatten().tolist()) == {1}


def test_each_member_once() -> None:
    rb = ensemble(3, 5, 7, sample_from_all=True)
    assert all(ids(rb.sample(6))[:, 0].tolist() == [0, 1, 2] for _ in range(5))
    empty = ensemble(3, 0, p="sampleable", batch_size=4)
    assert (ids(empty.sample()) == 0).all()
    with pytest.raises(
        RuntimeError, match=r"member 1, which is empty: extend it with rb\[1\].extend\(batch\)"
    ):
        ensemble(3, 0, sample_from_all=True).sample(4)
    with pytest.raises(RuntimeError, match="all members are empty"):
        ensemble(0, 0, p="sampleable").sample(4)


def test_the_generator_makes_samples_repeat() -> None:
    """It is that of the members too, unless they have one of their own."""
    for seeded in (True, False):
        draws = []
        for _ in range(2):
            generator = torch.Generator().manual_seed(3) if seeded else None
            torch.manual_seed(3)
            rb = ensemble(30, 50, p=[1, 2], batch_size=8, generator=generator)
            draws.append(torch.stack([rb.sample()["n"] for _ in range(5)]))
            torch.rand(1)
        assert torch.equal(*draws)
    own = torch.Generator().manual_seed(1)
    rb = ReplayBufferEnsemble(member(0, 9, generator=own), member(1, 9), generator=torch.Generator())
    assert rb[0].generator is own and rb[1].generator is rb.generator


def test_passes_without_replacement_end_an_iteration() -> None:
    rb = ReplayBufferEnsemble(
        *(member(i, n, sampler=SamplerWithoutReplacement()) for i, n in enumerate((8, 4))),
        sample_from_all=True,
        batch_size=4,
    )
    samples = list(rb)
    assert len(samples) == 4  # member 1 begins a second pass meanwhile
    assert sorted(torch.cat([s["n"][0] for s in samples]).tolist()) == list(range(8))


# -- in which form ---------------------------------------------------------------------------------------------


def test_datasets_of_different_forms_are_composed(tmp_path: Any) -> None:
    """The example of the reference, with functions in place of torchvision's transforms."""

    def image(renamed: Any, size: int) -> Any:
        def transform(td: Any) -> Any:
            for key in ("pixels", ("next", "pixels")):
                pixels = td[key].movedim(-1, -3) / 255
                td.set(key, interpolate(pixels.flatten(0, -4), (size, size)))
            return td.rename_key_(renamed, "renamed")

        return transform

    def larger(td: Any) -> Any:
        pixels = interpolate(td["pixels"].flatten(0, 1), (33, 33))
        return td.set("pixels33", pixels.unflatten(0, td.batch_size))

    rb0 = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "0"), transform=image(("some", "key"), 32)
    )
    rb1 = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "1"), transform=image("another_key", 32)
    )
    rb = ReplayBufferEnsemble(rb0, rb1, p=[0.5, 0.5], transform=larger)
    for i, (size, key) in enumerate(((244, ("some", "key")), (64, "another_key"))):
        pixels = torch.randint(255, (10, size, size, 3))
        batch = TensorDict({"pixels": pixels, "next": {"pixels": pixels}}, [10])
        rb[i].extend(batch.set(key, torch.randn(10)))
    for _ in range(2):
        sample = rb.sample(10)
        assert sample["next", "pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels33"].shape == torch.Size([2, 5, 3, 33, 33])
        assert sample["renamed"].shape == sample["index"].shape == torch.Size([2, 5])


def test_slices_are_laid_end_to_end(world: Any) -> None:
    """Marks tell slices of one trajectory apart, across members too."""
    members = []
    for writer, length in enumerate((3, 9)):
        buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=4, fill=False))
        buffer.extend(world.to_batch(world.episode(writer, 0, length, end="")))
        members.append(buffer)
    rb = ReplayBufferEnsemble(*members, sample_from_all=True, stack=False, batch_size=16)
    for _ in range(20):
        sample, info = rb.sample(return_info=True)
        assert sample.batch_size == torch.Size([14])  # slices of 3 rows from member 0
        assert torch.equal(ids(sample), sample["observation"][:, 0].long())
        assert run_ends(sample).nonzero().flatten().tolist() == [2, 5, 9, 13]
        assert info["buffer_ids"].shape == info["index"].shape == (14,)
    with pytest.raises(
        ValueError, match=r"member 0 returns 6 rows, member 1 8 rows, .* stack=False concatenates them"
    ):
        ReplayBufferEnsemble(*members, sample_from_all=True).sample(16)


def test_transforms_know_where_members_end(world: Any) -> None:
    rb = ReplayBufferEnsemble(
        *(
            ReplayBuffer(
                storage=LazyTensorStorage(20),
                sampler=SliceSampler(slice_len=3, truncated_key=None),
                transform=lambda td: td.exclude(("next", "observation"), "is_init"),
            )
            for _ in range(2)
        ),
        sample_from_all=True,
        stack=False,
        transform=NextStateReconstructor(),
        batch_size=6,
    )
    for i in range(2):
        rb[i].extend(world.to_batch(world.episode(0, 0, 9, end="")))  # the same trajectory in both
    for _ in range(10):
        following = rb.sample()["next", "observation"]
        assert following.isnan().all(1).nonzero().flatten().tolist() == [2, 5]


def test_samples_of_other_kinds() -> None:
    tensors = [ReplayBuffer(storage=TensorStorage(torch.full((4, 2), float(i)))) for i in range(2)]
    rb = ReplayBufferEnsemble(*tensors, sample_from_all=True)
    sample, info = rb.sample(6, return_info=True)
    assert sample.shape == (2, 3, 2) and info["buffer_ids"].tolist() == [[0] * 3, [1] * 3]
    trees = [ReplayBuffer(storage=TensorStorage((torch.arange(4), torch.zeros(4, 2)))) for _ in range(2)]
    first, second = ReplayBufferEnsemble(*trees, stack=False).sample(6)
    assert first.shape == (6,) and second.shape == (6, 2)
    lists = [ReplayBuffer(storage=ListStorage(4)) for _ in range(2)]
    for i, buffer in enumerate(lists):
        buffer.extend([f"item of {i}"] * 3)
    rb = ReplayBufferEnsemble(*lists, sample_from_all=True, stack=False)
    assert rb.sample(4) == ["item of 0"] * 2 + ["item of 1"] * 2
    with pytest.raises(
        ValueError, match="member 0 returns a list of items, which cannot be stacked: stack=False"
    ):
        ReplayBufferEnsemble(*lists, sample_from_all=True).sample(4)
    collated = ReplayBufferEnsemble(*lists, sample_from_all=True, collate_fn=lambda parts: parts[::-1])
    assert collated.sample(2) == [["item of 1"], ["item of 0"]]


def test_samples_that_differ_name_members_and_entries() -> None:
    def of(**entries: Any) -> ReplayBuffer:
        return ReplayBuffer(storage=TensorStorage(TensorDict(entries, [4])))

    first = of(a=torch.zeros(4), b=torch.zeros(4, 2))
    for other, text in (
        (of(a=torch.zeros(4)), "member 0 returns the entry 'b' and member 1 does not"),
        (
            of(a=torch.zeros(4), b=torch.zeros(4, 2), c=torch.zeros(4)),
            "member 1 returns the entry 'c' and member 0",
        ),
        (
            of(a=torch.zeros(4), b=torch.zeros(4, 3)),
            r"the entry 'b' as torch.float32 \[2, 2\], member 1 as torch.fl",
        ),
        (
            of(a=torch.zeros(4).long(), b=torch.zeros(4, 2)),
            r"'a' as torch.float32 \[2\], member 1 as torch.int64",
        ),
    ):
        for stack in (True, False):
            with pytest.raises(ValueError, match=text):
                ReplayBufferEnsemble(first, other, sample_from_all=True, stack=stack).sample(4)


# -- back to the members ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [True, False])
def test_priorities_go_back_to_their_members(stack: bool) -> None:
    members = [
        PrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(4)) for _ in range(2)
    ]
    rb = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=40, stack=stack)
    for i in range(2):
        rb[i].extend(TensorDict({"n": torch.arange(4) + 10 * i}, [4]))
    for _ in range(3):
        sample, info = rb.sample(return_info=True)
        wanted = torch.isin(sample["n"], torch.tensor([1, 12])).float()
        rb.update_priority(
            info["index"], wanted, buffer_ids=info["buffer_ids"], generation=info["index_generation"]
        )
    rb.update_priority(torch.tensor([0, 3]), 0.0, buffer_ids=torch.tensor([0, 1]))
    assert {*rb.sample()["n"].flatten().tolist()} == {1, 12}


def test_a_sample_takes_its_priorities_back() -> None:
    def made(number: int, inner: bool) -> ReplayBuffer:
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(4), batch_size=20
        )
        n = torch.arange(4) + 10 * number
        buffer.extend(
            TensorDict({"n": n[:, None].expand(4, 3).clone()}, [4, 3]) if inner else TensorDict({"n": n}, [4])
        )
        return buffer

    for inner, stack, flat in (
        (False, True, False),
        (False, True, True),
        (False, False, False),
        (True, True, False),
    ):
        rb = ReplayBufferEnsemble(
            made(0, inner), made(1, inner), sample_from_all=True, batch_size=80, stack=stack
        )
        for _ in range(3):
            sample = rb.sample()
            sample = sample.reshape(-1) if flat else sample
            sample["td_error"] = torch.isin(sample["n"], torch.tensor([1, 12])).float()
            rb.update_tensordict_priority(sample)
        assert {*rb.sample()["n"].flatten().tolist()} == {1, 12}


def test_members_without_priorities_are_passed_over() -> None:
    demonstrations = TensorDictReplayBuffer(
        storage=TensorStorage(TensorDict({"n": torch.arange(5)}, [5])),
        transform=lambda td: td.set("priority_weight", torch.ones(len(td))),
    )
    fresh = TensorDictReplayBuffer(
        storage=LazyTensorStorage(9),
        sampler=PrioritizedSampler(9, 1.0, 1.0),
        transform=lambda td: td.exclude("index_generation"),
    )
    fresh.extend(TensorDict({"n": torch.arange(5) + 10}, [5]))
    rb = ReplayBufferEnsemble(demonstrations, fresh, sample_from_all=True, batch_size=20)
    sample, info = rb.sample(return_info=True)
    assert set(info) == {"index", "buffer_ids"}
    rb.update_tensordict_priority(sample.set("td_error", (sample["n"] == 11).float()))
    rb.update_priority(info["index"], 1.0, buffer_ids=info["buffer_ids"])
    plain = ensemble(3, 4, batch_size=4)
    sample, info = plain.sample(return_info=True)
    with pytest.raises(TypeError, match="no member has priorities"):
        plain.update_priority(info["index"], 1.0, buffer_ids=info["buffer_ids"])
    nameless = ReplayBufferEnsemble(PrioritizedReplayBuffer(alpha=1, beta=1, storage=LazyTensorStorage(3)))
    nameless[0].extend(TensorDict({"n": torch.arange(3)}, [3]))
    with pytest.raises(TypeError, match="member 0 is a PrioritizedReplayBuffer, whose samples have no index"):
        nameless.update_tensordict_priority(nameless.sample(2))


def test_members_are_written_to_one_by_one() -> None:
    rb = ensemble(3, 5, batch_size=4)
    with pytest.raises(
        RuntimeError, match=r"its 2 members for new data: extend one of them, rb\[0\].extend\(batch\)"
    ):
        rb.extend(TensorDict({"n": torch.zeros(3)}, [3]))
    with pytest.raises(RuntimeError, match="extend one of them"):
        rb.add(TensorDict({"n": torch.zeros(())}, []))
    rb[1].extend(TensorDict({"n": torch.arange(2)}, [2]))
    assert len(rb) == 10 and [len(buffer) for buffer in rb[:]] == [3, 7] and rb[-1] is rb[1]
    with pytest.raises(TypeError, match=r"indexed by member, rb\[0\], and a member by row"):
        rb["n"]  # type: ignore[call-overload]
    stats = rb.stats()
    assert stats["buffers"] == 2 and stats["rows"] == 10 and stats["bytes"] == 2 * 100 * 8
    rb.empty()
    assert len(rb) == 0


def test_a_state_goes_on() -> None:
    rb = ensemble(30, 50, p=[1, 2], batch_size=8, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        rb.sample()
    other = ensemble(0, 0, p=[1, 2], batch_size=8, generator=torch.Generator())
    other.load_state_dict(copy.deepcopy(rb.state_dict()))
    for _ in range(5):
        assert bool((rb.sample() == other.sample()).all())
    with pytest.raises(ValueError, match="the state has 2 members, not 1"):
        ensemble(0, generator=torch.Generator()).load_state_dict(rb.state_dict())
    with pytest.raises(ValueError, match="saved with a generator and this ensemble has none"):
        ensemble(0, 0).load_state_dict(rb.state_dict())


def test_an_ensemble_of_parts() -> None:
    storages = StorageEnsemble(
        *(TensorStorage(TensorDict({"n": torch.arange(4) + 10 * i}, [4])) for i in range(2)),
        transforms=[None, lambda td: td.set("n", -td["n"])],
    )
    samplers = SamplerEnsemble(RandomSampler(), SamplerWithoutReplacement(), sample_from_all=True)
    writers = WriterEnsemble(RoundRobinWriter(), RoundRobinWriter())
    rb = ReplayBufferEnsemble(storages=storages, samplers=samplers, writers=writers, batch_size=8)
    sample = rb.sample()
    assert sorted(sample["n"][1].tolist()) == [-13, -12, -11, -10] and (sample["n"][0] >= 0).all()
    assert (rb.storage, rb.sampler, rb.writer) == (storages, samplers, writers)
    assert len(storages) == 2 and storages[1] is rb[1].storage and list(writers) == writers[:]
    assert storages.max_size == 8 and storages.nbytes == 64
    assert repr(samplers) == "SamplerEnsemble(RandomSampler, SamplerWithoutReplacement)"


def test_arguments_that_do_not_fit() -> None:
    one, two = member(0, 3), member(1, 3)
    for wrong in ([0.5], [1.0, -1.0], [0.0, 0.0], [float("nan"), 1.0], "size"):
        with pytest.raises(ValueError, match="p must "):
            ReplayBufferEnsemble(one, two, p=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sample_from_all=True takes each member once"):
        ReplayBufferEnsemble(one, two, p=[1, 1], sample_from_all=True)
    with pytest.raises(ValueError, match="num_buffer_sampled must be an integer of at least 1, got 0"):
        ReplayBufferEnsemble(one, two, num_buffer_sampled=0)
    for size in (0, 5, True, 2.0):
        with pytest.raises(ValueError, match="batch_size must be a positive multiple of the 2 members"):
            ReplayBufferEnsemble(one, two).sample(size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive multiple of the 2 members"):
        ReplayBufferEnsemble(one, two, batch_size=3)
    with pytest.raises(ValueError, match="batch_size must be given"):
        ReplayBufferEnsemble(one, two).sample()
    with pytest.raises(TypeError, match="members must be ReplayBuffers, got LazyTensorStorage"):
        ReplayBufferEnsemble(one, one.storage)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass the members, or storages, samplers and writers, not both"):
        ReplayBufferEnsemble(one, storages=StorageEnsemble(one.storage))
    with pytest.raises(TypeError, match="needs members, or storages="):
        ReplayBufferEnsemble()
    storages = StorageEnsemble(LazyTensorStorage(3))
    with pytest.raises(ValueError, match="samplers has 2 members, storages has 1"):
        ReplayBufferEnsemble(storages=storages, samplers=SamplerEnsemble(RandomSampler(), RandomSampler()))
    with pytest.raises(TypeError, match="must be passed to SamplerEnsemble"):
        ReplayBufferEnsemble(storages=storages, samplers=SamplerEnsemble(RandomSampler()), p=[1.0])
    with pytest.raises(ValueError, match="transforms must have one entry per storage, got 0"):
        StorageEnsemble(LazyTensorStorage(3), transforms=[])
    with pytest.raises(TypeError, match=r"transform must have forward\(td\) or be a function of td, got int"):
        ReplayBufferEnsemble(one, transform=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="WriterEnsemble needs at least one member"):
        WriterEnsemble()


def test_members_are_picked_by_their_numbers() -> None:
    members = [ReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(3)]
    rb = ReplayBufferEnsemble(*members)
    for several in ([0, 2], range(0, 3, 2), torch.tensor([0, 2]), np.array([-3, -1]), slice(0, 3, 2)):
        assert [buffer is members[i] for buffer, i in zip(rb[several], (0, 2), strict=True)] == [True, True]
        for parts in (rb.storage, rb.sampler, rb.writer):
            assert parts[several] == [parts[0], parts[2]]
    assert rb[torch.tensor(1)] is members[1] and rb.sampler[-1] is members[2].sampler
    for wrong in (1.0, "a", True, [0, 1.5], (0, slice(3)), torch.tensor([0.5]), torch.tensor([True])):
        with pytest.raises(TypeError, match=r"indexed by member, rb\[0\]"):
            rb[wrong]  # type: ignore[call-overload]
    for wrong in (3, [0, -4]):
        with pytest.raises(IndexError, match="has 3 members, got index"):
            rb.storage[wrong]


def test_the_choice_of_members_may_be_set_later() -> None:
    members = [ReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(3)]
    for i, member in enumerate(members):
        member.extend(torch.full((4,), i))
    rb = ReplayBufferEnsemble(*members, batch_size=6)
    rb.sampler.p, rb.sampler.num_buffer_sampled = [0, 1, 0], 2
    assert rb.sample().tolist() == [[1, 1, 1], [1, 1, 1]]
    rb.sampler.num_buffer_sampled = None
    assert rb.sample().shape == (3, 2)
    with pytest.raises(ValueError, match="num_buffer_sampled must be an integer of at least 1"):
        rb.sampler.num_buffer_sampled = 0
    everyone = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True)
    for name, value in (("p", [1, 2]), ("num_buffer_sampled", 3)):
        with pytest.raises(TypeError, match="sample_from_all=True takes each member once"):
            setattr(everyone, name, value)


def test_samples_on_two_devices_name_both() -> None:
    parts = [TensorDict({"x": torch.zeros(2, device=device)}, [2]) for device in ("cpu", "meta")]
    with pytest.raises(ValueError, match=r"member 0 returns the entry 'x' on cpu, member 3 on meta"):
        collate_members(parts, members=[0, 3], stack=True)
