"""``track_envs=True``: each row names its env, and counts that env's rows over all of its episodes."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from scripted_pool import ScriptedPool
from split_envs import Part, parts
from tensordict import TensorDict

from flatroll.layout.boundaries import goes_on_in_env
from flatroll.layout.keys import ENV, ENV_STEP, ID_BITS
from flatroll.rollouts import Collector, MultiCollector
from flatroll.wrappers import StepCounter
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, make_scripted

MODES = ("NextStep", "SameStep", "Disabled")
SCRIPT = Script(3, lengths=[[3, 1, 5], [2, 4], [7]], ends=["terminated", "truncated", "both"])


def rows_of_envs(batches: list[TensorDict]) -> dict[int, list[int]]:
    """The numbers of the rows of each env that stands in their observations."""
    found = defaultdict(list)
    for batch in batches:
        for env, step in zip(batch["observation"][:, 0].tolist(), batch[ENV_STEP].tolist(), strict=True):
            found[int(env)].append(step)
    return dict(found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 4, 10, 60])
def test_rows_of_an_env_are_numbered_one_by_one_in_any_windows(mode: Any, rows: int) -> None:
    env = StepCounter(make_scripted(SCRIPT, autoreset_mode=mode))
    collector = Collector(env, None, frames_per_batch=rows, total_frames=60, track_envs=True)
    batches = list(collector)
    for batch in batches:
        assert batch[ENV].tolist() == batch["observation"][:, 0].long().tolist()
        assert batch[ENV].dtype is batch[ENV_STEP].dtype is torch.int64
        assert batch[ENV].shape == batch[ENV_STEP].shape == (len(batch),)
        assert collector.spec.problem(batch) is None
    for steps in rows_of_envs(batches).values():
        assert steps == list(range(len(steps)))


def test_the_next_row_goes_on_where_it_is_the_next_step_of_the_env() -> None:
    env = make_scripted(SCRIPT, autoreset_mode="SameStep")
    batch = next(Collector(env, None, frames_per_batch=15, track_envs=True))
    assert goes_on_in_env(batch).int().tolist() == [1, 1, 1, 1, 0] * 3
    assert not goes_on_in_env(batch[::2]).any()


def test_envs_in_torch_and_the_writers_bits() -> None:
    env = ScriptedTorchEnv(Script(3, lengths=[[3, 1, 5], [2, 4], [7]]))
    batch = next(Collector(env, None, frames_per_batch=6, track_envs=True, writer=5))
    assert (batch[ENV] - (5 << ID_BITS)).tolist() == [0, 0, 1, 1, 2, 2]
    assert batch[ENV_STEP].tolist() == [0, 1] * 3


@pytest.mark.parametrize("mode", MODES)
def test_envs_in_turn_are_numbered_as_one_pool(mode: Any) -> None:
    options: Any = {"frames_per_batch": 13, "track_envs": True}
    whole = Collector(Part(autoreset_mode=mode), None, **options)
    split = Collector(parts(0, 2, autoreset_mode=mode), None, splits=2, **options)
    for _ in range(4):
        one, other = next(whole), next(split)
        assert torch.equal(one[ENV], other[ENV])
        assert torch.equal(one[ENV_STEP], other[ENV_STEP])


def test_an_async_pool() -> None:
    collector = Collector(ScriptedPool(5, 2), None, frames_per_batch=11, track_envs=True)
    batches = [next(collector) for _ in range(5)]
    for batch in batches:
        assert batch[ENV].tolist() == (batch["collector", "traj_ids"] % 5).tolist()
        assert batch[ENV].diff().ge(0).all()
    for env in range(5):
        steps = torch.cat([batch[ENV_STEP][batch[ENV] == env] for batch in batches])
        assert steps.tolist() == list(range(len(steps)))


def test_whole_trajectories_keep_their_numbers() -> None:
    collector = Collector(
        make_scripted(SCRIPT), None, frames_per_batch=20, total_frames=60, trajs_per_batch=2, track_envs=True
    )
    found = rows_of_envs(list(collector))
    assert {env: sorted(steps) for env, steps in found.items()} == {
        env: list(range(len(steps))) for env, steps in found.items()
    }


def test_after_a_reset_or_a_resume_no_row_follows_an_earlier_one() -> None:
    collector = Collector(make_scripted(SCRIPT), None, frames_per_batch=10, track_envs=True)
    first = next(collector)
    collector.reset()
    second = next(collector)
    resumed = Collector(make_scripted(SCRIPT), None, frames_per_batch=10, track_envs=True)
    resumed.load_state_dict(collector.state_dict())
    third = next(resumed)
    highest = [int(batch[ENV_STEP].max()) for batch in (first, second)]
    assert int(second[ENV_STEP].min()) > highest[0] + 1
    assert int(third[ENV_STEP].min()) > highest[1] + 1


def test_workers_have_envs_of_their_own() -> None:
    options: Any = {"num_workers": 2, "sync": True, "frames_per_batch": 12, "total_frames": 24}
    with MultiCollector(lambda: make_scripted(SCRIPT), None, track_envs=True, **options) as collector:
        batches = list(collector)
    for batch in batches:
        assert torch.equal(batch[ENV] >> ID_BITS, batch["collector", "traj_ids"] >> ID_BITS)
        assert len(batch[ENV].unique()) == 6


def test_it_needs_the_ids_and_its_columns_for_itself() -> None:
    env = make_scripted(SCRIPT)
    with pytest.raises(ValueError, match="track_envs=True needs track_traj_ids=True"):
        Collector(env, None, frames_per_batch=4, track_envs=True, track_traj_ids=False)
    with pytest.raises(TypeError, match="track_envs must be True or False"):
        Collector(env, None, frames_per_batch=4, track_envs="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two parts write the same column"):
        Collector(StepCounter(env, step_count_key=ENV), None, frames_per_batch=4, track_envs=True)
    with pytest.raises(KeyError, match="track_envs=True"):
        goes_on_in_env(next(Collector(env, None, frames_per_batch=4)))
