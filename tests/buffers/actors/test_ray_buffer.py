"""A buffer in an actor does what a buffer of this process does; Ray is replaced by a fake with the same calls."""

from functools import partial

import pytest
import torch
from fake_ray import FakeRay
from tensordict import TensorDict

from flatroll.buffers import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomCropTensorDict,
    RayReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from flatroll.sharing import WorkerTraceback

storage = partial(LazyTensorStorage, 10)


def rows(count, first=0):
    numbers = torch.arange(first, first + count)
    return TensorDict({"observation": numbers, "half": numbers.to(torch.bfloat16)}, [count])


def remote(**options):
    fake = options.pop("calls", None) or FakeRay()
    return RayReplayBuffer(storage=storage, calls=fake, **options)


def test_it_stores_and_gives_what_a_buffer_here_does():
    for there, here in [
        (remote(seed=0, batch_size=4), ReplayBuffer(storage=storage(), batch_size=4, generator=seeded())),
        (
            remote(seed=0, sampler=partial(PrioritizedSampler, 10, 0.5, 0.5)),
            ReplayBuffer(storage=storage(), sampler=PrioritizedSampler(10, 0.5, 0.5), generator=seeded()),
        ),
        (
            remote(seed=0, sampler=SamplerWithoutReplacement, buffer_cls=TensorDictReplayBuffer),
            TensorDictReplayBuffer(
                storage=storage(), sampler=SamplerWithoutReplacement(), generator=seeded()
            ),
        ),
    ]:
        for number in range(3):
            assert torch.equal(there.extend(rows(5, 5 * number)), here.extend(rows(5, 5 * number)))
        assert there.add(rows(1, 99)[0]) == here.add(rows(1, 99)[0])
        assert len(there) == len(here) == 10
        for _ in range(2):
            (sample, info), (own, own_info) = (buffer.sample(3, return_info=True) for buffer in (there, here))
            assert (sample == own).all() and sample["half"].dtype is torch.bfloat16
            assert info.keys() == own_info.keys()
            assert torch.equal(info["index"], own_info["index"])
            if isinstance(here.sampler, PrioritizedSampler):
                for buffer in (there, here):
                    buffer.update_priority(info["index"], torch.tensor([1.0, 2.0, 3.0]))
        assert (there[:] == here[:]).all() and there.stats() == here.stats()
        there.empty()
        assert len(there) == 0


def seeded():
    return torch.Generator().manual_seed(0)


def test_samples_are_kept_under_way_and_are_memory_of_their_own():
    fake = FakeRay()
    buffer = remote(batch_size=4, prefetch=3, calls=fake)
    buffer.extend(rows(10))
    first = buffer.sample()
    assert len(fake.actors[0].calls) + sum(reference.done for reference in buffer._under_way) == 3
    first["observation"].zero_()  # the fake's arrays are read-only, as those of the object store
    live = len(fake.live)
    for _, sample in zip(range(50), buffer, strict=False):
        assert len(sample) == 4
    assert len(fake.live) == live
    assert buffer.sample(2).shape == (2,)  # another size is drawn at once
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()


def test_errors_come_with_type_text_and_traceback():
    buffer = remote()
    buffer.extend(rows(3))
    with pytest.raises(ValueError, match="batch_size") as caught:
        buffer.sample()
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert "replay_buffer.py" in str(caught.value.__cause__)
    assert caught.value.__notes__ == ["raised in the replay buffer's actor"]
    with pytest.raises(TypeError, match="entry 'names' is of type"):
        buffer.extend(TensorDict({"names": "here"}, [3]))


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (
            {"storage": storage()},
            TypeError,
            r"storage must be a function that makes one in the actor, such as partial",
        ),
        ({"transform": RandomCropTensorDict(2)}, TypeError, "transform must be a function that makes one"),
        ({"prefetch": 2}, ValueError, "prefetch needs a batch_size"),
        ({"remote_config": {"max_restarts": -1}}, ValueError, "must leave max_restarts at 0"),
        ({"sampler": partial(PrioritizedSampler, 10, -1, 0.5)}, ValueError, "alpha"),
    ],
    ids=["storage", "transform", "prefetch", "restarts", "made there"],
)
def test_wrong_arguments_are_refused(wrong, error, text):
    fake = FakeRay()
    with pytest.raises(error, match=text):
        RayReplayBuffer(**{"storage": storage, "calls": fake, **wrong})
    assert all(actor.dead for actor in fake.actors)


def test_shutdown_ends_the_actor_once():
    fake = FakeRay()
    with remote(calls=fake) as buffer:
        buffer.extend(rows(3))
        assert "in an actor" in repr(buffer)
    buffer.shutdown()
    assert fake.actors[0].dead and "closed" in repr(buffer)
    for call in (buffer.sample, buffer.__len__, partial(buffer.extend_reference, None)):
        with pytest.raises(RuntimeError, match="the buffer is closed"):
            call()


def test_a_state_goes_on_with_the_same_samples():
    first = remote(seed=3, batch_size=4)
    first.extend(rows(10))
    first.sample()
    state = first.state_dict()
    second = remote(batch_size=4, seed=5)
    second.load_state_dict(state)
    assert (first.sample() == second.sample()).all()
