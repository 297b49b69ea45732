"""`step_mdp`, against the peer's where it is installed."""

import itertools

import pytest
import torch
from tensordict import TensorDict

from flatroll.layout import run_ends, step_mdp
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import StepCounter
from flatroll.wrappers.testing import Script, make_scripted

FLAGS = ("keep_other", "exclude_reward", "exclude_done", "exclude_action")


def row():
    number = iter(range(100))

    def values(*shape):
        return torch.full((4, *shape), next(number))

    agents = {"obs": values(2), "action": values(), "memo": values(3)}
    after = {"obs": values(2), "reward": values(), "done": values()}
    root = {
        "observation": values(3),
        "action": values(),
        "done": values(),
        "reward": values(),
        "extra": values(),
    }
    following = {
        "observation": values(3),
        "reward": values(),
        "done": values(),
        "agents": after,
        "deep": {"x": values()},
    }
    return TensorDict({**root, "agents": agents, "next": following}, [4])


@pytest.mark.parametrize("flags", list(itertools.product([True, False], repeat=4)))
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {
            "reward_keys": ["reward", ("agents", "reward")],
            "done_keys": [("agents", "done"), "done"],
            "action_keys": ["action", ("agents", "action")],
        },
    ],
    ids=["plain", "nested"],
)
def test_it_is_the_peers(flags, keys):
    peer = pytest.importorskip("torchrl.envs.utils").step_mdp
    options = {**dict(zip(FLAGS, flags, strict=True)), **keys}
    before = row()
    ours, theirs = step_mdp(before, **options), peer(row(), **options)
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    assert (ours == theirs).all()
    assert (before == row()).all() and set(before.keys(True)) == set(row().keys(True))
    target = TensorDict({"kept": torch.zeros(4)}, [4])
    assert step_mdp(before, target, **options) is target
    assert set(target.keys(True, True)) == {"kept", *ours.keys(True, True)}


def test_rows_of_a_collector_become_the_rows_after_them():
    env = make_scripted(Script(2, lengths=[3, 5]), autoreset_mode="SameStep", backend="native")
    batch = rollout(StepCounter(env), num_steps=9)
    ahead, inside = step_mdp(batch), ~run_ends(batch)
    after = batch[1:][inside[:-1]]
    for key in ("observation", "is_init", "step_count", ("collector", "traj_ids")):
        assert torch.equal(ahead[inside][key], after[key]), key
    assert not {"action", "reward", "next"} & set(ahead.keys())


def test_what_has_no_next_observation_is_refused():
    env = make_scripted(Script(2), autoreset_mode="SameStep", backend="native")
    compact = next(Collector(env, frames_per_batch=8, compact_obs=True))
    with pytest.raises(KeyError, match="a compact batch comes with"):
        step_mdp(compact)
    with pytest.raises(KeyError, match="no entry 'next'"):
        step_mdp(TensorDict({"observation": torch.zeros(3)}, [3]))
