"""A buffer of any kind, saved and loaded, goes on as if it had never stopped: some of all combinations."""

from pathlib import Path

import pytest
from resume_product import CHECKPOINTERS, SAMPLERS, STORAGES, WRITERS, batch, check

from flatroll.buffers import LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, Sampler

ORDERED = [name for name in STORAGES if name not in ("list", "stack")]


@pytest.mark.parametrize("number", range(len(ORDERED)))
def test_every_storage_with_some_sampler_and_checkpointer(number: int, tmp_path: Path) -> None:
    """``python -m resume_product`` (in tests/support) goes through all."""
    sampler, checkpointer = (list(kinds)[number % len(kinds)] for kinds in (SAMPLERS, CHECKPOINTERS))
    assert check(ORDERED[number], sampler, "round robin", checkpointer, tmp_path)


@pytest.mark.parametrize(
    ("storage", "sampler", "writer"),
    [
        ("Tensor plain", "random", "best"),
        ("Tensor zstd frames", "once", "best"),
        ("list", "prioritized", "round robin"),
        ("stack", "once", "tensordict"),
    ],
)
def test_writers_and_items(storage: str, sampler: str, writer: str, tmp_path: Path) -> None:
    assert writer in WRITERS and check(storage, sampler, writer, "default", tmp_path)


def made(sampler: Sampler) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(48), sampler=sampler, batch_size=8)


def test_the_newest_policy_version_is_saved_and_no_other_one_stays(tmp_path: Path) -> None:
    buffer, used = made(RandomSampler(max_policy_lag=1)), made(RandomSampler(max_policy_lag=1))
    buffer.extend(batch(0, 40))  # versions 0 and 1
    used.extend(batch(200, 30))  # versions 10 and 11: rows as old as the other buffer's would never be drawn
    used.sample()
    buffer.dumps(tmp_path / "seen")
    used.loads(tmp_path / "seen")
    assert int(used.sample()["row"].max()) < 40
    buffer.sampler.policy_version = 2  # told by a learner: no row has it yet
    buffer.dumps(tmp_path / "told")
    used.loads(tmp_path / "told")
    assert used.sampler.policy_version == 2 and int(used.sample()["row"].min()) >= 20


def test_rows_listed_as_fresh_are_forgotten_by_a_load(tmp_path: Path) -> None:
    """Also where the loaded rows have the same numbers and the same newest version."""
    buffer, used = (
        made(PrioritizedSampler(48, 0.7, 0.5, max_policy_lag=0)),
        made(PrioritizedSampler(48, 0.7, 0.5, max_policy_lag=0)),
    )
    rows = batch(0, 40)
    used.extend(rows)
    used.sample()
    rows["collector", "policy_version"] = 1 - rows["collector", "policy_version"]
    buffer.extend(rows)
    buffer.dumps(tmp_path)
    used.loads(tmp_path)
    assert int(used.sample()["row"].max()) < 20


def test_a_state_of_another_sampler_says_what_to_do(tmp_path: Path) -> None:
    buffer, other = made(RandomSampler()), made(PrioritizedSampler(48, 0.7, 0.5))
    buffer.extend(batch(0, 10))
    buffer.dumps(tmp_path)
    with pytest.raises(ValueError, match=r"another kind, this buffer has a PrioritizedSampler: load it into"):
        other.loads(tmp_path)
    buffer.dumps(tmp_path)
    like = made(RandomSampler())
    like.loads(tmp_path)
    other.extend(like.oldest_first())  # as the text says
    assert len(other) == 10 and other.sample().batch_size[0] == 8
