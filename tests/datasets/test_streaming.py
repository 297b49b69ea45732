"""Episodes that are read one after the other and never stored."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from set_files import rlds
from tensordict import TensorDict

from flatroll.buffers import MultiStepTransform, RandomSampler
from flatroll.datasets import OpenXExperienceReplay, read_rlds
from flatroll.datasets.formats.openx import WINDOW, EpisodeStream
from flatroll.layout import audit

LENGTHS = (3, 2, 5, 4)


def open_set(lengths: tuple[int, ...] = LENGTHS, batch_size: int | None = None, **options: Any) -> Any:
    return OpenXExperienceReplay(
        "reach", batch_size, streaming=True, fetch=lambda *_: list(rlds(lengths)), **options
    )


def places(batch: Any) -> list[tuple[int, int]]:
    """Episode and step of each row: the observation of step t is t."""
    steps = batch["observation", "state"].view(-1).long().tolist()
    return list(zip(batch["collector", "traj_ids"].tolist(), steps, strict=True))


ALL = [(episode, step) for episode, length in enumerate(LENGTHS) for step in range(length)]


def test_whole_episodes_in_order() -> None:
    batches = list(open_set(shuffle=False))
    assert [len(batch) for batch in batches] == list(LENGTHS)
    assert [place for batch in batches for place in places(batch)] == ALL
    for batch, source in zip(batches, read_rlds(rlds(LENGTHS)), strict=True):
        assert bool((batch == source).all())


@pytest.mark.parametrize("size", [1, 3, 6, 14, 99])
def test_rows_in_order_each_once(size: int) -> None:
    data = open_set(batch_size=size, shuffle=False)
    for _ in range(2):  # each loop begins anew
        batches = list(data)
        assert [place for batch in batches for place in places(batch)] == ALL
        assert all(len(batch) == size for batch in batches[:-1]) and 0 < len(batches[-1]) <= size
    endless = [place for _ in range(9) for place in places(data.sample())]
    assert endless == (ALL * 99)[: 9 * size]


def test_slices_of_other_episodes() -> None:
    torch.manual_seed(0)
    for options in ({"num_slices": 2}, {"slice_len": 2}):
        seen = set()
        for _ in range(30):
            for batch in open_set(batch_size=4, **options):
                slices = batch.reshape(2, 2)
                for part in slices:
                    (first, start), (second, end) = places(part)
                    assert first == second and end == start + 1
                    assert part["is_init"].view(-1).tolist() == [True, False]
                    assert part["next", "done"].view(-1).tolist() == [False, True]
                    over = (first, end) == (0, 2)  # the only episode that terminates
                    assert part["next", "terminated"].view(-1).tolist() == [False, over]
                    assert part["next", "truncated"].view(-1).tolist() == [False, not over]
                    seen.add((first, start))
                assert len(set(batch["collector", "traj_ids"].tolist())) == 2
                assert not [found for found in audit(batch) if found.severity == "error"]
        assert seen == {(e, t) for e, length in enumerate(LENGTHS) for t in range(length - 1)}


def test_a_batch_size_alone_and_a_slice_length_alone() -> None:
    batches = list(open_set(batch_size=2))
    assert len(batches) == 4 and all(
        len(set(batch["collector", "traj_ids"].tolist())) == 1 for batch in batches
    )
    assert [len(batch) for batch in open_set(slice_len=2)] == [2] * 4
    assert sorted(len(batch) for batch in open_set(num_slices=3)) == sorted(LENGTHS)  # of what, no size says
    assert open_set(num_slices=2).sample(4).batch_size == (4,)
    # The last batch of a pass has the slices that are left.
    assert [len(batch) for batch in open_set((2, 2, 2), batch_size=4, slice_len=2)] == [4, 2]


def test_episodes_that_are_too_short() -> None:
    with pytest.raises(
        ValueError, match=r"episode 1 has 2 rows, but slices have 3: .*strict_length=False.*pad="
    ):
        list(open_set(slice_len=3, shuffle=False))
    short = list(open_set(slice_len=3, shuffle=False, strict_length=False))
    assert [len(batch) for batch in short] == [3, 2, 3, 3]
    for pad, value in [(True, 0.0), (7.5, 7.5)]:
        batch = list(open_set(slice_len=4, shuffle=False, pad=pad))[1]
        assert batch["collector", "mask"].tolist() == [True, True, False, False]
        assert batch["collector", "traj_ids"].tolist() == [1] * 4
        assert batch["observation", "state"].view(-1).tolist() == [0, 1, value, value]
        assert batch["next", "done"].view(-1).tolist() == [False, True, False, False]
        assert not batch["is_init"].view(-1)[2:].any()
    mixed = open_set(batch_size=12, slice_len=3, shuffle=False, pad=True).sample()  # padded and whole ones
    assert mixed["collector", "mask"].sum() == 11
    assert next(iter(open_set(slice_len=3, shuffle=False, pad=False)))["collector"].keys() == {"traj_ids"}


def test_shuffling_reads_each_episode_once_and_holds_few() -> None:
    alive = 0

    def episodes() -> Iterator[TensorDict]:
        nonlocal alive
        for number in range(60):
            alive = number
            ids = {"traj_ids": torch.full((2,), number)}
            yield TensorDict({"collector": ids}, [2])

    torch.manual_seed(1)
    stream = EpisodeStream(episodes)
    order, ahead = [], []
    for batch in stream.batches():
        order.append(int(batch["collector", "traj_ids"][0]))
        ahead.append(alive - len(order))
    assert sorted(order) == list(range(60)) != order and max(ahead) < WINDOW + 1
    again = [int(batch["collector", "traj_ids"][0]) for batch in stream.batches()]
    assert again != order
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    one, other = (
        [int(b["collector", "traj_ids"][0]) for b in EpisodeStream(episodes, generator=g).batches()]
        for g in generators
    )
    assert one == other


def test_an_iterator_is_fetched_again_for_each_pass() -> None:
    calls: list[str] = []

    def fetch(name: str, folder: Path) -> Any:
        calls.append(name)
        assert folder.is_dir()
        return rlds()

    data = OpenXExperienceReplay("reach", 2, streaming=True, fetch=fetch, shuffle=False)
    assert [len(batch) for batch in data] == [2, 2, 1] == [len(batch) for batch in data]
    assert calls == ["reach"] * 2


def test_transforms_collate_info_and_what_a_buffer_has() -> None:
    def double(batch: Any) -> Any:
        return batch.set("action", batch["action"] * 2)

    data = open_set(
        batch_size=3, shuffle=False, transform=double, collate_fn=lambda batch: batch.exclude("is_init")
    )
    batch, info = data.sample(return_info=True)
    assert batch["action"][:, 0].tolist() == [0, 2, 4] and "is_init" not in batch.keys(True) and info == {}
    assert len(data.sample(5)) == 5 and "stream" in repr(data)
    with pytest.raises(TypeError, match="no length"):
        len(data)
    with pytest.raises(ValueError, match="no folder: pass streaming=False"):
        data.preprocess(double)
    with pytest.raises(RuntimeError, match="immutable"):
        data.extend(batch)
    data = open_set(batch_size=3, transform=MultiStepTransform(3, 0.9))
    with pytest.raises(ValueError, match="a transform cannot read further rows"):
        data.sample()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"replacement": True}, "leave out replacement"),
        ({"sampler": RandomSampler()}, r"does not accept \['sampler'\]"),
        ({"download": True, "split_trajs": True}, r"does not accept \['download', 'split_trajs'\]"),
        ({"num_slices": 2, "slice_len": 2}, "not both"),
        ({"slice_len": 0}, "slice_len must be"),
    ],
)
def test_arguments_that_a_stream_cannot_take(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        open_set(batch_size=4, **options)


def test_sizes_that_do_not_fit_and_no_episodes() -> None:
    for options, text in [({"num_slices": 3}, "num_slices=3"), ({"slice_len": 3}, "slice_len=3")]:
        with pytest.raises(ValueError, match=f"batch_size=4 is not divisible by {text}"):
            open_set(batch_size=4, **options).sample()
    with pytest.raises(ValueError, match="has no episodes"):
        open_set((), batch_size=4).sample()
    assert list(open_set((), batch_size=4)) == []
    with pytest.raises(FileNotFoundError, match="pass fetch="):
        OpenXExperienceReplay("reach", streaming=True)
    data = open_set((2, 3), slice_len=3, shuffle=False)
    for _ in range(2):  # an error does not end the stream
        with pytest.raises(ValueError, match="episode 0 has 2 rows"):
            data.sample(3)


def test_a_lerobot_folder_is_streamed_too(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from flatroll import export as module

    source = torch.cat(list(read_rlds(rlds(LENGTHS))))
    module.export(source, tmp_path / "folder", "lerobot")
    data = OpenXExperienceReplay("reach", streaming=True, shuffle=False, fetch=lambda *_: tmp_path / "folder")
    assert [place for batch in data for place in places(batch)] == ALL


def test_pad_of_a_converted_set_is_a_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pad must be a bool.*got 2\.0"):
        OpenXExperienceReplay("reach", 2, root=tmp_path, pad=2.0)
