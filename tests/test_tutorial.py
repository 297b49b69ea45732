"""The tutorial on memory-efficient training, Knobs 1 to 4, with its imports changed: names and printed results hold."""

import gymnasium as gym
import pytest
import torch
from memory_tutorial import collect, env_maker, sample_of
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE
from flatroll.wrappers import NextObservationDelta


def env_maker_delta() -> NextObservationDelta:
    return NextObservationDelta(gym.make("CartPole-v1"))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def data() -> TensorDict:
    return collect(env_maker)


@pytest.fixture(scope="module")
def compact_data() -> TensorDict:
    return collect(env_maker, compact_obs=True)


@pytest.fixture(scope="module")
def delta_data() -> TensorDict:
    return collect(env_maker_delta)


@pytest.fixture
def sample(compact_data: TensorDict) -> TensorDict:
    return sample_of(compact_data)


def columns(batch: TensorDict) -> set[object]:
    return set(batch.keys(True, True))


def test_the_problem(data: TensorDict) -> None:
    for key in ("observation", ("next", "observation")):
        column = data.get(key)
        assert column.numel() * column.element_size() == 3200


def test_knob_1_compact_obs(data: TensorDict, compact_data: TensorDict) -> None:
    assert data.bytes() - compact_data.bytes() == 3200
    assert columns(data) - columns(compact_data) == {("next", "observation")}
    assert columns(compact_data) <= columns(data)
    kept = {("next", "reward"), ("next", "done"), ("next", "truncated")}
    assert kept <= columns(compact_data)


def test_knob_2_next_state_reconstructor(sample: TensorDict) -> None:
    assert len(sample) == 40
    following = sample["next", "observation"]
    rows = following.isnan().any(-1).nonzero(as_tuple=True)[0].tolist()
    assert rows == [19, 39]
    traj = sample["collector", "traj_ids"]
    done = sample["next", "done"].squeeze(-1)
    boundary = torch.cat([traj[1:] != traj[:-1], torch.tensor([True])]) | done
    assert boundary.nonzero(as_tuple=True)[0].tolist() == rows
    assert torch.equal(following[:19], sample["observation"][1:20])
    flags = ("done", "observation", "reward", "terminated", "truncated")
    expected = ["('collector', 'traj_ids')", *(f"('next', '{name}')" for name in flags)]
    assert sorted(str(k) for k in sample.keys(True, True))[:6] == expected


def test_knob_3_next_observation_delta(data: TensorDict, delta_data: TensorDict) -> None:
    assert data.bytes() - delta_data.bytes() == 1600
    assert delta_data["next", "delta", "observation"].dtype is torch.float16
    assert columns(data) - columns(delta_data) == {("next", "observation")}
    assert columns(delta_data) - columns(data) == {("next", "delta", "observation")}
    rb_delta = ReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(slice_len=20, traj_key=("collector", "traj_ids")),
        transform=NextObservationDelta(in_keys=["observation"]),
        batch_size=40,
    )
    rb_delta.extend(delta_data)
    delta_sample = rb_delta.sample()
    assert isinstance(delta_sample, TensorDict)
    assert delta_sample.batch_size == (40,) and ("next", "observation") in columns(delta_sample)
    assert ("next", "delta", "observation") not in columns(delta_sample)
    assert not delta_sample["next", "observation"].isnan().any()


def test_knob_4_value_estimators_survive_nan(sample: TensorDict) -> None:
    value_net = TensorDictModule(
        lambda x: x.pow(2).sum(-1, keepdim=True).sqrt(), in_keys=["observation"], out_keys=["state_value"]
    )
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=value_net, shifted=False)
    with pytest.warns(UserWarning, match="the row's own 'observation' is used instead"):
        out = gae(sample.reshape(-1, 20).clone())
    assert out.batch_size == (2, 20)
    assert torch.isfinite(out["advantage"]).all()
