"""`update_step` beside the loop that it stands for.

``python -m tests.estimators.test_updates`` compiles the updates of all losses with torch's own backend, and compares
them with eager ones over sizes of batches; it takes some minutes.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch._dynamo.utils import counters

from flatroll.estimators import (
    A2CLoss,
    ClipPPOLoss,
    DQNLoss,
    HardUpdate,
    LossModule,
    SACLoss,
    SoftUpdate,
    update_step,
)
from flatroll.modules import actor, critic, q_network

DISCRETE = SimpleNamespace(
    single_observation_space=gym.spaces.Box(-9, 9, (3,), np.float32),
    single_action_space=gym.spaces.Discrete(2),
)
BOX = SimpleNamespace(
    single_observation_space=DISCRETE.single_observation_space,
    single_action_space=gym.spaces.Box(-1, 1, (2,), np.float32),
)


def rows(count: int, *, box: bool = False) -> TensorDict:
    done = torch.rand(count, 1) < 0.1
    action = torch.rand(count, 2) - 0.5 if box else torch.randint(2, (count,))
    after = {"observation": torch.randn(count, 3), "reward": torch.randn(count, 1)}
    entries: dict[str, Any] = {
        "observation": torch.randn(count, 3),
        "action": action,
        "action_log_prob": -torch.rand(count),
        "advantage": torch.randn(count, 1),
        "value_target": torch.randn(count, 1),
        "state_value": torch.randn(count, 1),
        "unused": torch.zeros(count, 1),
        "next": after | {"done": done, "terminated": done},
    }
    return TensorDict(entries, [count])


def policy_gradient(kind: Any, **options: Any) -> LossModule:
    policy = actor(DISCRETE, hidden=(8,))
    loss: LossModule = kind(policy, critic(DISCRETE, hidden=(8,), actor=policy), **options)
    return loss


def sac() -> LossModule:
    return SACLoss(actor(BOX, hidden=(8,), std="dependent"), q_network(BOX, hidden=(8,)))


LOSSES: dict[str, Callable[[], LossModule]] = {
    "ClipPPOLoss": partial(policy_gradient, ClipPPOLoss, normalize_advantage=True, clip_value=0.2),
    "A2CLoss": partial(policy_gradient, A2CLoss),
    "DQNLoss": lambda: DQNLoss(q_network(DISCRETE, hidden=(8,)), double_dqn=True),
    "SACLoss": sac,
    "a linear DQNLoss": lambda: DQNLoss(nn.Linear(3, 2)),
}


def by_hand(loss: LossModule, optimizer: torch.optim.Optimizer, batch: TensorDict, most: float) -> TensorDict:
    losses: TensorDict = loss(batch)
    optimizer.zero_grad()
    total: Any = sum(value for key, value in losses.items() if key.startswith("loss"))
    total.backward()
    nn.utils.clip_grad_norm_(loss.parameters(), most)
    optimizer.step()
    return losses


def assert_same(one: nn.Module, other: nn.Module, atol: float = 1e-6) -> None:
    for (name, x), y in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", LOSSES)
def test_an_update_is_that_of_the_loop_by_hand(name: str) -> None:
    torch.manual_seed(0)
    ours = LOSSES[name]()
    theirs = deepcopy(ours)
    options: Any = {"lr": 1e-2, "weight_decay": 0.1}
    step = update_step(ours, torch.optim.Adam(ours.parameters(), **options), max_grad_norm=0.1)
    optimizer = torch.optim.Adam(theirs.parameters(), **options)
    for seed in range(3):
        batch = rows(20, box=name == "SACLoss")
        same = batch.clone()
        torch.manual_seed(seed)
        found = step(batch)
        torch.manual_seed(seed)
        losses = by_hand(theirs, optimizer, same, 0.1)
        assert set(found.keys()) == set(losses.keys()) and not any(x.requires_grad for x in found.values())
        torch.testing.assert_close(dict(found.items()), dict(losses.detach().items()))
        torch.testing.assert_close(batch.to_dict(), same.to_dict())  # the td_error, too
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    "updater", [partial(SoftUpdate, tau=0.1), partial(HardUpdate, value_network_update_interval=2)]
)
def test_target_networks_move_after_the_step(updater: Callable[[LossModule], Any]) -> None:
    ours = LOSSES["DQNLoss"]()
    theirs = deepcopy(ours)
    step = update_step(
        ours, torch.optim.SGD(ours.parameters(), 0.1), max_grad_norm=1.0, updater=updater(ours)
    )
    optimizer, target = torch.optim.SGD(theirs.parameters(), 0.1), updater(theirs)
    for _ in range(3):
        batch = rows(10)
        step(batch)
        by_hand(theirs, optimizer, batch, 1.0)
        target.step()
    assert_same(ours, theirs)


def test_any_optimizer_steps() -> None:
    for kind in (torch.optim.SGD, torch.optim.RMSprop, torch.optim.AdamW, torch.optim.Adagrad):
        ours = LOSSES["A2CLoss"]()
        theirs = deepcopy(ours)
        step = update_step(ours, kind(ours.parameters(), lr=0.01), max_grad_norm=0.5)  # type: ignore[call-arg]
        batch = rows(10)
        step(batch)
        by_hand(theirs, kind(theirs.parameters(), lr=0.01), batch, 0.5)  # type: ignore[call-arg]
        assert_same(ours, theirs)


def test_adam_takes_its_fused_step_where_that_was_left_open() -> None:
    loss: Any = LOSSES["A2CLoss"]()
    groups: list[Any] = [
        {"params": list(loss.actor_network.parameters())},
        {"params": list(loss.critic_network.parameters()), "fused": False},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    state = optimizer.state_dict()
    update_step(loss, optimizer, max_grad_norm=0.5)(rows(10))
    assert [group["fused"] for group in optimizer.param_groups] == [True, False]
    choices: list[Any] = [
        {"foreach": True},
        {"foreach": False},
        {"capturable": True},
        {"differentiable": True},
    ]
    for options in choices:
        kept = torch.optim.AdamW(loss.parameters(), lr=0.01, **options)
        update_step(loss, kept)
        assert kept.param_groups[0]["fused"] is None, options
    # a state that was saved without it is taken up
    optimizer.load_state_dict(state)
    update_step(loss, optimizer, max_grad_norm=0.5)(rows(10))


class Recorded(LossModule):
    """Keeps the rows that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.in_keys, self.out_keys = ["observation"], ["loss"]
        self.batches: list[TensorDict] = []

    def forward(self, batch: TensorDict) -> TensorDict:
        self.batches.append(batch)
        return TensorDict({"loss": (self.weight * batch["observation"]).mean()})


def test_epochs_take_every_row_once_in_a_seeded_order_and_only_entries_that_are_read() -> None:
    batch = rows(10)
    batch["observation"] = torch.arange(10.0)
    orders = []
    for _ in range(2):
        loss = Recorded()
        step = update_step(loss, torch.optim.SGD(loss.parameters(), 0.1))
        found = step.epochs(batch, epochs=3, minibatch=4, generator=torch.Generator().manual_seed(5))
        assert [len(part) for part in loss.batches] == 3 * [4, 4, 2]
        assert found.batch_size == (9,) and found["loss"].shape == (9,)
        assert not any({"unused", "advantage"} & set(part.keys()) for part in loss.batches)
        orders.append(torch.cat([part["observation"] for part in loss.batches]).reshape(3, 10))
    assert (orders[0].sort(1).values == torch.arange(10.0)).all()
    assert not torch.equal(orders[0][0], orders[0][1]) and torch.equal(*orders)


def test_epochs_of_series_keep_them_whole() -> None:
    loss = Recorded()
    batch = TensorDict({"observation": torch.arange(6.0).reshape(3, 2)}, [3, 2])
    update_step(loss, torch.optim.SGD(loss.parameters(), 0.1)).epochs(batch, epochs=1, minibatch=2)
    assert [part.shape for part in loss.batches] == [(2, 2), (1, 2)]
    assert all((part["observation"].diff() == 1).all() for part in loss.batches)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_reads_nothing_but_its_readable_keys(name: str) -> None:
    loss, batch = LOSSES[name](), rows(12, box=name == "SACLoss")
    batch["base_sample", "action"] = batch["action"] * 1.0
    batch["steps_to_next_obs"] = torch.ones(12, 1, dtype=torch.int64)
    batch["priority_weight"], batch["collector", "mask"] = torch.rand(12), torch.rand(12) < 0.5
    keys = [key for key in loss.readable_keys if key in batch.keys(True)]
    assert "unused" not in keys
    found = []
    for part in (batch.clone(), batch.select(*keys)):
        torch.manual_seed(0)
        found.append(dict(loss(part).detach().items()))
    torch.testing.assert_close(*found)


def test_what_is_no_update_is_refused() -> None:
    loss, other = LOSSES["DQNLoss"](), LOSSES["DQNLoss"]()
    adam = torch.optim.Adam(loss.parameters())
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "loss must be a loss of flatroll", lambda: update_step(nn.Linear(1, 1), adam)),  # type: ignore[arg-type]
        (TypeError, "optimizer must be an optimizer", lambda: update_step(loss, None)),  # type: ignore[arg-type]
        (ValueError, "max_grad_norm must be", lambda: update_step(loss, adam, max_grad_norm=0.0)),
        (TypeError, "updater must be", lambda: update_step(loss, adam, updater=3)),  # type: ignore[arg-type]
        (ValueError, "of another loss", lambda: update_step(loss, adam, updater=SoftUpdate(other, tau=0.1))),
        (ValueError, "float16 needs a GradScaler", lambda: update_step(loss, adam, autocast=torch.float16)),
        (ValueError, "create it from loss.parameters", lambda: update_step(other, adam)),
        (TypeError, "batch must be a tensordict", lambda: update_step(loss, adam)([1])),  # type: ignore[arg-type]
        (ValueError, "epochs must be", lambda: update_step(loss, adam).epochs(rows(3), epochs=0)),
        (ValueError, "minibatch must be", lambda: update_step(loss, adam).epochs(rows(3), minibatch=0)),
        (ValueError, "rows must not be empty", lambda: update_step(loss, adam).epochs(rows(0))),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    loss.reduction = "none"
    with pytest.raises(ValueError, match="use 'mean' or 'sum'"):
        update_step(loss, adam)(rows(3))


def test_shuffled_rows_are_refused_for_a_recurrent_network() -> None:
    loss = DQNLoss(q_network(DISCRETE, hidden=(8, 8), recurrent="gru"))
    step = update_step(loss, torch.optim.Adam(loss.parameters()))
    with pytest.raises(ValueError, match=r"rows must be \[B, T\] for a recurrent network"):
        step.epochs(rows(3))


def compare_compiled(name: str, sizes: tuple[int, ...]) -> float:
    """Compare compiled updates with eager ones; return the seconds of compiling."""
    torch.manual_seed(0)
    ours = LOSSES[name]()
    theirs = deepcopy(ours)
    groups: list[Any] = []
    for loss in (ours, theirs):
        first, *others = [x for x in loss.parameters() if x.requires_grad]
        groups.append([{"params": [first], "lr": 0.02}, {"params": others}])
    adams = [torch.optim.AdamW(group, lr=1e-2, weight_decay=0.1) for group in groups]
    updaters = [SoftUpdate(x, tau=0.1) if x.delayed_networks() else None for x in (ours, theirs)]
    options: Any = {"max_grad_norm": 0.1}
    compiled = update_step(ours, adams[0], compile=True, updater=updaters[0], **options)
    eager = update_step(theirs, adams[1], updater=updaters[1], **options)
    counters.clear()
    for seed, size in enumerate(sizes):
        for optimizer in adams:
            optimizer.param_groups[0]["lr"] = 1e-2 / (seed + 1)
        batch = rows(size, box=name == "SACLoss")
        found, same = [], batch.clone()
        for step, data in ((compiled, batch), (eager, same)):
            torch.manual_seed(seed)
            found.append(dict(step(data).items()))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            batch.to_dict(), same.to_dict(), rtol=1e-5, atol=1e-5
        )  # a small difference
        assert_same(ours, theirs)
        state, other = adams[0].state_dict()["state"], adams[1].state_dict()["state"]
        assert state.keys() == other.keys()
        torch.testing.assert_close(state, other, rtol=1e-5, atol=1e-6)
    assert compiled.compiled and counters["stats"]["unique_graphs"] == 1
    return compiled.compile_seconds


def test_one_graph_for_all_sizes_with_the_gradients_of_the_eager_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the graph without C++: its making is torch's matter, and takes ten times as long
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert compare_compiled("a linear DQNLoss", (64, 3, 5, 200)) > 0


class Unreadable(Recorded):
    def forward(self, batch: TensorDict) -> TensorDict:
        torch._dynamo.graph_break()
        return super().forward(batch)


def test_what_cannot_be_compiled_runs_eagerly_with_one_warning() -> None:
    loss = Unreadable()
    step = update_step(loss, torch.optim.SGD(loss.parameters(), 0.5), compile=True)
    with pytest.warns(
        UserWarning, match=r"failed at .*test_updates.py:\d+: User-inserted graph break"
    ) as told:
        step(TensorDict({"observation": torch.ones(4)}, [4]))
    assert "torch.compile(loss, fullgraph=True)(batch) shows" in str(told[0].message)
    assert not step.compiled and float(loss.weight.detach()) == 0.5
    step(TensorDict({"observation": torch.ones(4)}, [4]))  # warnings are errors here
    assert float(loss.weight.detach()) == 0.0


def test_a_batch_that_the_loss_cannot_read_raises_its_own_error() -> None:
    loss = LOSSES["DQNLoss"]()
    before: list[Tensor] = [x.clone() for x in loss.parameters()]
    step = update_step(loss, torch.optim.Adam(loss.parameters()), compile=True)
    with pytest.raises(KeyError, match="terminated"):
        step(rows(4).exclude(("next", "terminated")))
    assert step.compiled and all(map(torch.equal, before, loss.parameters()))


if __name__ == "__main__":
    torch._inductor.config.fallback_random = True  # type: ignore[attr-defined]
    for which in LOSSES:
        print(which, f"{compare_compiled(which, (64, 8, 5, 2, 300, 2048)):.1f} s to compile", flush=True)
