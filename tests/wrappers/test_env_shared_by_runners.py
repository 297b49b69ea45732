"""An env that another user has moved since: no collector may join rows that do not follow one another."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import Script, make_scripted

SCRIPT = Script(2, lengths=[[5, 7], [6, 4]])
#: Whoever goes on with an env that was moved says so once.
TOLD = pytest.mark.filterwarnings("ignore:.*was stepped or reset by another collector")
MODES = pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
#: An error that says so would do, and so would a batch that begins anew.
WAY_OUT = "another|in between|moved|as_vector_env|reset"

Move = Callable[[Any], Any]


def scripted(mode: str = "SameStep") -> Any:
    return make_scripted(SCRIPT, autoreset_mode=mode)


def impossible(batch: TensorDict) -> int:
    """Rows that do not lead from (env, episode, step) to (env, episode, step + 1)."""
    now, later = batch["observation"], batch["next", "observation"]
    return int((later - now != torch.tensor([0.0, 0.0, 1.0])).any(-1).sum())


def impossible_or_refused(collector: Collector) -> int:
    """The impossible rows of the next batch; none if it is refused in words."""
    try:
        return impossible(next(collector))
    except (RuntimeError, ValueError) as error:
        assert any(word in str(error) for word in WAY_OUT.split("|")), error
        return 0


def step_all(env: Any) -> None:
    env.reset()
    env.step(np.zeros(SCRIPT.num_envs, np.int64))


def reset_one(env: Any) -> None:
    env.reset(options={"reset_mask": np.array([True, False])})


@TOLD
@MODES
@pytest.mark.parametrize(
    "move",
    [
        lambda env: rollout(env, num_steps=3),
        lambda env: as_vector_env(env).reset(),
        lambda env: step_all(as_vector_env(env)),
        lambda env: next(other(env)),
    ],
    ids=["a rollout", "a reset", "a step", "another collector"],
)
def test_rows_are_true_after_somebody_else_has_moved_the_env(mode: str, move: Move) -> None:
    env = scripted(mode)
    collector = Collector(env, frames_per_batch=6)
    assert impossible(next(collector)) == 0
    move(env)
    assert impossible_or_refused(collector) == 0


@MODES
@pytest.mark.parametrize("move", [lambda env: env.reset(), step_all, reset_one])
def test_rows_are_true_after_the_bare_env_was_moved_by_hand_and_the_collector_reset(
    mode: str, move: Move
) -> None:
    env = scripted(mode)
    collector = Collector(env, frames_per_batch=6)
    assert impossible(next(collector)) == 0
    move(env)
    collector.reset()
    batch = next(collector)
    assert impossible(batch) == 0 and batch["is_init"][0] and batch["observation"][0, 2] == 0


def other(env: Any) -> Collector:
    return Collector(env, frames_per_batch=2, writer=1)


@TOLD
@MODES
def test_rows_are_true_where_the_env_was_adapted_once_for_all(mode: str) -> None:
    env = as_vector_env(scripted(mode))
    collector = Collector(env, frames_per_batch=6)
    next(collector)
    reset_one(env)
    assert impossible_or_refused(collector) == 0


@TOLD
def test_two_collectors_that_take_turns_on_one_env_give_true_rows() -> None:
    env = scripted()
    collectors = Collector(env, frames_per_batch=6), Collector(env, frames_per_batch=6, writer=1)
    assert [impossible_or_refused(collectors[turn % 2]) for turn in range(6)] == [0] * 6


@MODES
def test_one_collector_alone_gives_true_rows(mode: str) -> None:
    collector = Collector(scripted(mode), frames_per_batch=6)
    assert [impossible(next(collector)) for _ in range(6)] == [0] * 6


@TOLD
@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_collectors_rollouts_and_resets_gives_an_impossible_row(seed: int) -> None:
    """The property: who is refused begins anew with a reset of its own, and all rows are steps of the script."""
    choose = random.Random(seed)
    envs = [scripted(), scripted()]
    handles = [as_vector_env(env) for env in envs]
    collectors = [Collector(env, frames_per_batch=4, writer=i) for env in envs for i in range(2)]
    found = 0
    for _ in range(40):
        move = choose.choice(["collect", "collect", "rollout", "reset", "step"])
        which = choose.randrange(2)
        if move == "collect":
            found += impossible_or_refused(choose.choice(collectors))
        elif move == "rollout":
            found += impossible(rollout(envs[which], num_steps=choose.randint(1, 4)))
        else:
            (step_all if move == "step" else lambda env: env.reset())(handles[which])
    assert found == 0


# --- two writers with one number on one buffer --------------------------------------------------------------


def impossible_slices(sample: TensorDict) -> int:
    """Rows that are not the step after the row before, though the sample says that they go on."""
    seen, first = sample["observation"], sample["is_init"].squeeze(-1)
    jumps = (seen[1:] - seen[:-1] != torch.tensor([0.0, 0.0, 1.0])).any(-1)
    return int((jumps & ~first[1:]).sum())


@pytest.mark.parametrize("compact", [False, True])
def test_slices_of_two_collectors_with_one_number_are_true(compact: bool) -> None:
    """Refused with ``writer=`` in the words, or cut."""
    sampler = SliceSampler(slice_len=4, strict_length=False)
    storage = LazyTensorStorage(1000, compact_obs=compact)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, generator=torch.Generator().manual_seed(0))
    scripts = Script(2, lengths=9), Script(2, lengths=[[4, 6], [5, 8]])
    one, two = (Collector(make_scripted(s, autoreset_mode="SameStep"), frames_per_batch=4) for s in scripts)
    for collector in [one, two] * 15:
        try:
            buffer.extend(next(collector))
        except ValueError as error:
            assert "writer=" in str(error)
            return
    assert sum(impossible_slices(buffer.sample(64)) for _ in range(10)) == 0
