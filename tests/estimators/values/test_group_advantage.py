"""`GroupAdvantage` against a plain loop over runs and groups, and what it refuses."""

import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical

from flatroll.estimators import ClipPPOLoss, GroupAdvantage

OPTIONS = [(std, others) for std in (False, True) for others in (False, True)]


def batch_of(lengths: list[int], groups: list[int], seed: int = 0, dtype: Any = torch.float64) -> TensorDict:
    """A flat batch of runs of these lengths in these groups; runs that follow each other have other ids."""
    generator = torch.Generator().manual_seed(seed)
    run = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rows = len(run)
    done = torch.ones(rows, 1, dtype=torch.bool)
    done[:-1, 0] = run[1:] != run[:-1]
    return TensorDict(
        {
            "group": torch.tensor(groups)[run],
            "collector": {"traj_ids": run},
            "next": {"reward": torch.randn(rows, 1, generator=generator, dtype=dtype), "done": done},
        },
        [rows],
    )


def plain(batch: TensorDict, lengths: list[int], groups: list[int], std: bool, others: bool) -> list[float]:
    """The definition, run by run."""
    rewards = iter(batch["next", "reward"].flatten().tolist())
    total = [sum(next(rewards) for _ in range(length)) for length in lengths]
    members = defaultdict(list)
    for run, group in enumerate(groups):
        members[group].append(run)

    found = []
    for run, length in enumerate(lengths):
        group = members[groups[run]]
        advantage = 0.0
        if len(group) > 1:
            compared = [other for other in group if other != run or not others]
            advantage = total[run] - sum(total[other] for other in compared) / len(compared)
            if std:
                mean = sum(total[other] for other in group) / len(group)
                variance = sum((total[other] - mean) ** 2 for other in group) / (len(group) - 1)
                advantage /= variance**0.5 + 1e-4
        found += [advantage] * length
    return found


@pytest.mark.parametrize(("std", "others"), OPTIONS)
def test_each_run_is_compared_with_its_group(std: bool, others: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for seed in range(20):
        runs = int(torch.randint(2, 30, (), generator=generator))
        lengths = torch.randint(1, 6, (runs,), generator=generator).tolist()
        # numbers of groups need not be small or sorted; each group has two runs at least
        groups = [7 * (run % max(1, runs // 3)) - 5 for run in range(runs)]
        batch = batch_of(lengths, groups, seed)
        got = GroupAdvantage(std=std, leave_one_out=others)(batch)["advantage"]
        assert got.shape == (sum(lengths), 1) and got.dtype is torch.float64
        expected = plain(batch, lengths, groups, std, others)
        torch.testing.assert_close(got.flatten(), torch.tensor(expected, dtype=torch.float64))


def test_the_order_of_runs_does_not_matter() -> None:
    lengths = [3, 1, 4, 2]
    groups = [0, 1, 0, 1]
    batch = batch_of(lengths, groups)
    parts = batch.split(lengths)
    mixed = torch.cat([parts[i] for i in (2, 3, 0, 1)])
    GroupAdvantage()(batch)
    GroupAdvantage()(mixed)
    back = mixed["advantage"].split([4, 2, 3, 1])
    torch.testing.assert_close(torch.cat([back[i] for i in (2, 3, 0, 1)]), batch["advantage"])


def test_a_run_alone_has_no_advantage_and_this_is_said_once() -> None:
    batch = batch_of([2, 1, 3], [0, 0, 5])
    estimate = GroupAdvantage()
    with pytest.warns(UserWarning, match=r"1 of 2 groups have one run, whose advantage is 0: .*'group'"):
        assert estimate(batch)["advantage"][3:].flatten().tolist() == [0.0, 0.0, 0.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate(batch)


@pytest.mark.parametrize(("std", "others"), OPTIONS)
def test_equal_returns_have_no_advantage(std: bool, others: bool) -> None:
    batch = batch_of([2, 2, 2], [0, 0, 0])
    batch["next", "reward"] = torch.full((6, 1), 0.1)
    got = GroupAdvantage(std=std, leave_one_out=others)(batch)["advantage"]
    assert got.dtype is torch.float32 and got.abs().max() < 1e-6


def test_padding_belongs_to_no_group() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = TensorDict(
        {
            "group": torch.zeros(2, 3, dtype=torch.int64),
            "collector": {"mask": mask},
            "next": {
                "reward": torch.tensor([[1.0, 2.0, 50.0], [5.0, 50.0, 50.0]]),
                "done": torch.tensor([[False, True, False], [True, False, False]]),
            },
        },
        [2, 3],
    )
    got = GroupAdvantage(std=False)(batch)["advantage"]
    assert got.tolist() == [[-1.0, -1.0, 0.0], [1.0, 0.0, 0.0]]


def test_names_of_ones_own() -> None:
    batch = batch_of([1, 1], [0, 0])
    batch.rename_key_("group", "prompt")
    estimate = GroupAdvantage(group_key="prompt", advantage_key="score", std=False)
    assert estimate(batch)["score"].sum().abs() < 1e-9
    assert estimate.in_keys == ["prompt", ("next", "reward")] and estimate.out_keys == ["score"]


def test_a_loss_without_a_critic_reads_it() -> None:
    batch = batch_of([2, 3], [0, 0], dtype=torch.float32)
    batch["observation"] = torch.randn(5, 2)
    net = TensorDictModule(torch.nn.Linear(2, 3), in_keys=["observation"], out_keys=["logits"])
    head = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    policy = ProbabilisticTensorDictSequential(net, head)
    with torch.no_grad():
        policy(batch)
    loss = ClipPPOLoss(policy)(GroupAdvantage()(batch))
    loss["loss_objective"].backward()
    assert net.module.weight.grad is not None


def test_a_part_of_an_episode_is_refused() -> None:
    """The sum of its rewards is not its return."""
    estimate = GroupAdvantage()
    cut = batch_of([2, 3], [0, 0])
    cut["next", "done"][-1] = False
    with pytest.raises(ValueError, match=r"row 4 is the last one of its run, but .*'done'.* is False there"):
        estimate(cut)

    slices = batch_of([2, 3], [0, 0])
    slices["step_count"] = torch.tensor([0, 1, 7, 8, 9])
    with pytest.raises(
        ValueError, match=r"row 2 is the first one of its run, but .*'step_count'.* is 7 there"
    ):
        estimate(slices)

    slices["step_count"] = torch.tensor([[0], [1], [0], [1], [2]])
    assert "advantage" in estimate(slices)


def test_what_it_refuses() -> None:
    batch = batch_of([2, 2], [0, 0])
    estimate = GroupAdvantage()
    with pytest.raises(KeyError, match="group"):
        estimate(batch.exclude("group"))
    with pytest.raises(TypeError, match=r"must be an integer column, got torch\.float32"):
        estimate(batch.clone().set("group", torch.zeros(4)))
    with pytest.raises(TypeError, match=r"must be floating, got torch\.int64"):
        estimate(batch.clone().set(("next", "reward"), torch.zeros(4, 1, dtype=torch.int64)))
    with pytest.raises(ValueError, match="row 1 is of group 3, but its run began in group 0"):
        estimate(batch.clone().set("group", torch.tensor([0, 3, 0, 0])))
    with pytest.raises(ValueError, match="epsilon"):
        GroupAdvantage(epsilon=-1.0)
    with pytest.raises(TypeError, match="std"):
        GroupAdvantage(std="yes")  # type: ignore[arg-type]


def test_a_batch_without_rows_has_no_advantages() -> None:
    empty = batch_of([2, 3], [0, 0])[:0]
    assert GroupAdvantage()(empty)["advantage"].shape == (0, 1)
