"""Losses of random distributions, saturated ones included, against float64: values and gradients.

``python tests/estimators/test_distributions_fuzz.py 10000 1`` runs 10,000 cases from seed 1 on.
"""

import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import (
    AffineTransform,
    Categorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)
from torch.nn import functional as F

from flatroll.estimators import A2CLoss, ClipPPOLoss, DiscreteSACLoss, PPOLoss, ReinforceLoss, SACLoss
from flatroll.layout.tensordict_seam import call_policy
from flatroll.modules import SquashedGaussian

KINDS = ("torchrl", "torch", "cached", "independent", "rows", "composite", "masked", "flatroll")
EPS = torch.finfo(torch.float32).eps


class Squashed(TransformedDistribution):
    """A Normal through tanh into [-limit, limit]; how it is built does not change what it is."""

    def __init__(
        self, loc: Tensor, scale: Tensor, limit: float = 1.0, cache: int = 0, events: int = 1
    ) -> None:
        base: Any = Normal(loc, scale)
        transforms: list[Any] = [TanhTransform(cache_size=cache)]
        transforms += [AffineTransform(0.0, limit)] if limit != 1.0 else []
        super().__init__(Independent(base, events) if events else base, transforms)


class SquashedThenIndependent(Independent):
    def __init__(self, loc: Tensor, scale: Tensor, limit: float = 1.0) -> None:
        super().__init__(Squashed(loc, scale, limit, events=0), 1)


def torchrl_squashed(loc: Tensor, scale: Tensor, limit: float = 1.0) -> Any:
    from torchrl.modules import TanhNormal

    return TanhNormal(loc, scale, low=-limit, high=limit)


def flatroll_squashed(loc: Tensor, scale: Tensor, limit: float = 1.0) -> Any:
    return SquashedGaussian(loc, scale, low=-limit, high=limit)


class Given(nn.Module):
    """A network whose outputs are its parameters, of which each row has its own."""

    def __init__(self, **columns: Tensor) -> None:
        super().__init__()
        self.columns = nn.ParameterDict()  # made from a dict, it would sort the names
        for key, x in columns.items():
            self.columns[key] = nn.Parameter(x)

    def forward(self, row: Tensor) -> tuple[Tensor, ...]:
        return tuple(x[row.squeeze(-1)] for x in self.columns.values())


class Worth(nn.Module):
    """Q(s, a): the sum of all numbers of the action, each times 1, 2, ..."""

    def forward(self, row: Tensor, action: Any) -> Tensor:
        parts = [action] if isinstance(action, Tensor) else [action["arm"], action["leg"]]
        joined = torch.cat(parts, -1)
        return (joined * torch.arange(1, joined.shape[-1] + 1)).sum(-1, keepdim=True)


def sampler(keys: Any, distribution_class: Any, out: list[Any], **options: Any) -> Any:
    return ProbabilisticTensorDictModule(
        keys,
        out,
        distribution_class=distribution_class,
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
        **options,
    )


class Case:
    """An actor with a random distribution, rows that it acted in, and what a float64 program says of them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.rows, self.dims = int(torch.randint(1, 9, ())), int(torch.randint(1, 5, ()))
        self.limit = 1.0 if torch.rand(()) < 0.5 else float(torch.rand(()) * 4 + 0.1)
        self.parts = ["arm", "leg"] if self.kind == "composite" else [""]
        columns = {}
        for part in self.parts:
            most = 10.0 ** float(torch.empty(()).uniform_(-1, math.log10(50)))
            columns[f"loc{part}"] = torch.empty(self.rows, self.dims).uniform_(-most, most)
            columns[f"scale{part}"] = 10.0 ** torch.empty(self.rows, self.dims).uniform_(-3, 1)
        self.given = Given(**columns)
        options: dict[str, Any] = {"limit": self.limit}
        if self.kind == "composite":
            places: list[Any] = [("params", p, name) for p in self.parts for name in ("loc", "scale")]
            made = {"arm": Squashed, "leg": torchrl_squashed}
            names = {part: ("action", part) for part in self.parts}
            head = sampler(
                ["params"],
                CompositeDistribution,
                list(names.values()),
                distribution_kwargs={
                    "distribution_map": made,
                    "name_map": names,
                    "extra_kwargs": dict.fromkeys(self.parts, options),
                },
            )
        else:
            places = ["loc", "scale"]
            kind: Any = {
                "torchrl": torchrl_squashed,
                "flatroll": flatroll_squashed,
                "independent": SquashedThenIndependent,
            }.get(self.kind, Squashed)
            if self.kind in ("cached", "rows"):
                options |= {"cache": 1} if self.kind == "cached" else {"events": 0}
            head = sampler(places, kind, ["action"], distribution_kwargs=options)
        net: Any = TensorDictModule(self.given, ["row"], places)
        self.actor = ProbabilisticTensorDictSequential(net, head)
        self.keys: list[Any] = [("action", p) if p else "action" for p in self.parts]
        self.batch = TensorDict({"row": torch.arange(self.rows).unsqueeze(-1)}, [self.rows])
        with torch.no_grad():
            self.batch = call_policy(self.actor, self.batch).clone()
        self.batch["advantage"] = torch.randn(self.rows, 1)
        ends = torch.rand(self.rows, 1) < 0.3
        self.batch["next"] = TensorDict(
            {
                "row": torch.randint(self.rows, (self.rows, 1)),
                "reward": torch.randn(self.rows, 1),
                "done": ends,
                "terminated": ends,
            },
            [self.rows],
        )

    def exact(self) -> dict[str, Tensor]:
        """The parameters in float64, as leaves."""
        return {key: x.detach().double().requires_grad_() for key, x in self.given.columns.items()}

    def score(self, columns: dict[str, Tensor], bases: list[Tensor], at: Tensor) -> Tensor:
        """Log-probability of base samples ``[rows, dims]`` of the parts, in rows ``at``, in float64."""
        total = torch.zeros(len(at), dtype=torch.float64)
        for part, base in zip(self.parts, bases, strict=True):
            loc, scale = columns[f"loc{part}"][at], columns[f"scale{part}"][at]
            normal = -0.5 * ((base - loc) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)
            slope = 2 * (math.log(2) - base - F.softplus(-2 * base)) + math.log(self.limit)
            total = total + (normal - slope).sum(-1)
        return total

    def drawn(self, columns: dict[str, Tensor], at: Tensor) -> list[Tensor]:
        """The base samples that torch's generator gives next, in float64."""
        noise = [torch.normal(torch.zeros(len(at), self.dims), 1.0).double() for _ in self.parts]
        return [
            columns[f"loc{part}"][at] + columns[f"scale{part}"][at] * x
            for part, x in zip(self.parts, noise, strict=True)
        ]

    def worth(self, bases: list[Tensor]) -> Tensor:
        actions = torch.cat([self.limit * base.tanh() for base in bases], -1)
        return (actions * torch.arange(1, actions.shape[-1] + 1)).sum(-1)

    def compare(self, found: Tensor, expected: Tensor, columns: dict[str, Tensor]) -> None:
        """A loss and its gradients are those of the float64 program, up to rounding of float32."""
        self.given.zero_grad()
        found.backward()
        expected.backward()
        assert found.isfinite()
        # a sample is rounded to eps * |loc|, which is so many deviations
        worst = max(
            float(
                (x.detach().abs() + 10).max() / self.given.columns[key.replace("loc", "scale")].detach().min()
            )
            for key, x in columns.items()
            if key.startswith("loc")
        )
        sizes = 1.0 + abs(float(expected.detach()))
        torch.testing.assert_close(
            found.detach().double(), expected.detach(), rtol=1e-4, atol=5 * EPS * worst * sizes + 1e-3
        )
        for key, x in columns.items():
            gradient = self.given.columns[key].grad
            assert gradient is not None and gradient.isfinite().all()
            assert x.grad is not None
            loc, scale = (
                self.given.columns[key.replace("loc", name).replace("scale", name)].detach().double()
                for name in ("loc", "scale")
            )
            # the sample is rounded by eps * |loc|, which moves the gradient by that over scale ** 2
            atol = 1e-4 + 50 * EPS / scale * (1.0 + loc.abs() / scale)
            error = (gradient.double() - x.grad).abs() - 1e-3 * x.grad.abs() - atol
            assert (error <= 0).all(), (key, gradient, x.grad)

    def check(self) -> None:
        everywhere, columns = torch.arange(self.rows), self.exact()
        bases = [
            self.batch["base_sample", *(k if isinstance(k, tuple) else (k,))].double() for k in self.keys
        ]
        score = self.score(columns, bases, everywhere)
        if self.kind != "composite":
            written = self.batch["action_log_prob"]
            written = written.sum(-1) if written.ndim > 1 else written
            torch.testing.assert_close(written.double(), score.detach(), rtol=1e-5, atol=1e-3)
        # as it acted: all ratios are 1
        for kind in (PPOLoss, ClipPPOLoss):
            out = kind(self.actor)(self.batch)
            assert out["max_ratio"] == pytest.approx(1.0, abs=1e-2) and out["loss_entropy"].isfinite()
            assert out["kl_approx"].abs() < 1e-3
        advantage = self.batch["advantage"].squeeze(-1).double()
        expected = -(score * advantage).mean()
        for kind, name in ((A2CLoss, "loss_objective"), (ReinforceLoss, "loss_actor")):
            for x in columns.values():
                x.grad = None
            self.compare(kind(self.actor)(self.batch)[name], expected, columns)
            expected = -(self.score(columns, bases, everywhere) * advantage).mean()
        self.check_sac()

    def check_sac(self) -> None:
        critic = TensorDictModule(Worth(), ["row", "action"], ["state_action_value"])
        loss = SACLoss(self.actor, [critic], alpha_init=0.5, fixed_alpha=True, loss_function="l1")
        loss.make_value_estimator(gamma=0.9)
        torch.manual_seed(7)
        out = loss(self.batch)
        torch.manual_seed(7)
        columns, after = self.exact(), self.batch["next", "row"].squeeze(-1)
        following = self.drawn(columns, after)
        value = self.worth(following) - 0.5 * self.score(columns, following, after)
        alive = ~self.batch["next", "terminated"].squeeze(-1)
        target = self.batch["next", "reward"].squeeze(-1).double() + 0.9 * alive * value
        chosen = self.worth([self.batch["base_sample"].get(key).double() for key in self.keys])
        error = (chosen - target).detach().abs()
        # the sample is rounded to float32 before it is scored
        rounding = (
            40
            * EPS
            * (1 + max(float(x.detach().abs().max()) for x in following))
            / min(float(x.detach().min()) for key, x in columns.items() if key.startswith("scale"))
        )
        torch.testing.assert_close(out["loss_qvalue"].double(), error.mean(), rtol=1e-4, atol=rounding + 1e-3)
        everywhere = torch.arange(self.rows)
        acted = self.drawn(columns, everywhere)
        expected = (0.5 * self.score(columns, acted, everywhere) - self.worth(acted)).mean()
        self.compare(out["loss_actor"], expected, columns)


def check_masked(seed: int) -> None:
    """Choices of which some are masked out: logits of -inf."""
    torch.manual_seed(seed)
    rows, count = int(torch.randint(1, 9, ())), int(torch.randint(2, 7, ()))
    mask = torch.rand(rows, count) < 0.5
    mask[torch.arange(rows), torch.randint(count, (rows,))] = True
    given = Given(logits=torch.empty(rows, count).uniform_(-50, 50))

    def masked(row: Tensor) -> Tensor:
        at = row.squeeze(-1)
        return given(row)[0].masked_fill(~mask[at], -math.inf)

    net: Any = TensorDictModule(masked, ["row"], ["logits"])
    actor = ProbabilisticTensorDictSequential(net, sampler(["logits"], Categorical, ["action"]))
    batch = TensorDict({"row": torch.arange(rows).unsqueeze(-1)}, [rows])
    with torch.no_grad():
        batch = call_policy(actor, batch).clone().exclude("logits")
    assert mask[torch.arange(rows), batch["action"]].all()
    batch["advantage"] = torch.randn(rows, 1)
    ends = torch.zeros(rows, 1, dtype=torch.bool)
    batch["next"] = TensorDict(
        {
            "row": torch.randint(rows, (rows, 1)),
            "reward": torch.randn(rows, 1),
            "done": ends,
            "terminated": ends,
        },
        [rows],
    )
    worth = torch.randn(rows, count)
    exact = given.columns["logits"].detach().double().requires_grad_()
    log_prob = torch.where(mask, exact, -math.inf).log_softmax(-1)
    log_prob = torch.where(mask, log_prob, 0.0)
    probability = torch.where(mask, log_prob.exp(), 0.0)
    # the objective of PPO, its entropy, and the actor's loss of discrete SAC
    ppo = PPOLoss(actor)(batch)
    assert ppo["max_ratio"] == pytest.approx(1.0, abs=1e-4)
    chosen = log_prob[torch.arange(rows), batch["action"]]
    advantage = batch["advantage"].squeeze(-1).double()
    entropy = -(probability * log_prob).sum(-1).mean()
    objective = -((chosen - chosen.detach()).exp() * advantage).mean() - 0.01 * entropy
    values = TensorDictModule(lambda row: worth[row.squeeze(-1)], ["row"], ["action_value"])
    sac = DiscreteSACLoss(actor, [values], alpha_init=3.0, fixed_alpha=True, loss_function="l1")(batch)
    soft = (probability * (3.0 * log_prob - worth)).sum(-1)
    target = batch["next", "reward"].squeeze(-1) - 0.99 * soft[batch["next", "row"].squeeze(-1)]
    error = worth[torch.arange(rows), batch["action"]] - target.detach()
    torch.testing.assert_close(sac["loss_qvalue"].double(), error.abs().mean(), rtol=1e-4, atol=1e-4)
    for found, expected in (
        (ppo["loss_objective"] + ppo["loss_entropy"], objective),
        (sac["loss_actor"], soft.mean()),
    ):
        given.zero_grad()
        exact.grad = None
        torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=1e-4, atol=1e-4)
        found.backward()
        expected.backward(retain_graph=True)
        torch.testing.assert_close(given.columns["logits"].grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def check(seed: int) -> str:
    kind = KINDS[seed % len(KINDS)]
    if kind == "masked":
        check_masked(seed)
    else:
        Case(seed).check()
    return kind


@contextmanager
def torchrl_imported() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing torchrl warns about packages that are not there
        pytest.importorskip("torchrl.modules")
    yield


@pytest.mark.parametrize("first", range(0, 6 * len(KINDS), len(KINDS)))
def test_losses_and_gradients_are_those_of_float64(first: int) -> None:
    with torchrl_imported():
        for seed in range(first, first + len(KINDS)):
            check(seed)


if __name__ == "__main__":
    cases, first = int(sys.argv[1]), int(sys.argv[2])
    done: Counter[str] = Counter()
    with torchrl_imported():
        for seed in range(first, first + cases):
            try:
                done[check(seed)] += 1
            except Exception as error:
                print(f"seed {seed}, {KINDS[seed % len(KINDS)]}: {type(error).__name__}: {error}"[:600])
                done["failed"] += 1
    print(dict(done))
    raise SystemExit(bool(done["failed"]))
