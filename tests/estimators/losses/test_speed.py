"""What makes an update cheap changes no number: no diagnostics, shorter ways to entries, one graph of torch.compile."""

from functools import reduce
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from benchmarks import bench_updates
from flatroll.estimators import (
    GAE,
    A2CLoss,
    ClipPPOLoss,
    DiscreteSACLoss,
    DQNLoss,
    KLPENPPOLoss,
    LossModule,
    PPOLoss,
    ReinforceLoss,
    SACLoss,
)
from flatroll.layout.tensordict_seam import get_entry
from flatroll.modules import actor as actor_for
from flatroll.modules import critic as critic_for
from flatroll.rollouts import rollout

POLICY = [ClipPPOLoss, PPOLoss, KLPENPPOLoss, A2CLoss, ReinforceLoss]


def loss_of(kind: Any, **options: Any) -> LossModule:
    """The loss on new networks, which are the same at each call."""
    torch.manual_seed(0)
    if kind in (DQNLoss, SACLoss):
        ours = (bench_updates.dqn() if kind is DQNLoss else bench_updates.sac()).ours
        network = ours.value_network if kind is DQNLoss else None
        return kind(
            *([ours.actor_network, [*ours.qvalue_network]] if network is None else [network]), **options
        )
    ours = bench_updates.ppo().ours
    if kind is DiscreteSACLoss:
        return kind(ours.actor_network, [bench_updates.dqn().ours.value_network for _ in range(2)], **options)
    return kind(ours.actor_network, ours.critic_network, **options)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [*POLICY, DQNLoss, SACLoss, DiscreteSACLoss])
def test_without_diagnostics_losses_and_gradients_are_the_same(kind: Any, padded: bool) -> None:
    torch.manual_seed(1)
    batch = bench_updates.rows(16, continuous=kind is SACLoss)
    batch["logits"] = torch.randn(16, 4)
    if padded:
        batch["collector"] = TensorDict({"mask": torch.arange(16) < 12}, [16])
    found = []
    for options in ({}, {"diagnostics": False}):
        loss, given = loss_of(kind, **options), batch.clone()
        torch.manual_seed(2)
        out = loss(given)
        assert sorted(loss.out_keys) == sorted(out.keys())
        losses = {name: value for name, value in out.items() if name.startswith("loss")}
        sum(losses.values()).backward()
        gradients = {name: x.grad for name, x in loss.named_parameters() if x.grad is not None}
        found.append((losses, gradients, get_entry(given, "td_error"), set(out.keys())))
    (losses, gradients, error, all_keys), (same, equal, again, fewer) = found
    assert fewer == set(losses) < all_keys
    torch.testing.assert_close(same, losses, rtol=0, atol=0)
    torch.testing.assert_close(equal, gradients, rtol=0, atol=0)
    assert error is again is None or torch.equal(error, again)


@pytest.mark.parametrize("name", bench_updates.CASES)
def test_the_benchmark_compares_equal_losses(name: str) -> None:
    torch.manual_seed(0)
    batch = bench_updates.rows(32, continuous=name == "SACLoss")
    for update in bench_updates.updates(bench_updates.CASES[name](), batch).values():  # asserts it
        update()


@pytest.mark.parametrize("kind", [ClipPPOLoss, DQNLoss])
def test_torch_compile_takes_a_loss_without_diagnostics_into_one_graph(kind: Any) -> None:
    torch.manual_seed(1)
    loss, batch = loss_of(kind, diagnostics=False), bench_updates.rows(16, continuous=False)
    expected = loss(batch.copy())
    torch.compiler.reset()
    compiled: Any = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(batch.copy()).to_dict(), expected.to_dict())


def test_ppo_with_an_actor_of_bounded_actions_compiles_into_one_graph() -> None:
    torch.manual_seed(0)
    env = gym.make_vec("Pendulum-v1", num_envs=2)
    policy, value = actor_for(env), critic_for(env)
    batch = GAE(gamma=0.9, lmbda=0.9, value_network=value)(rollout(env, policy, num_steps=8, seed=0))
    loss = ClipPPOLoss(policy, value, entropy_bonus=False)  # an entropy that is drawn differs
    expected = loss(batch.copy())
    torch.compiler.reset()
    compiled: Any = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(batch.copy()).to_dict(), expected.to_dict())


def weights_after_updates(kind: Any, batch: TensorDict, compiled: bool) -> dict[str, Any]:
    """A loss's parameters after two updates; torch takes the backward pass along with the loss that it compiles."""
    loss = loss_of(kind, diagnostics=False)
    optimizer = torch.optim.Adam([x for x in loss.parameters() if x.requires_grad])
    total: Any = lambda given: reduce(torch.add, loss(given).values())  # noqa: E731
    step: Any = optimizer.step
    if compiled:
        total = torch.compile(total, fullgraph=True, backend="aot_eager")
        if (
            kind is DQNLoss
        ):  # torch breaks the graph of an optimizer's step by itself, so no fullgraph; once will do
            step = torch.compile(step, backend="eager")
    torch.manual_seed(3)
    for _ in range(2):
        optimizer.zero_grad()
        total(batch.copy()).backward()
        step()
    return {name: x.detach() for name, x in loss.named_parameters()}


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("kind", [ClipPPOLoss, DQNLoss, pytest.param(SACLoss, marks=pytest.mark.long)])
def test_torch_compile_takes_an_update_in_whole_graphs(kind: Any) -> None:
    torch.manual_seed(1)
    batch = bench_updates.rows(16, continuous=kind is SACLoss)
    torch.compiler.reset()
    expected, found = (weights_after_updates(kind, batch, compiled) for compiled in (False, True))
    torch.testing.assert_close(found, expected)
    first = {name: x.detach() for name, x in loss_of(kind).named_parameters()}
    assert any(not torch.equal(found[name], first[name]) for name in first)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [ClipPPOLoss, DQNLoss])
def test_a_loss_is_recorded_in_a_cuda_graph(kind: Any) -> None:
    torch.manual_seed(1)
    loss, batch = (
        loss_of(kind, diagnostics=False).cuda(),
        bench_updates.rows(16, continuous=False).to("cuda"),
    )
    compute: Any = lambda: reduce(torch.add, loss(batch).values())  # noqa: E731
    expected, graph, aside = compute().detach(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(aside):  # type: ignore[no-untyped-call]
        for _ in range(3):
            compute().backward()
    torch.cuda.current_stream().wait_stream(aside)
    loss.zero_grad()
    with torch.cuda.graph(graph):
        total = compute()
        total.backward()
    graph.replay()
    torch.testing.assert_close(total.detach(), expected)


def test_a_loss_leaves_the_batch_but_for_the_priority_as_it_is() -> None:
    for kind in (ClipPPOLoss, DQNLoss, SACLoss):
        batch = bench_updates.rows(8, continuous=kind is SACLoss)
        before = {key: (value, value.clone()) for key, value in batch.items(True, True)}
        loss_of(kind)(batch)
        left = dict(batch.items(True, True))
        assert set(left) - set(before) <= {"td_error"}
        for key, (value, copy) in before.items():
            assert left[key] is value and torch.equal(value, copy)


def test_a_critic_reads_what_the_actor_writes_now_and_not_what_the_batch_holds() -> None:
    """Of an actor whose outputs nobody reads, nothing is written; any other critic must find them."""
    batch = bench_updates.rows(8, continuous=False)
    batch["logits"] = torch.full((8, 4), torch.nan)  # written when the policy acted
    actor = bench_updates.ppo().ours.actor_network
    expected = actor(batch.copy())["logits"].detach()
    read: list[Any] = []

    class Whole(TensorDictModule):
        def forward(self, tensordict: Any, *args: Any, **kwargs: Any) -> Any:
            read.append(tensordict["logits"].detach())
            return tensordict.set("state_value", tensordict["observation"][:, :1])

    plain = TensorDictModule(
        lambda logits: read.append(logits.detach()) or logits[:, :1], ["logits"], ["state_value"]
    )
    chain = TensorDictSequential(plain)
    whole = Whole(nn.Identity(), ["observation"], ["state_value"])  # reads what it does not name
    for critic in (plain, chain, whole):
        ClipPPOLoss(actor, critic)(batch)
        torch.testing.assert_close(read.pop(), expected)
        assert bool(batch["logits"].isnan().all()) and "state_value" not in batch


def test_an_action_out_of_range_is_refused_with_its_range() -> None:
    for action in (4, -1):
        batch = bench_updates.rows(8, continuous=False)
        batch["action"][3] = action
        with pytest.raises(ValueError, match="one of the 4 that value_network evaluates"):
            loss_of(DQNLoss)(batch)


def test_a_wrong_keyword_of_a_distribution_is_told_by_tensordict() -> None:
    head = bench_updates.actor(nn.Linear(8, 4), ["logitz"], torch.distributions.Categorical)
    batch = bench_updates.rows(8, continuous=False)
    with pytest.raises(TypeError, match="must match"):
        ClipPPOLoss(head)(batch)
