"""Random network distillation: its numbers by hand, what its statistics count, and that a run resumes."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from flatroll.layout.keys import ENV, ENV_STEP
from flatroll.modules import RND, RunningNorm
from flatroll.rollouts import Collector
from flatroll.wrappers.testing import Script, make_scripted

MODES = ("NextStep", "SameStep", "Disabled")
SCRIPT = Script(3, lengths=[[3, 1, 5], [2, 4], [7]], ends=["terminated", "truncated", "both"])
REWARD = ("next", "intrinsic_reward")


def env_of(space: spaces.Space[Any]) -> Any:
    """What `RND` reads of an env."""
    return SimpleNamespace(single_observation_space=space, single_action_space=spaces.Discrete(2))


class Times(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def collect(mode: Any = "NextStep", rows: int = 20, total: int = 60, **options: Any) -> Collector:
    env = make_scripted(SCRIPT, autoreset_mode=mode)
    return Collector(env, None, frames_per_batch=rows, total_frames=total, track_envs=True, **options)


def rows_of(observed: list[float], after: list[float], env: list[int] | None = None) -> TensorDict:
    count = len(observed)
    env = [0] * count if env is None else env
    return TensorDict(
        {
            "observation": torch.tensor(observed).unsqueeze(-1),
            "is_init": torch.tensor([i == 0 or env[i] != env[i - 1] for i in range(count)]).unsqueeze(-1),
            "collector": {"env": torch.tensor(env), "env_step": torch.arange(count)},
            "next": {
                "observation": torch.tensor(after).unsqueeze(-1),
                "done": torch.zeros(count, 1, dtype=torch.bool),
            },
        },
        [count],
    )


def test_numbers_by_hand() -> None:
    rnd = RND(env_of(spaces.Box(-9, 9, (1,))), target=Times(3.0), predictor=Times(1.0), gamma=0.5, clip=1.2)
    batch = rnd.update(rows_of([0.0, 1.0, 2.0], [1.0, 2.0, 5.0]))

    # Observations 0, 1, 2 and 5: mean 2, variance 3.5. Next observations 1, 2 and 5 are -0.53, 0 and 1.60, clipped
    # to 1.2. The difference of the networks is twice that.
    x = [-1.0 / math.sqrt(3.5), 0.0, 1.2]
    errors = [(2.0 * number) ** 2 for number in x]
    returns = [errors[0], 0.5 * errors[0] + errors[1], 0.25 * errors[0] + 0.5 * errors[1] + errors[2]]
    deviation = float(np.std(returns))
    expected = [error / deviation for error in errors]
    assert batch[REWARD].squeeze(-1).tolist() == pytest.approx(expected, rel=1e-5)
    assert rnd.loss(batch).item() == pytest.approx(sum(errors) / 3, rel=1e-5)
    assert rnd.error(batch).shape == (3, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 10, 60])
def test_each_observation_counts_once_and_returns_run_over_the_ends(mode: str, rows: int) -> None:
    torch.manual_seed(0)
    rnd = RND(make_scripted(SCRIPT), target=Times(3.0), predictor=Times(1.0), gamma=0.9)
    seen: set[tuple[float, ...]] = set()
    carried: dict[int, float] = {}
    returns: list[float] = []
    for batch in collect(mode, rows):
        rnd.update(batch)
        for column in (batch["observation"], batch["next", "observation"]):
            seen |= set(map(tuple, column.tolist()))
        for env, error in zip(batch[ENV].tolist(), rnd.error(batch).squeeze(-1).tolist(), strict=True):
            carried[env] = 0.9 * carried.get(env, 0.0) + error
            returns.append(carried[env])

    table = torch.tensor(sorted(seen), dtype=torch.float64)
    statistics = rnd.norms[0].statistics  # type: ignore[union-attr]
    assert statistics.count.item() == len(table)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(statistics.mean, table.mean(0))  # type: ignore[union-attr]
    torch.testing.assert_close(statistics.var, table.var(0, correction=0))  # type: ignore[union-attr]
    # The scale sees the errors of the statistics of their time, and so does the loop.
    assert rnd.scale.statistics.count.item() == len(returns)
    assert rnd.scale.statistics.mean.item() == pytest.approx(np.mean(returns), rel=1e-5)
    assert rnd.scale.statistics.var.item() == pytest.approx(np.var(returns), rel=1e-4)


def test_a_compact_batch_gets_the_same_rewards() -> None:
    torch.manual_seed(0)
    one = RND(make_scripted(SCRIPT))
    other = copy.deepcopy(one)
    compact = collect(compact_obs=True)
    thin: Any = None
    for batch, thin in zip(collect(), compact, strict=True):
        final = compact.final
        assert torch.equal(one.update(batch)[REWARD], other.update(thin, final=final)[REWARD])
        assert torch.equal(one.loss(batch), other.loss(thin, final=final))
    with pytest.raises(KeyError, match=r"compact batch comes with collector\.final"):
        other(thin)


def test_a_run_resumes() -> None:
    torch.manual_seed(0)
    rnd = RND(make_scripted(SCRIPT))
    optimizer = torch.optim.Adam(rnd.predictor.parameters())
    batches = list(collect(rows=10))
    for batch in batches[:3]:
        rnd.update(batch)
        rnd.loss(batch).backward()
        optimizer.step()

    torch.manual_seed(1)
    resumed = RND(make_scripted(SCRIPT))
    resumed.load_state_dict(rnd.state_dict())
    for batch in batches[3:]:
        assert torch.equal(rnd.update(batch.clone())[REWARD], resumed.update(batch.clone())[REWARD])
    for name, column in rnd.state_dict().items():
        assert torch.equal(column, resumed.state_dict()[name]), name


def test_only_the_predictor_learns_and_the_reward_falls() -> None:
    torch.manual_seed(0)
    rnd = RND(gym.make_vec("CartPole-v1", num_envs=2))
    before = copy.deepcopy(rnd.target.state_dict())
    batch = next(
        Collector(gym.make_vec("CartPole-v1", num_envs=2), None, frames_per_batch=64, track_envs=True, seed=0)
    )
    first = rnd.update(batch)[REWARD].mean()
    optimizer = torch.optim.Adam(rnd.parameters(), lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        rnd.loss(batch).backward()
        optimizer.step()
    assert all(parameter.grad is None for parameter in rnd.target.parameters())
    assert all(torch.equal(before[name], x) for name, x in rnd.target.state_dict().items())
    assert rnd(batch)[REWARD].mean() < 0.1 * first
    assert not rnd(batch)[REWARD].requires_grad


def test_the_loss_uses_a_share_of_the_rows() -> None:
    batch = next(collect(rows=60))
    rnd = RND(make_scripted(SCRIPT), proportion=0.25)
    rnd.update(batch)
    error = rnd.error(batch).squeeze(-1)
    torch.manual_seed(7)
    used = torch.rand(60) < 0.25
    assert 5 < int(used.sum()) < 25
    torch.manual_seed(7)
    torch.testing.assert_close(rnd.loss(batch), error[used].mean())
    rnd.proportion = 1e-9
    assert rnd.loss(batch).item() == 0.0  # no row

    batch["collector", "mask"] = torch.arange(60) < 30
    batch["next", "observation"][30:] = torch.nan
    rnd.proportion = 1.0
    rnd.loss(batch).backward()
    torch.testing.assert_close(rnd.loss(batch), error[:30].mean())
    assert all(bool(x.grad.isfinite().all()) for x in rnd.predictor.parameters())  # type: ignore[union-attr]


def test_entries_of_a_dict_are_chosen() -> None:
    torch.manual_seed(0)
    seen = {"position": spaces.Box(-1, 1, (2,)), "camera": spaces.Box(0, 255, (3, 8, 8), np.uint8)}
    space = spaces.Dict({**seen, "room": spaces.Discrete(5), "noise": spaces.Box(-1, 1, (4,))})
    rnd = RND(env_of(space), in_keys=["position", "camera", "room"])
    assert rnd.in_keys == [("next", "position"), ("next", "camera"), ("next", "room")]
    assert [norm.in_key for norm in rnd.norms] == ["position", "camera"]

    def rows() -> dict[str, Any]:
        camera = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8)
        return {"position": torch.randn(6, 2), "camera": camera, "room": torch.randint(5, (6,))}

    flags = {"done": torch.ones(6, 1, dtype=torch.bool)}
    numbers = {"env": torch.arange(6), "env_step": torch.zeros(6, dtype=torch.int64)}
    batch = TensorDict(
        {
            **rows(),
            "is_init": torch.ones(6, 1, dtype=torch.bool),
            "collector": numbers,
            "next": rows() | flags,
        },
        [6],
    )
    reward = rnd.update(batch)[REWARD]
    assert bool(reward.isfinite().all())
    both = torch.cat([batch["camera"], batch["next", "camera"]]).double()
    torch.testing.assert_close(rnd.norms[1].statistics.mean, both.mean(0))  # type: ignore[union-attr]
    assert batch["camera"].dtype is torch.uint8  # the batch keeps its own


def test_choices_are_told_apart() -> None:
    torch.manual_seed(0)
    rnd = RND(gym.make_vec("FrozenLake-v1", num_envs=2))
    assert len(rnd.norms) == 0
    after = TensorDict({"next": {"observation": torch.arange(16)}, "observation": torch.arange(16)}, [16])
    assert len(rnd.error(after).unique()) == 16


def test_a_hidden_next_observation_counts_as_the_rows_own() -> None:
    rnd = RND(env_of(spaces.Box(-9, 9, (1,))), target=Times(3.0), predictor=Times(1.0))
    batch = rows_of([0.0, 1.0, 2.0], [1.0, 2.0, math.nan])
    batch["collector", "next_known"] = torch.tensor([True, True, False])
    rnd.update(batch)
    assert rnd.norms[0].statistics.count.item() == 3  # type: ignore[union-attr, operator]
    assert torch.equal(batch[REWARD][1], batch[REWARD][2])


def test_after_eval_nothing_is_counted() -> None:
    rnd = RND(make_scripted(SCRIPT))
    one, other = list(collect(rows=30))
    rnd.update(one)
    state = copy.deepcopy(rnd.state_dict())
    rnd.eval()
    expected = rnd(other.clone())[REWARD]
    assert torch.equal(rnd.update(other)[REWARD], expected)
    assert all(torch.equal(x, rnd.state_dict()[name]) for name, x in state.items())


def test_integers_are_normalised_on_request() -> None:
    rows = TensorDict({"observation": torch.tensor([[0], [2], [4]], dtype=torch.uint8)}, [3])
    norm = RunningNorm("observation", shape=(1,), integers=True)
    norm.update(rows)
    assert norm(rows)["observation_norm"].squeeze(-1).tolist() == pytest.approx(
        [-1.2247, 0.0, 1.2247], abs=1e-4
    )


def test_wrong_arguments() -> None:
    env = make_scripted(SCRIPT)
    with pytest.raises(ValueError, match="proportion must lie in"):
        RND(env, proportion=0.0)
    with pytest.raises(ValueError, match="the number of sizes in hidden must be"):
        RND(env, hidden=())
    with pytest.raises(ValueError, match="in_keys names 'camera', which the observation does not have"):
        RND(env, in_keys=["camera"])
    with pytest.raises(KeyError, match="track_envs=True"):
        RND(env).update(next(Collector(make_scripted(SCRIPT), None, frames_per_batch=4)))
    assert ENV_STEP in next(collect()).keys(True)
