"""Random crops of whole trajectories."""

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from flatroll.buffers import LazyTensorStorage, RandomCropTensorDict, ReplayBuffer


def trajectories(count: int, length: int) -> TensorDict:
    """Step t of trajectory b: observation [b, t], is_init at step 0, done at the last."""
    step = torch.arange(length).expand(count, length)
    where = torch.stack([torch.arange(count)[:, None].expand(count, length), step], -1)
    done = (step == length - 1).unsqueeze(-1)
    following = {"observation": (where + torch.tensor([0, 1])).float(), "done": done}
    root = {
        "observation": where.float(),
        "pixels": where.to(torch.uint16),
        "is_init": (step == 0).unsqueeze(-1),
    }
    return TensorDict({**root, "next": following, "collector": {"mask": step < length}}, [count, length])


@pytest.fixture
def starts_of(generator: torch.Generator) -> Any:
    def starts_of(transform: RandomCropTensorDict, batch: TensorDict) -> torch.Tensor:
        transform.generator = generator
        return transform(batch)["observation"][:, 0, 1].long()

    return starts_of


def test_crops_are_consecutive_steps_of_one_trajectory(generator: torch.Generator) -> None:
    batch = trajectories(50, 9)
    crop = RandomCropTensorDict(4, generator=generator)(batch)
    assert crop.batch_size == crop["next"].batch_size == torch.Size([50, 4])
    start = crop["observation"][:, :1, 1:]
    expected = torch.cat(
        [torch.arange(50.0).view(-1, 1, 1).expand(50, 4, 1), start + torch.arange(4.0)[:, None]], -1
    )
    assert torch.equal(crop["observation"], expected)
    assert torch.equal(crop["next", "observation"], expected + torch.tensor([0, 1]))
    assert torch.equal(crop["pixels"].long(), expected.long()) and crop["pixels"].dtype == torch.uint16
    assert torch.equal(crop["next", "done"].squeeze(-1), expected[..., 1] == 8)  # the env's words, no more
    assert crop["is_init"].shape == (50, 4, 1)
    assert crop["is_init"][:, 0].all() and not crop["is_init"][:, 1:].any()
    assert torch.equal(batch["is_init"], trajectories(50, 9)["is_init"])  # the batch is left alone


def test_every_start_is_drawn_alike_the_last_one_too(starts_of: Any) -> None:
    """The last start is drawn, too."""
    starts = starts_of(RandomCropTensorDict(5), trajectories(3000, 7)).bincount()
    assert len(starts) == 3
    assert ((starts - 1000) ** 2 / 1000).sum() < 14  # chi-square, 2 degrees: one in 1000


def test_starts_are_independent(starts_of: Any) -> None:
    assert len(starts_of(RandomCropTensorDict(2), trajectories(60, 10)).unique()) == 9


def test_a_crop_may_be_the_whole_trajectory() -> None:
    batch = trajectories(3, 7)
    crop = RandomCropTensorDict(7)(batch)
    assert all(torch.equal(crop[key], batch[key]) for key in batch.keys(True, True))


def test_only_real_steps_are_cropped(starts_of: Any) -> None:
    batch = trajectories(4000, 8)
    lengths = torch.arange(4000) % 4 + 5
    batch["collector", "mask"] = torch.arange(8) < lengths[:, None]
    starts = starts_of(RandomCropTensorDict(5, mask_key=("collector", "mask")), batch)
    for length in (5, 6, 7, 8):
        drawn = starts[lengths == length].bincount()
        assert len(drawn) == length - 4
        expected = 1000 / len(drawn)
        assert ((drawn - expected) ** 2 / expected).sum() < 17


@pytest.mark.parametrize(("shape", "dim"), [((6, 4, 9), -1), ((6, 9, 4), 1), ((9, 6, 4), 0), ((9,), 0)])
def test_time_may_be_any_dimension(shape: tuple[int, ...], dim: int) -> None:
    numbers = (
        torch.arange(9).view([-1 if i == dim % len(shape) else 1 for i in range(len(shape))]).expand(shape)
    )
    other = torch.randn(shape).unsqueeze(-1) * 0 + torch.arange(3)
    batch = TensorDict({"step": numbers, "x": other + numbers.unsqueeze(-1), "is_init": numbers == 0}, shape)
    crop = RandomCropTensorDict(4, sample_dim=dim)(batch)
    step = crop["step"].movedim(dim, 0)
    assert crop["step"].shape == crop.batch_size and crop.batch_size[dim] == 4
    assert torch.equal(step - step[0], torch.arange(4).view(-1, *[1] * (len(shape) - 1)).expand(step.shape))
    assert torch.equal(crop["x"], crop["step"].unsqueeze(-1) + torch.arange(3.0))
    assert crop["is_init"].movedim(dim, 0)[0].all() and not crop["is_init"].movedim(dim, 0)[1:].any()


def test_the_generator_decides() -> None:
    def crop() -> torch.Tensor:
        transform = RandomCropTensorDict(3, generator=torch.Generator().manual_seed(5))
        return transform(trajectories(20, 9))["observation"]

    assert torch.equal(crop(), crop())


def test_buffers_of_whole_trajectories() -> None:
    transform = RandomCropTensorDict(4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=transform, batch_size=32)
    buffer.extend(trajectories(6, 9).select("observation"))
    sample = buffer.sample()
    assert sample.batch_size == torch.Size([32, 4])
    steps = sample["observation"] - sample["observation"][:, :1]
    assert torch.equal(steps[..., 1], torch.arange(4.0).expand(32, 4)) and not steps[..., 0].any()
    assert buffer[2].batch_size == torch.Size([4]) and buffer[2]["observation"][:, 0].unique().tolist() == [2]


def test_sampled_trajectories_keep_their_markers() -> None:
    transform = RandomCropTensorDict(4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=transform, batch_size=32)
    buffer.extend(trajectories(6, 9))
    sample = buffer.sample()
    assert sample["is_init"][:, 0].all() and not sample["is_init"][:, 1:].any()
    assert torch.equal(sample["next", "done"].squeeze(-1), sample["observation"][..., 1] == 8)


def test_errors_name_the_lengths() -> None:
    batch = trajectories(3, 7)
    with pytest.raises(ValueError, match=r"sub_seq_len=8 is longer than the 7 steps of the batch"):
        RandomCropTensorDict(8)(batch)
    batch["collector", "mask"][1, 3:] = False
    masked = RandomCropTensorDict(4, mask_key=("collector", "mask"))
    with pytest.raises(
        ValueError, match="sub_seq_len=4 is longer than the shortest trajectory, which has 3 real"
    ):
        masked(batch)
    batch["collector", "mask"][1, 5] = True
    with pytest.raises(ValueError, match=r"\('collector', 'mask'\)\] must be True first and then False"):
        masked(batch)
    with pytest.raises(KeyError, match="no entry 'mask'"):
        RandomCropTensorDict(4, mask_key="mask")(batch)
    with pytest.raises(TypeError, match=r"is_init.*must be bool"):
        RandomCropTensorDict(4)(batch.set("is_init", batch["is_init"].int()))
    with pytest.raises(ValueError, match=r"sample_dim=2 is not a dimension of a batch \[3, 7\]"):
        RandomCropTensorDict(4, sample_dim=2)(batch)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="sub_seq_len must be an integer of at least 1, got"):
            RandomCropTensorDict(wrong)  # type: ignore[arg-type]
    notes = NonTensorStack(*(NonTensorStack(*map(str, range(7))) for _ in range(3)))
    with pytest.raises(TypeError, match=r"batch\['note'\] is not a tensor"):
        RandomCropTensorDict(4)(trajectories(3, 7).set("note", notes))
    buffer = ReplayBuffer(storage=LazyTensorStorage(30), transform=RandomCropTensorDict(2), batch_size=4)
    buffer.extend(trajectories(3, 7).exclude("collector").reshape(-1))
    with pytest.raises(
        ValueError, match=r"needs samples \[\*B, T\] of whole trajectories, got \[4\].*SliceSampler"
    ):
        buffer.sample()
