"""The functional estimate against hand-made numbers and a loop."""

import re

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from flatroll.estimators import generalized_advantage_estimate as gae


def flags(*rows: int, of: int) -> Tensor:
    flag = torch.zeros(of, dtype=torch.bool)
    flag[list(rows)] = True
    return flag


def test_nothing_leaks_over_a_truncation_inside_the_batch() -> None:
    """Values 1 and 100 in two episodes, no reward, no discount: a leak would show as 99."""
    value = torch.tensor([1.0, 1.0, 100.0, 100.0])
    done = flags(1, 3, of=4)
    advantage, target = gae(1.0, 0.95, value, value.clone(), torch.zeros(4), done, flags(of=4))
    assert advantage.tolist() == [0.0] * 4
    assert target.tolist() == [1.0, 1.0, 100.0, 100.0]


def test_a_cut_stops_the_trace_and_keeps_the_bootstrap() -> None:
    value, next_value, reward = torch.zeros(4), torch.full((4,), 2.0), torch.ones(4)
    done, ends = flags(3, of=4), flags(1, of=4)
    advantage, _ = gae(1.0, 1.0, value, next_value, reward, done, ends=ends)
    assert advantage.tolist() == [6.0, 3.0, 4.0, 1.0]  # row 3 terminates: no bootstrap
    truncated, _ = gae(1.0, 1.0, value, next_value, reward, done, flags(of=4), ends=ends)
    assert truncated.tolist() == [6.0, 3.0, 6.0, 3.0]


def test_terminated_wins_over_truncated_and_stops_the_trace_by_itself() -> None:
    one = torch.ones(3)
    both = gae(1.0, 1.0, one, 5 * one, one, flags(1, 2, of=3), flags(1, 2, of=3))[0]
    assert both.tolist() == [5.0, 0.0, 0.0]
    assert gae(1.0, 1.0, one, 5 * one, one, flags(of=3), flags(1, 2, of=3))[0].tolist() == both.tolist()


@pytest.mark.parametrize("shape", [(8,), (8, 1), (2, 8, 1), (3, 2, 8, 1), (2, 8, 3)], ids=str)
def test_every_sequence_gets_what_it_gets_alone(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    value, next_value, reward = torch.randn(3, *shape, dtype=torch.float64)
    done = torch.rand(shape) < 0.2
    terminated = done & (torch.rand(shape) < 0.5)
    together = gae(0.9, 0.8, value, next_value, reward, done, terminated)
    time = 0 if len(shape) == 1 else -2
    columns = [x.movedim(time, -1).reshape(-1, 8) for x in (value, next_value, reward, done, terminated)]
    alone = [gae(0.9, 0.8, *(column[i] for column in columns)) for i in range(len(columns[0]))]
    for k in range(2):
        stacked = together[k].movedim(time, -1).reshape(-1, 8)
        torch.testing.assert_close(stacked, torch.stack([pair[k] for pair in alone]))
    assert together[0].shape == reward.shape


def test_time_dim() -> None:
    value, next_value, reward = torch.randn(3, 4, 6)
    done = torch.rand(4, 6) < 0.2
    first = gae(0.9, 0.8, value, next_value, reward, done, time_dim=0)[0]
    last = gae(0.9, 0.8, value.T, next_value.T, reward.T, done.T, time_dim=1)[0]
    torch.testing.assert_close(first, last.T)


def test_limits_of_lambda_and_gamma() -> None:
    value, next_value, reward = torch.randn(3, 6, dtype=torch.float64)
    done, terminated = flags(2, 5, of=6), flags(2, of=6)
    residual = reward + 0.9 * next_value * ~terminated - value
    torch.testing.assert_close(gae(0.9, 0.0, value, next_value, reward, done, terminated)[0], residual)
    torch.testing.assert_close(gae(0.0, 0.9, value, next_value, reward, done, terminated)[0], reward - value)
    _, target = gae(1.0, 1.0, value, torch.cat([value[1:], next_value[5:]]), reward, done, terminated)
    returns = torch.stack([reward[:3].sum(), reward[3:].sum() + next_value[5]])
    torch.testing.assert_close(target[[0, 3]], returns)


def test_factors_per_row() -> None:
    value, next_value, reward = torch.randn(3, 6, 1)
    done = flags(2, 5, of=6).unsqueeze(-1)
    rows = torch.full((6, 1), 0.9)
    expected = gae(0.9, 0.8, value, next_value, reward, done)
    torch.testing.assert_close(gae(rows, 0.8, value, next_value, reward, done), expected)
    torch.testing.assert_close(gae(rows, torch.tensor(0.8), value, next_value, reward, done), expected)


def test_flags_with_one_feature_serve_all_features() -> None:
    value, next_value, reward = torch.randn(3, 6, 2)
    done = flags(2, of=6).unsqueeze(-1)
    wide = gae(0.9, 0.8, value, next_value, reward, done)[0]
    narrow = gae(0.9, 0.8, value[:, :1], next_value[:, :1], reward[:, :1], done)[0]
    torch.testing.assert_close(wide[:, :1], narrow)


def test_differentiable_in_values_and_reward() -> None:
    inputs = [torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    done, terminated = flags(2, 4, 6, of=7), flags(4, of=7)
    assert gradcheck(lambda v, n, r: gae(0.9, 0.8, v, n, r, done, terminated), inputs)


def test_half_precision_values_are_summed_in_the_rewards_precision() -> None:
    value = torch.ones(4).bfloat16()
    advantage, _ = gae(0.9, 0.8, value, value, torch.ones(4), flags(3, of=4))
    assert advantage.dtype is torch.float32


def test_compiles_as_one_graph() -> None:
    value, next_value, reward = torch.randn(3, 16, 1)
    done = flags(3, 9, of=16).unsqueeze(-1)
    compiled = torch.compile(gae, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(0.9, 0.8, value, next_value, reward, done),
        gae(0.9, 0.8, value, next_value, reward, done),
    )


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"reward": torch.ones(3, dtype=torch.int64)}, TypeError, "reward must be floating, got torch.int64"),
        ({"done": torch.zeros(3)}, TypeError, "done must be bool, got torch.float32: cast it with .bool()"),
        (
            {"state_value": torch.ones(3, 1)},
            ValueError,
            "state_value, next_state_value and reward must have one shape, got (3, 1), (3,) and (3,)",
        ),
        (
            {"terminated": flags(of=2)},
            ValueError,
            "terminated must have the reward's shape (3,), where feature dims may be 1",
        ),
        ({"ends": flags(of=4)}, ValueError, "ends must have the reward's shape (3,)"),
    ],
    ids=["int reward", "float done", "value shape", "terminated shape", "ends shape"],
)
def test_bad_input(changes: dict[str, Tensor], error: type[Exception], text: str) -> None:
    one = torch.ones(3)
    arguments = {"state_value": one, "next_state_value": one, "reward": one, "done": flags(of=3)}
    with pytest.raises(error, match=re.escape(text)):
        gae(0.9, 0.8, **{**arguments, **changes})
