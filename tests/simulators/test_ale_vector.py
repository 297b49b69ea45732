"""ale-py's own vector env, every row against single emulators with the same seeds and actions."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("ale_py")
import ale_py  # pyright: ignore[reportMissingImports]
from atari_single import SCREEN, SingleAtari, play_singles
from traces import Counts
from zoo import count_wrong

from flatroll.layout import audit
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import StepCounter, as_vector_env
from flatroll.wrappers.testing import check_vector_env

gym.register_envs(ale_py)
ENVS = 2
STEPS = 400
SEED = 3
MODES = ("NextStep", "SameStep")
SMALL: Any = {"img_height": 20, "img_width": 20}


def make(mode: str = "NextStep", num_envs: int = ENVS, **options: Any) -> Any:
    given = {"noop_max": 0, "reward_clipping": False, "repeat_action_probability": 0.0, **options}
    return gym.make_vec(
        "ALE/Breakout-v5",
        num_envs=num_envs,
        vectorization_mode="vector_entry_point",
        autoreset_mode=mode,
        **given,
    )


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sticky actions": {"sticky": 0.25},
    "500 frames": {"most_frames": 500, "sticky": 0.25},
    "life_loss_info": {"lives_end": True},
}
NAMES = {
    "sticky": "repeat_action_probability",
    "most_frames": "max_num_frames_per_episode",
    "lives_end": "life_loss_info",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_single_emulators(case: str, mode: str, report: Any) -> None:
    chosen = CASES[case]
    if chosen.get("lives_end") and mode == "NextStep":
        pytest.skip("refused, see below")
    options = {NAMES[name]: value for name, value in chosen.items()}
    height, width = SCREEN
    env = report.start(lambda: make(mode, img_height=height, img_width=width, **options))
    batch: Any = rollout(env, num_steps=STEPS, seed=SEED)
    env.close()
    # A lost life is followed by the same game, which audit suspects to be a reset.
    found = {finding.rule for finding in audit(batch)}
    assert found <= ({"reset_as_next"} if chosen.get("lives_end") else set())
    assert ("collector", "next_known") not in batch.keys(True)

    of_envs = batch.reshape(ENVS, -1)
    games = [SingleAtari("breakout", **chosen) for _ in range(ENVS)]
    expected = play_singles(games, SEED, of_envs["action"].numpy())
    wrong = sum(count_wrong(of_envs[number], rows) for number, rows in enumerate(expected))
    ends = int(batch["next", "done"].sum())
    report.add(f"AtariVectorEnv, Breakout, {case}, {mode}", "ale-py", mode, Counts(len(batch), wrong, ends))
    assert len(batch) == ENVS * STEPS
    assert wrong == 0
    assert ends >= 2


@pytest.mark.parametrize("mode", MODES)
def test_the_contract_kit(mode: str) -> None:
    check_vector_env(make(mode, max_num_frames_per_episode=150, noop_max=5, **SMALL), steps=100)


def test_a_later_env_does_not_change_the_mode_of_an_earlier_one() -> None:
    """All of them write it into the metadata of Gymnasium's base class."""
    first, second = make("SameStep", **SMALL), make("NextStep", **SMALL)
    assert first.metadata is second.metadata
    assert as_vector_env(first).metadata["autoreset_mode"].value == "SameStep"
    assert as_vector_env(second).metadata["autoreset_mode"].value == "NextStep"
    with pytest.raises(ValueError, match=r"'NextStep' is not what AtariVectorEnv does, .* 'SameStep'"):
        as_vector_env(first, autoreset_mode="NextStep")


def test_life_loss_info_is_refused_under_next_step() -> None:
    """The step after a lost life is one of the same game, and would be dropped as a reset."""
    with pytest.raises(ValueError, match=r"ended an episode of env \d and then gone on .*'SameStep'"):
        rollout(make("NextStep", life_loss_info=True, **SMALL), num_steps=200, seed=SEED)


def test_lost_lives_end_no_game_under_same_step() -> None:
    batch: Any = rollout(make("SameStep", 1, life_loss_info=True, **SMALL), num_steps=200, seed=SEED)
    goes_on = (batch["observation"][1:] == batch["next", "observation"][:-1]).flatten(1).all(1)
    ends = batch["next", "terminated"].flatten()[:-1]
    assert int(ends.sum()) >= 4
    assert int((~goes_on).sum()) <= int(ends.sum()) - 3
    assert batch["is_init"].flatten()[1:].equal(ends)


def test_episodic_life_begins_a_new_game() -> None:
    batch: Any = rollout(
        make("NextStep", 1, episodic_life=True, **SMALL), num_steps=200, seed=SEED, info_keys=["lives"]
    )
    assert batch["lives"][batch["is_init"].flatten()].tolist() == [5] * int(batch["is_init"].sum())
    assert batch["next", "lives"][batch["next", "done"].flatten()].unique().tolist() == [4]


@pytest.mark.parametrize("adapt", [as_vector_env, lambda env: Collector(env, frames_per_batch=4)])
def test_async_is_refused(adapt: Any) -> None:
    with pytest.raises(ValueError, match=r"in async mode \(batch_size=1 of num_envs=2\)"):
        adapt(make(batch_size=1, **SMALL))


def test_lives_at_an_end() -> None:
    """Under SAME_STEP info has those of the next game."""
    options = {"max_num_frames_per_episode": 300, **SMALL}
    batch: Any = rollout(make("NextStep", **options), num_steps=90, seed=SEED, info_keys=["lives"])
    assert int(batch["next", "lives"][batch["next", "done"].flatten()].max()) < 5
    with pytest.raises(ValueError, match=r"'lives' of an episode's last step is unknown"):
        rollout(make("SameStep", **options), num_steps=90, seed=SEED, info_keys=["lives"])


def test_final_obs_has_no_row_that_was_not_written() -> None:
    env = as_vector_env(make("SameStep", 3, episodic_life=True, noop_max=30, **SMALL))
    env.reset(seed=SEED)
    env.action_space.seed(SEED)
    partly = 0
    for _ in range(150):
        obs, _, terminated, truncated, info = env.step(env.action_space.sample())
        ended = terminated | truncated
        if ended.any() and not ended.all():
            partly += 1
            assert np.array_equal(info["final_obs"][~ended], obs[~ended])
    assert partly > 0


def test_frames_not_steps_limit_an_episode() -> None:
    """Those of the reset, such as no-ops, do not count."""
    options = {"max_num_frames_per_episode": 100, "noop_max": 30, **SMALL}
    batch: Any = rollout(make("NextStep", 1, **options), num_steps=60, seed=SEED)
    ends = batch["next", "truncated"].flatten().nonzero().flatten()
    assert ends.tolist()[:2] == [24, 49]
    with pytest.raises(ValueError, match=r"set the limit in the env, max_num_frames_per_episode=\.\.\."):
        StepCounter(make(**SMALL), max_steps=5)


def test_a_list_of_seeds() -> None:
    env, other = (as_vector_env(make(noop_max=30, **SMALL)) for _ in range(2))
    given: Any = [5, 6]
    assert np.array_equal(env.reset(seed=given)[0], other.reset(seed=5)[0])
    torch.testing.assert_close(env.step([0, 1])[0], other.step([0, 1])[0])
