"""What samples are made of and how they are marked."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, RandomSampler, ReplayBuffer, SliceSampler
from flatroll.buffers.samplers.slices import _mark, _mark_on_device
from flatroll.layout import audit, run_ends


def filled(batch: TensorDict, batch_size: int | None, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(**options),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(batch)
    return buffer


def flags(sample: Any, *names: str) -> list[str]:
    """Per row, the first letters of the flags that are set."""
    columns = [sample[name] if name == "is_init" else sample["next", name] for name in names]
    return ["".join(n[:2] for n, c in zip(names, columns, strict=True) if c[i]) for i in range(len(sample))]


ALL = ("is_init", "terminated", "truncated", "done")


@pytest.mark.parametrize(
    ("end", "last"),
    [("terminated", "tedo"), ("truncated", "trdo"), ("", "trdo")],
    ids=["terminated", "truncated", "open"],
)
def test_slices_are_marked_at_both_ends(world: Any, end: str, last: str) -> None:
    steps = world.episode(0, 0, 3, end)
    sample = filled(world.to_batch(steps), 6, slice_len=3).sample()
    assert flags(sample, *ALL) == ["is", "", last] * 2


def test_a_slice_in_the_middle_is_cut_not_terminated(world: Any) -> None:
    buffer = filled(world.to_batch(world.episode(0, 0, 50, "terminated")), 8, slice_len=4)
    sample = buffer.sample()
    assert not sample["is_init"][:, 0].equal(sample["step_count"][:, 0] == 0)
    assert flags(sample, *ALL) == ["is", "", "", "trdo"] * 2


@pytest.mark.parametrize("there", [(True, True), (True, False), (False, True)])
def test_marks_are_the_same_on_every_device(there: tuple[bool, bool], generator: torch.Generator) -> None:
    """The compiled marks of host memory and those in torch, here both on the host."""
    for _ in range(50):
        lasts = torch.cat([torch.rand(29, generator=generator) < 0.3, torch.tensor([True])]).nonzero()[:, 0]
        firsts = torch.cat([torch.tensor([0]), lasts[:-1] + 1])
        before = [torch.rand(30, 1, generator=generator) < 0.4 for _ in range(4)]
        results = []
        for form in (_mark, _mark_on_device):
            init, *ends = (flag.clone() for flag in before)
            form((init if there[0] else None, *(ends if there[1] else [None] * 3)), firsts, lasts)
            results.append(torch.cat([init, *ends]))
        assert torch.equal(*results)


def test_init_key_none_leaves_what_the_env_said(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 50))
    sample = filled(batch, 8, slice_len=4, init_key=None).sample()
    assert torch.equal(sample["is_init"], sample["step_count"] == 0)
    assert flags(sample, "done") == ["", "", "", "do"] * 2
    assert "is_init" not in filled(batch.exclude("is_init"), 8, slice_len=4, init_key=None).sample()


def test_a_slice_of_one_row_is_both_first_and_last(world: Any) -> None:
    sample = filled(world.to_batch(world.episode(0, 0, 9)), 4, slice_len=1).sample()
    assert flags(sample, *ALL) == ["istrdo"] * 4


def test_stored_flags_inside_a_slice_stay(world: Any) -> None:
    """Windows marked truncated by the collector (set_truncated), stored by id alone: the marks are not erased."""
    batch = world.to_batch(world.episode(0, 0, 6, ""))
    batch["next", "truncated"][2] = True  # not done: the run continues
    batch["is_init"][:] = False
    sample = filled(batch, 6, slice_len=6).sample()
    assert flags(sample, *ALL) == ["is", "", "tr", "", "", "trdo"]


def test_truncated_key_none_leaves_what_the_env_said(world: Any) -> None:
    sample = filled(world.to_batch(world.episode(0, 0, 50)), 8, slice_len=4, truncated_key=None).sample()
    assert set(flags(sample, "truncated", "done")) <= {"", "trdo"}
    assert torch.equal(sample["next", "done"], sample["step_count"] == 49)
    assert flags(sample, "is_init") == ["is", "", "", ""] * 2


def test_marks_are_written_whether_or_not_the_batch_had_them() -> None:
    """One schema: a batch of ids alone gives samples with is_init, done, terminated and truncated."""
    batch = TensorDict({"x": torch.arange(20), "collector": {"traj_ids": torch.arange(20) // 10}}, [20])
    sample = filled(batch, 8, slice_len=4).sample()
    assert flags(sample, *ALL) == ["is", "", "", "trdo"] * 2
    assert sample["is_init"].shape == sample["next", "truncated"].shape == (8, 1)


def test_done_without_terminated_counts_as_terminated_unless_truncated() -> None:
    done = (torch.arange(20) % 10 == 9)[:, None]
    batch = TensorDict({"next": {"done": done}}, [20])
    assert flags(filled(batch, 10, slice_len=10).sample(), *ALL) == ["is"] + [""] * 8 + ["tedo"]
    batch = TensorDict({"next": {"done": done[:, 0], "truncated": done[:, 0]}}, [20])
    assert flags(filled(batch, 10, slice_len=10).sample(), *ALL) == ["is"] + [""] * 8 + ["trdo"]


def test_short_trajectories_give_shorter_slices(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 3) + world.episode(0, 1, 20))
    buffer = filled(batch, 40, num_slices=4, fill=False)  # slices of 10
    sizes = set()
    for _ in range(20):
        sample = buffer.sample()
        lengths = run_ends(sample).nonzero()[:, 0].diff(prepend=torch.tensor([-1])).tolist()
        assert set(lengths) <= {3, 10} and len(lengths) == 4
        sizes.add(len(sample))
    assert len(sizes) > 2
    strict = filled(batch, 40, num_slices=4, strict_length=True)
    assert {len(strict.sample()) for _ in range(20)} == {40}


@pytest.mark.parametrize("compact", [False, True])
def test_padding_repeats_the_last_row_and_is_always_masked(world: Any, compact: bool) -> None:
    short, long = world.episode(0, 0, 3, "terminated"), world.episode(1, 0, 9)
    for steps, full in ((short, False), (long, True)):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(100, compact_obs=compact),
            sampler=SliceSampler(slice_len=5, pad_output=True),
            batch_size=10,
        )
        buffer.extend(world.to_batch(steps))
        sample = buffer.sample().reshape(2, 5)
        mask = sample["collector", "mask"]
        assert mask.tolist() == [[True] * 5] * 2 if full else [[True] * 3 + [False] * 2] * 2
        assert torch.equal(sample["next", "observation"], sample["observation"] + torch.tensor([0, 0, 1]))
        if not full:
            assert sample["step_count"][..., 0].tolist() == [[0, 1, 2, 2, 2]] * 2
            assert flags(sample[0], *ALL)[:3] == ["is", "", "tedo"]


def test_keys_are_probed_in_order(world: Any) -> None:
    """("collector", "traj_ids"), then "episode", then done."""
    alike = TensorDict({"x": torch.arange(30)}, [30])
    ids, episode = torch.arange(30) // 15, torch.arange(30) // 10
    done = (torch.arange(30) % 5 == 4)[:, None]
    for columns, longest in (
        ({"collector": {"traj_ids": ids}, "episode": episode}, 15),
        ({"episode": episode}, 10),
        ({"next": {"done": done}}, 5),
    ):
        index = filled(alike.clone().update(TensorDict(columns, [30])), 4, slice_len=2).index
        assert index is not None and index.longest == longest
    named = alike.clone().update(TensorDict({"lane": episode, "over": done}, [30]))
    for options, longest in (({"traj_key": "lane"}, 10), ({"end_key": "over"}, 5)):
        index = filled(named, 4, slice_len=2, **options).index
        assert index is not None and index.longest == longest


def test_both_numbers_may_be_given(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 40))
    assert len(filled(batch, 24, num_slices=4, slice_len=6).sample()) == 24
    assert len(filled(batch, None, num_slices=4, slice_len=6).sample()) == 24
    with pytest.raises(ValueError, match="num_slices=4 times slice_len=6 is not batch_size=48"):
        filled(batch, 24, num_slices=4, slice_len=6).sample(48)


def test_cache_values_changes_nothing(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 40))
    first, second = (filled(batch, 24, slice_len=6, cache_values=flag).sample() for flag in (False, True))
    assert bool((first == second).all())


def test_by_start_and_by_trajectory_differ_as_said(world: Any) -> None:
    batch = world.to_batch(world.episode(0, 0, 4) + world.episode(1, 0, 40))
    share = {}
    for by in ("trajectory", "start"):
        buffer = filled(batch, 4, slice_len=4, by=by)
        drawn = [bool(buffer.sample()["observation"][0, 0] == 0) for _ in range(400)]
        share[by] = sum(drawn) / 400
    assert 0.4 < share["trajectory"] < 0.6
    assert share["start"] < 0.08  # 1 of 38


def test_bad_arguments_are_refused(world: Any) -> None:
    with pytest.raises(TypeError, match="SliceSampler needs num_slices or slice_len"):
        SliceSampler()
    with pytest.raises(ValueError, match="slice_len must be an integer of at least 1, got 0"):
        SliceSampler(slice_len=0)
    with pytest.raises(ValueError, match=r"num_slices must be an integer of at least 1, got 2\.0"):
        SliceSampler(num_slices=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="by must be 'trajectory' or 'start', got 'row'"):
        SliceSampler(slice_len=2, by="row")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pad_output=True needs strict_length=False"):
        SliceSampler(slice_len=2, pad_output=True, strict_length=True)
    with pytest.raises(ValueError, match="batch_size=10 is not divisible by slice_len=3"):
        ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=3), batch_size=10)
    batch = world.to_batch(world.episode(0, 0, 7))
    with pytest.raises(ValueError, match="batch_size must be given"):
        filled(batch, None, slice_len=3).sample()
    with pytest.raises(RuntimeError, match=r"no stored trajectory has 8 consecutive rows, the longest has 7"):
        filled(batch, 8, slice_len=8, strict_length=True).sample()
    with pytest.raises(KeyError, match=r"batch has no entry 'lane'"):
        filled(batch, 8, slice_len=8, traj_key="lane")
    with pytest.raises(KeyError, match="InitTracker"):
        filled(TensorDict({"x": torch.zeros(5)}, [5]), 4, slice_len=2)
    with pytest.raises(TypeError, match=r"truncated.*must be bool, got torch.float32"):
        filled(batch.clone().set(("next", "truncated"), torch.zeros(7, 1)), 8, slice_len=8)


@pytest.mark.parametrize("compact", [False, True])
def test_random_rows_are_runs_of_their_own(world: Any, compact: bool) -> None:
    """Two rows of one trajectory side by side, even in order, are no transition: nothing may bootstrap across."""
    batch = world.to_batch(world.episode(0, 0, 30) + world.episode(0, 1, 9, "terminated"))
    for stored in (batch, batch.exclude("is_init")):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(100, compact_obs=compact),
            sampler=RandomSampler(),
            batch_size=64,
            generator=torch.Generator().manual_seed(0),
        )
        buffer.extend(stored)
        sample, info = buffer.sample(return_info=True)
        assert sample["is_init"].shape == (64, 1) and bool(sample["is_init"].all())
        assert bool(run_ends(sample).all())
        assert [str(f) for f in audit(sample) if f.severity == "error"] == []
        kept = buffer[info["index"]]
        for key in set(kept.keys(True, True)) - {"is_init"}:
            assert torch.equal(sample[key], kept[key])
        if stored is batch:
            assert torch.equal(kept["is_init"], kept["step_count"] == 0)  # stored flags are left alone


def test_random_rows_without_any_marker_are_left_as_they_are() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
    buffer.extend(TensorDict({"x": torch.arange(9)}, [9]))
    assert set(buffer.sample().keys()) == {"x"}


@pytest.mark.parametrize("truncated_key", [("next", "truncated"), None])
def test_padding_of_an_episode_of_one_row_is_not_is_init(world: Any, truncated_key: Any) -> None:
    """The repeated row is the first of its episode, its copies begin nothing."""
    batch = world.to_batch(world.episode(0, 0, 1, "terminated"))
    for stored in (batch, batch.clone().set("is_init", batch["is_init"][:, 0])):
        buffer = filled(stored, 8, slice_len=4, pad_output=True, truncated_key=truncated_key)
        sample = buffer.sample()
        assert sample["collector", "mask"].tolist() == [True, False, False, False] * 2
        assert sample["is_init"].flatten().tolist() == [True, False, False, False] * 2
        errors = [f.rule for f in audit(sample) if f.severity == "error"]
        assert errors == ([] if stored is batch else ["shape"])  # audit wants is_init as [N, 1]
