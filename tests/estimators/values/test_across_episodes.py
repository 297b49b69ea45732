"""``episodic=False``: the return runs over the ends of an env's episodes, and over nothing else."""

from typing import Any

import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace
from flatroll.layout import split_trajectories
from flatroll.layout.keys import ENV, ENV_STEP
from flatroll.modules import GRUModule
from flatroll.rollouts import Collector
from flatroll.wrappers import StepCounter
from flatroll.wrappers.testing import Script, make_scripted

MODES = ("NextStep", "SameStep", "Disabled")
ENDS = ("terminated", "truncated", "both")
SCRIPT = Script(3, lengths=[[3, 1, 5], [2, 4], [7]], ends=ENDS)

WEIGHTS = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)


def value_of(obs: Tensor) -> Tensor:
    """A value that differs in each (env, episode, step), float64."""
    return (obs.double() @ WEIGHTS).sin()


def critic() -> TensorDictModule:
    return TensorDictModule(lambda x: value_of(x).unsqueeze(-1), ["observation"], ["state_value"])


def collect(script: Script, mode: Any, rows: int, batches: int = 1, **options: Any) -> list[TensorDict]:
    env = StepCounter(make_scripted(script, autoreset_mode=mode))
    collector = Collector(env, None, frames_per_batch=rows, track_envs=True, **options)
    found = [next(collector) for _ in range(batches)]
    for batch in found:
        batch["next", "reward"] = (
            batch["next", "reward"].double() + batch["observation"][:, 2:].double().cos()
        )
    return found


def loop(batch: TensorDict, gamma: float, lmbda: float) -> Tensor:
    """The advantage row by row: of the numbers in the observations, which name env, episode and step."""
    obs = batch["observation"]
    reward = batch["next", "reward"].squeeze(-1).tolist()
    value = value_of(obs).tolist()
    last_value = value_of(batch["next", "observation"]).tolist()
    advantage = [0.0] * len(batch)

    for env in obs[:, 0].unique().tolist():
        rows = (obs[:, 0] == env).nonzero().squeeze(-1).tolist()
        later = 0.0
        for i, row in reversed(list(enumerate(rows))):
            follows = last_value[row] if i == len(rows) - 1 else value[rows[i + 1]]
            later = reward[row] + gamma * follows - value[row] + gamma * lmbda * later
            advantage[row] = later
    return torch.tensor(advantage, dtype=torch.float64).unsqueeze(-1)


def compact(batch: TensorDict) -> tuple[TensorDict, TensorDict]:
    ids = batch["collector", "traj_ids"]
    row = torch.cat([ids[1:] != ids[:-1], torch.tensor([True])]).nonzero().squeeze(-1)
    final = TensorDict({"row": row, ("next", "observation"): batch["next", "observation"][row]}, [len(row)])
    return batch.exclude(("next", "observation")), final


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_equals_the_loop_in_each_mode_and_in_windows_that_cut_episodes(mode: str, rows: int) -> None:
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic(), episodic=False)
    for batch in collect(SCRIPT, mode, rows, batches=6):
        expected = loop(batch, 0.9, 0.8)
        out = gae(batch)
        torch.testing.assert_close(out["advantage"], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out["value_target"], expected + out["state_value"], rtol=1e-12, atol=1e-12)


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@examples(60)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=5),
    ends=st.lists(st.sampled_from(ENDS), min_size=1, max_size=3),
    mode=st.sampled_from(MODES),
    rows=st.integers(1, 40),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lmbda=st.sampled_from([0.0, 0.8, 1.0]),
    options=st.sampled_from(
        [
            {},
            {"shifted": True},
            {"value_chunk_size": 3},
            {"num_chunks": 2},
            {"shifted": True, "shifted_budget": 40},
        ]
    ),
)
def test_equals_the_loop_for_any_script(
    lengths: list[list[int]],
    ends: list[Any],
    mode: str,
    rows: int,
    gamma: float,
    lmbda: float,
    options: dict[str, Any],
) -> None:
    script = Script(len(lengths), lengths=lengths, ends=ends)
    gae = GAE(gamma=gamma, lmbda=lmbda, value_network=critic(), episodic=False, **options)
    for batch in collect(script, mode, rows, batches=2):
        expected = loop(batch, gamma, lmbda)
        thin, final = compact(batch)
        torch.testing.assert_close(gae(batch)["advantage"], expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(gae(thin, final=final)["advantage"], expected, rtol=1e-11, atol=1e-11)


def test_one_env_and_many() -> None:
    for num_envs in (1, 1024):
        lengths = [[1 + env % 4, 1, 2] for env in range(num_envs)]
        script = Script(num_envs, lengths=lengths, ends=ENDS)
        (batch,) = collect(script, "NextStep", 6 * num_envs)
        expected = loop(batch, 0.99, 0.95)
        out = GAE(gamma=0.99, lmbda=0.95, value_network=critic(), episodic=False)(batch)
        torch.testing.assert_close(out["advantage"], expected, rtol=1e-11, atol=1e-11)


def published(
    rewards: NDArray[Any], values: NDArray[Any], last: NDArray[Any], gamma: float, lam: float
) -> Any:
    """Intrinsic advantages ``[T, E]`` of Burda et al.: ``A[t] = delta[t] + gamma * lam * A[t + 1]``, no end in it."""
    advantage = np.zeros_like(rewards)
    carried = np.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        following = last if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + gamma * following - values[t]
        advantage[t] = carried = delta + gamma * lam * carried
    return advantage


def test_equals_the_published_formula_on_an_array_of_steps_and_envs() -> None:
    envs, steps = 4, 32
    script = Script(envs, lengths=[[3, 1], [5], [2, 2, 7], [40]], ends=ENDS)
    (batch,) = collect(script, "SameStep", envs * steps)
    out = GAE(gamma=0.99, lmbda=0.95, value_network=critic(), episodic=False)(batch.clone())

    def table(column: Tensor) -> NDArray[Any]:
        return column.reshape(envs, steps).numpy().T

    last = value_of(batch["next", "observation"]).reshape(envs, steps)[:, -1].numpy()
    expected = published(
        table(batch["next", "reward"]), table(value_of(batch["observation"])), last, 0.99, 0.95
    )
    np.testing.assert_allclose(table(out["advantage"]), expected, rtol=1e-12)

    # The same rows as [E, T]: time is the last dim.
    square = GAE(gamma=0.99, lmbda=0.95, value_network=critic(), episodic=False)(batch.reshape(envs, steps))
    torch.testing.assert_close(square["advantage"].flatten(0, 1), out["advantage"])


def test_values_that_are_in_the_batch() -> None:
    (batch,) = collect(SCRIPT, "NextStep", 20)
    expected = loop(batch, 0.9, 0.8)
    batch["state_value"] = value_of(batch["observation"]).unsqueeze(-1)
    batch["next", "state_value"] = value_of(batch["next", "observation"]).unsqueeze(-1)
    for options in ({"value_network": None}, {"value_network": critic(), "skip_existing": True}):
        out = GAE(gamma=0.9, lmbda=0.8, episodic=False, **options)(batch.clone())  # type: ignore[arg-type]
        torch.testing.assert_close(out["advantage"], expected, rtol=1e-12, atol=1e-12)
    del batch["state_value"]
    out = GAE(gamma=0.9, lmbda=0.8, episodic=False, value_network=critic(), skip_existing=True)(batch)
    torch.testing.assert_close(out["advantage"], expected, rtol=1e-12, atol=1e-12)


def test_the_other_estimators_share_it() -> None:
    (batch,) = collect(SCRIPT, "NextStep", 20)
    options: Any = {"gamma": 0.9, "value_network": critic(), "episodic": False}
    for estimator, lmbda in (
        (TD0Estimator(**options), 0.0),
        (TDLambdaEstimator(lmbda=0.7, **options), 0.7),
        (TD1Estimator(**options), 1.0),
    ):
        out = estimator(batch.clone())
        torch.testing.assert_close(out["advantage"], loop(batch, 0.9, lmbda), rtol=1e-12, atol=1e-12)

    # With the probabilities of the policy itself, V-trace's target is the return.
    net = TensorDictModule(nn.Linear(3, 2), ["observation"], ["logits"])
    head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    policy = ProbabilisticTensorDictSequential(*[net, head])
    batch["action"] = torch.zeros(len(batch), dtype=torch.int64)
    batch["action_log_prob"] = policy.get_dist(batch.select("observation")).log_prob(batch["action"]).detach()
    out = VTrace(actor_network=policy, **options)(batch.clone())
    expected = loop(batch, 0.9, 1.0) + value_of(batch["observation"]).unsqueeze(-1)
    torch.testing.assert_close(out["value_target"], expected, rtol=1e-6, atol=1e-6)


def test_a_recurrent_critic_starts_anew_with_each_episode() -> None:
    torch.manual_seed(0)
    gru = GRUModule(3, 4, in_key="observation", out_key="features", state="zero")
    parts: list[Any] = [gru, TensorDictModule(nn.Linear(4, 1), ["features"], ["state_value"])]
    network = TensorDictSequential(*parts)
    script = Script(3, lengths=[[3, 1, 5], [2, 4], [7]], ends="truncated")
    (batch,) = collect(script, "NextStep", 20)
    batch["next", "reward"] = batch["next", "reward"].float()
    usual = GAE(gamma=0.9, lmbda=0.8, value_network=network)(batch.clone())
    across = GAE(gamma=0.9, lmbda=0.8, value_network=network, episodic=False)(batch.clone())
    torch.testing.assert_close(across["state_value"], usual["state_value"])
    known = GAE(gamma=0.9, lmbda=0.8, value_network=None, episodic=False)(usual.clone())
    torch.testing.assert_close(across["advantage"], known["advantage"])


def test_target_parameters_give_the_values_of_what_follows() -> None:
    linear = nn.Linear(3, 1)
    network = TensorDictModule(linear, ["observation"], ["state_value"])
    (batch,) = collect(SCRIPT, "NextStep", 20)
    batch["next", "reward"] = batch["next", "reward"].float()
    weights: Any = TensorDict.from_module(network)
    zeros = weights.apply(torch.zeros_like)
    out = GAE(gamma=0.9, lmbda=0.0, value_network=network, episodic=False)(batch, target_params=zeros)
    torch.testing.assert_close(out["value_target"], batch["next", "reward"])


def test_padded_rows_of_each_env() -> None:
    """Rows ``[E, T]`` of one env each, padded at their ends."""
    (batch,) = collect(SCRIPT, "NextStep", 16)
    expected = loop(batch, 0.9, 0.8)
    of_env = [batch[batch[ENV] == env] for env in range(3)]
    length = max(map(len, of_env))
    padded: Any = torch.stack([torch.cat([rows, rows[-1:].expand(length - len(rows))]) for rows in of_env])
    mask = torch.stack([torch.arange(length) < len(rows) for rows in of_env])
    padded["collector", "mask"] = mask
    out = GAE(gamma=0.9, lmbda=0.8, value_network=critic(), episodic=False)(padded)
    torch.testing.assert_close(out["advantage"][mask], expected, rtol=1e-12, atol=1e-12)


def test_a_hidden_last_observation_is_not_needed_where_the_next_episode_follows() -> None:
    (batch,) = collect(SCRIPT, "NextStep", 20)
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic(), episodic=False)
    expected = loop(batch, 0.9, 0.8)
    done = batch["next", "done"].squeeze(-1)
    last_of_env = torch.cat([batch[ENV].diff() != 0, torch.tensor([True])])
    hidden = done & ~last_of_env
    batch["collector", "next_known"] = ~hidden
    batch["next", "observation"][hidden] = torch.nan
    torch.testing.assert_close(gae(batch.clone())["advantage"], expected, rtol=1e-12, atol=1e-12)

    assert bool((done & last_of_env).any())
    batch["collector", "next_known"] = ~done
    with pytest.raises(ValueError, match=r"hid the final observation of 2 ended rows"):
        gae(batch)


def sliced(batch: TensorDict) -> TensorDict:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=4), batch_size=32)
    buffer.extend(batch)
    return buffer.sample()


def test_a_row_that_is_missing_is_noticed_wherever_it_was() -> None:
    """Without step counts nothing else tells that a row within an episode is gone."""
    (batch,) = collect(SCRIPT, "NextStep", 30)
    env = batch["collector", "env"]
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic(), episodic=False)
    for row in range(30):
        rest = TensorDict.cat([batch[:row], batch[row + 1 :]])
        if row in (0, 29) or env[row - 1] != env[row + 1]:
            gae(rest)  # the first or last row of an env
            continue
        with pytest.raises(
            ValueError, match=f"what follows row {row - 1} in env {int(env[row])} is not in the row"
        ):
            gae(rest)


def test_batches_that_do_not_say_what_follows_are_refused() -> None:
    (batch,) = collect(SCRIPT, "NextStep", 30)
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic(), episodic=False)
    torch.manual_seed(0)
    for other in (
        sliced(batch),
        batch[torch.randperm(30)],
        batch[::2],
        split_trajectories(batch),
        TensorDict.cat([batch, batch]),
    ):
        with pytest.raises(ValueError, match=r"rows of each env in one stretch|does not follow row"):
            gae(other)
    with pytest.raises(KeyError, match=r"track_envs=True"):
        gae(batch.exclude(ENV_STEP))
    with pytest.raises(ValueError, match="next_value= gives the values of the next observations"):
        gae.value_estimate(batch, next_value=torch.zeros(30, 1))
    with pytest.raises(ValueError, match="n-step rows"):
        gae(batch.clone().set("steps_to_next_obs", torch.full((30,), 2)))
    with pytest.raises(TypeError, match="episodic must be True or False"):
        GAE(gamma=0.9, lmbda=0.8, value_network=critic(), episodic="no")  # type: ignore[arg-type]


def test_the_head_of_a_ring_is_no_end_of_an_episode() -> None:
    """A ring keeps newer rows in front of older ones; the return does not run from those to these."""
    env = StepCounter(make_scripted(Script(1, lengths=[[3, 1, 5]]), autoreset_mode="SameStep"))
    collector = Collector(env, None, frames_per_batch=10, track_envs=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(16))
    for _ in range(2):
        buffer.extend(next(collector))
    ring = buffer[:]
    assert ring[ENV_STEP].tolist() == [16, 17, 18, 19, *range(4, 16)]
    with pytest.raises(ValueError, match="what follows row 3 in env 0 is not in the row behind it"):
        GAE(gamma=0.9, lmbda=0.8, value_network=critic(), episodic=False)(ring)


def test_two_heads_in_one_batch() -> None:
    """Each stream has its own keys; neither reads what the other has written."""
    (batch,) = collect(SCRIPT, "NextStep", 20)
    batch["next", "bonus"] = batch["next", "reward"].square()
    inner = TensorDictModule(lambda x: value_of(x).unsqueeze(-1), ["observation"], ["bonus_value"])
    names: Any = {
        "advantage_key": "bonus_advantage",
        "value_target_key": "bonus_target",
        "value_key": "bonus_value",
    }
    across = GAE(gamma=0.99, lmbda=0.95, value_network=inner, episodic=False, **names)
    across.set_keys(reward="bonus")
    usual = GAE(gamma=0.9, lmbda=0.8, value_network=critic())

    both = usual(across(batch.clone()))
    other_way = across(usual(batch.clone()))
    alone = usual(batch.clone())
    squared = batch.clone().set(("next", "reward"), batch["next", "bonus"])
    torch.testing.assert_close(both["bonus_advantage"], loop(squared, 0.99, 0.95), rtol=1e-11, atol=1e-11)
    for key in ("advantage", "value_target", "state_value"):
        assert torch.equal(both[key], alone[key])
    for key in ("advantage", "bonus_advantage", "bonus_target", ("next", "bonus_value")):
        assert torch.equal(both[key], other_way[key])
