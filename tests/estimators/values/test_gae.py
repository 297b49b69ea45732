"""GAE on batches: each run of a flat batch gets what it gets alone, whatever form the batch comes in."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from flatroll.estimators import GAE
from flatroll.layout import split_trajectories

BatchOf = Callable[..., TensorDict]
GaeLoop = Callable[[TensorDictBase, TensorDictModuleBase, float, float], Tensor]

RUNS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from(["terminated", "truncated", "both", "cut"])),
    min_size=1,
    max_size=6,
)


def norm_critic() -> TensorDictModule:
    """A critic that is not linear, in float64, without parameters."""
    return TensorDictModule(
        lambda x: x.square().sum(-1, keepdim=True).sqrt(), in_keys=["observation"], out_keys=["state_value"]
    )


def compact(batch: TensorDict) -> tuple[TensorDict, TensorDict]:
    """The batch without next observations, and those that no row of it holds."""
    ids = batch["collector", "traj_ids"]
    last = torch.cat([ids[1:] != ids[:-1], torch.tensor([True])])
    row = last.nonzero().squeeze(-1)
    final = TensorDict({"row": row, ("next", "observation"): batch["next", "observation"][row]}, [len(row)])
    return batch.exclude(("next", "observation")), final


@examples(60)
@given(
    runs=RUNS,
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lmbda=st.sampled_from([0.0, 0.8, 1.0]),
    shifted=st.booleans(),
    chunk=st.sampled_from([{}, {"value_chunk_size": 3}, {"num_chunks": 2}]),
    seed=st.integers(0, 5),
)
def test_equals_the_loop_over_each_run(
    batch_of: BatchOf,
    gae_loop: GaeLoop,
    runs: list[tuple[int, str]],
    gamma: float,
    lmbda: float,
    shifted: bool,
    chunk: dict[str, Any],
    seed: int,
) -> None:
    batch, critic = batch_of(runs, seed=seed), norm_critic()
    gae = GAE(gamma=gamma, lmbda=lmbda, value_network=critic, shifted=shifted, **chunk)
    expected = gae_loop(batch, critic, gamma, lmbda)
    thin, final = compact(batch)
    full, exact = gae(batch), gae(thin, final=final)
    torch.testing.assert_close(full["advantage"], expected)
    torch.testing.assert_close(exact["advantage"], expected)
    torch.testing.assert_close(full["value_target"], expected + full["state_value"])


def test_writes_the_values_and_zero_behind_a_terminated_row(
    mixed: TensorDict, critic: TensorDictModule
) -> None:
    given = mixed.clone()
    out = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(mixed)
    assert out is mixed
    state = critic(given.select("observation"))["state_value"]
    after = critic(given["next"].select("observation"))["state_value"]
    torch.testing.assert_close(out["state_value"], state)
    terminated = given["next", "terminated"]
    torch.testing.assert_close(out["next", "state_value"], after.masked_fill(terminated, 0.0))
    assert set(out.keys(True, True)) - set(given.keys(True, True)) == {
        "advantage",
        "value_target",
        "state_value",
        ("next", "state_value"),
    }
    assert all((out[key] == given[key]).all() for key in given.keys(True, True))


def test_a_second_call_gives_the_same(mixed: TensorDict, critic: TensorDictModule) -> None:
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic)
    first = gae(mixed)["advantage"].clone()
    mixed["state_value"] += 7.0
    mixed["next", "state_value"] += 7.0
    assert torch.equal(gae(mixed)["advantage"], first)


@pytest.mark.parametrize("shifted", [False, True])
def test_rows_of_a_two_dim_batch_are_runs_of_their_own(
    batch_of: BatchOf, gae_loop: GaeLoop, shifted: bool
) -> None:
    flat = batch_of([(4, "terminated"), (4, "cut"), (3, "truncated"), (1, "cut")])
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=norm_critic(), shifted=shifted)
    out = gae(flat.reshape(3, 4).clone())
    assert out["advantage"].shape == (3, 4, 1)
    torch.testing.assert_close(out["advantage"].reshape(-1, 1), gae_loop(flat, norm_critic(), 0.9, 0.8))
    without_ids = flat.exclude("collector").reshape(3, 4)  # the same although nothing else marks the row ends
    torch.testing.assert_close(gae(without_ids)["advantage"], out["advantage"])


def test_padded_batch(mixed: TensorDict, gae_loop: GaeLoop) -> None:
    """A cut run in the middle of the padded form bootstraps from its own final observation, not from padding."""
    expected = gae_loop(mixed, norm_critic(), 0.9, 0.8)
    padded = split_trajectories(mixed)
    for shifted in (False, True):
        out = GAE(gamma=0.9, lmbda=0.8, value_network=norm_critic(), shifted=shifted)(padded.clone())
        torch.testing.assert_close(out["advantage"][out["collector", "mask"]], expected)


def test_episode_end_without_leak(batch_of: BatchOf) -> None:
    """Episodes of value 1 and 100 side by side, no reward, no discount: advantage 0 everywhere, not 99."""
    batch = batch_of([(3, "truncated"), (3, "truncated")], obs=1)
    level = torch.tensor([1.0] * 3 + [100.0] * 3, dtype=torch.float64).unsqueeze(-1)
    batch["observation"], batch["next", "observation"] = level, level.clone()
    batch["next", "reward"].zero_()
    for shifted in (False, True):
        out = GAE(gamma=1.0, lmbda=0.95, value_network=norm_critic(), shifted=shifted)(batch)
        assert out["advantage"].squeeze(-1).tolist() == [0.0] * 6


def test_float32_and_integer_observations(batch_of: BatchOf, gae_loop: GaeLoop) -> None:
    batch = batch_of([(40, "truncated"), (30, "terminated")], dtype=torch.float32)
    for key in ("observation", ("next", "observation")):
        batch[key] = (batch[key] * 20).abs().to(torch.uint8)
    critic = TensorDictModule(
        lambda x: x.float().mean(-1, keepdim=True), in_keys=["observation"], out_keys=["state_value"]
    )
    expected = gae_loop(batch, critic, 0.99, 0.95)
    for shifted in (False, True):
        out = GAE(gamma=0.99, lmbda=0.95, value_network=critic, shifted=shifted)(batch)
        assert out["advantage"].dtype is torch.float32
        torch.testing.assert_close(out["advantage"].double(), expected, rtol=1e-5, atol=1e-4)


def test_nested_observations_and_renamed_keys(mixed: TensorDict, critic: TensorDictModule) -> None:
    expected = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(mixed.clone())
    other = TensorDictModule(critic.module, in_keys=[("agent", "pos")], out_keys=[("agent", "value")])
    mixed.rename_key_("observation", ("agent", "pos"))
    mixed.rename_key_(("next", "observation"), ("next", "agent", "pos"))
    mixed.rename_key_(("next", "reward"), ("next", "score"))
    gae = GAE(
        gamma=0.9,
        lmbda=0.8,
        value_network=other,
        advantage_key=("out", "adv"),
        value_target_key="target",
        value_key=("agent", "value"),
    )
    gae.set_keys(reward="score")
    assert gae.out_keys == [("out", "adv"), "target", ("agent", "value"), ("next", "agent", "value")]
    for shifted in (False, True):
        gae.shifted = shifted
        torch.testing.assert_close(gae(mixed.clone())["out", "adv"], expected["advantage"])


def test_selected_out_keys(mixed: TensorDict, critic: TensorDictModule) -> None:
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic)
    expected = gae(mixed.clone())["advantage"]
    out = gae.select_out_keys("advantage")(mixed)
    assert "value_target" not in out.keys()  # noqa: SIM118 - a tensordict iterates over its rows
    torch.testing.assert_close(out["advantage"], expected)


def test_works_inside_a_tensordict_sequence(mixed: TensorDict, critic: TensorDictModule) -> None:
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic)
    double = TensorDictModule(lambda x: 2 * x, in_keys=["advantage"], out_keys=["double"])
    out = TensorDictSequential(gae, double)(mixed.clone())
    torch.testing.assert_close(out["double"], 2 * gae(mixed)["advantage"])


def test_average_is_over_the_real_rows(mixed: TensorDict, critic: TensorDictModule) -> None:
    plain = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(mixed.clone())["advantage"]
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic, average_gae=True)
    torch.testing.assert_close(gae(mixed.clone())["advantage"], (plain - plain.mean()) / plain.std())
    mask = torch.arange(16) < 10
    mixed["collector", "mask"] = mask
    real = plain[mask]
    out = gae(mixed)["advantage"]
    torch.testing.assert_close(out[mask], (real - real.mean()) / real.std())


def test_average_of_one_row_is_zero(batch_of: BatchOf) -> None:
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=norm_critic(), average_gae=True)
    assert gae(batch_of([(1, "cut")]))["advantage"].tolist() == [[0.0]]


def test_gradients_only_where_asked(mixed: TensorDict, critic: TensorDictModule) -> None:
    arguments: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.8, "value_network": critic}
    assert not GAE(**arguments)(mixed.clone())["advantage"].requires_grad
    grads = []
    for shifted in (False, True):
        out = GAE(**arguments, differentiable=True, shifted=shifted)(mixed.clone())
        grads.append(torch.autograd.grad(out["value_target"].square().sum(), list(critic.parameters())))
    torch.testing.assert_close(grads[0], grads[1])
    with torch.no_grad():
        assert not GAE(**arguments, differentiable=True)(mixed)["advantage"].requires_grad


def test_reward_without_a_trailing_dim(mixed: TensorDict, critic: TensorDictModule) -> None:
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic)
    expected = gae(mixed.clone())["advantage"]
    mixed["next", "reward"] = mixed["next", "reward"].squeeze(-1)
    torch.testing.assert_close(gae(mixed)["advantage"], expected)


BAD: dict[str, tuple[Callable[[TensorDict], Any], type[Exception], str]] = {
    "no reward": (
        lambda b: b.exclude(("next", "reward")),
        KeyError,
        "batch has no entry ('next', 'reward'): the collector writes it",
    ),
    "no terminated": (lambda b: b.exclude(("next", "terminated")), KeyError, "('next', 'terminated')"),
    "no observation": (lambda b: b.exclude("observation"), KeyError, "no entry 'observation'"),
    "int reward": (
        lambda b: b.set(("next", "reward"), b["next", "reward"].long()),
        TypeError,
        "batch[('next', 'reward')] must be floating, got torch.int64: cast it with .float()",
    ),
    "float done": (
        lambda b: b.set(("next", "done"), b["next", "done"].float()),
        TypeError,
        "must be bool, got torch.float32",
    ),
    "wide reward": (
        lambda b: b.set(("next", "reward"), b["next", "reward"].expand(-1, 2)),
        ValueError,
        "values of the reward's shape (16, 2), got (16, 1)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_batch(name: str, mixed: TensorDict, critic: TensorDictModule) -> None:
    change, error, text = BAD[name]
    with pytest.raises(error, match=re.escape(text)):
        GAE(gamma=0.9, lmbda=0.8, value_network=critic)(change(mixed))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"gamma": 1.01}, ValueError, "gamma must lie in [0, 1], got 1.01"),
        ({"lmbda": -0.1}, ValueError, "lmbda must lie in [0, 1], got -0.1"),
        ({"gamma": float("nan")}, ValueError, "gamma must lie in [0, 1], got nan"),
        (
            {"value_chunk_size": 2, "num_chunks": 2},
            ValueError,
            "pass value_chunk_size (rows per chunk) or num_chunks (number of chunks), not both: got 2 and 2",
        ),
        ({"num_chunks": 0}, ValueError, "num_chunks must be an integer of at least 1, got 0"),
        (
            {"num_chunks": 2, "num_chunk": 3},
            ValueError,
            "num_chunk is another name for num_chunks, got 3 and 2",
        ),
        ({"bootstrap_missing": "zero"}, ValueError, "bootstrap_missing must be 'error', 'current' or 'mask'"),
        ({"value_network": nn.Linear(3, 1)}, TypeError, "value_network must be a tensordict module, e.g."),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        GAE(**{"gamma": 0.9, "lmbda": 0.8, "value_network": norm_critic(), **changes})


def test_unknown_key_name() -> None:
    with pytest.raises(ValueError, match="no key is called rewards; the keys are advantage, done"):
        GAE(gamma=0.9, lmbda=0.8, value_network=norm_critic()).set_keys(rewards="r")


@pytest.mark.parametrize(
    ("net", "error", "text"),
    [
        (
            lambda x: x[..., 0],
            ValueError,
            "given a batch of (32,), must write 'state_value' of shape (32, 1), got (32,)",
        ),
        (
            lambda x: x[:5, :1],
            ValueError,
            "given a batch of (32,), must write 'state_value' of shape (32, 1), got (5, 1)",
        ),
        (lambda x: x, ValueError, "values of the reward's shape (16, 1), got (16, 3)"),
    ],
    ids=["no trailing dim", "too few rows", "too wide"],
)
def test_bad_values(mixed: TensorDict, net: Any, error: type[Exception], text: str) -> None:
    critic = TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])
    with pytest.raises(error, match=re.escape(text)):
        GAE(gamma=0.9, lmbda=0.8, value_network=critic)(mixed)


def test_value_under_another_key(mixed: TensorDict) -> None:
    critic = TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["v"])
    with pytest.raises(KeyError, match="value_network wrote no entry 'state_value': its out_keys are"):
        GAE(gamma=0.9, lmbda=0.8, value_network=critic)(mixed)
