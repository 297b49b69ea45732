"""Calls public names with one wrong argument: each error must be flatroll's own and name that argument.

    PYTHONPATH=src:tests/support python -m wrong_arguments N SEED [NAME ...]

makes N calls and prints those whose error comes from elsewhere (Python, torch, NumPy, numba, tensordict), or does not
name the argument. A call that succeeds is right: not every wrong value can be told. An error of the system, such as a
file that is not there, is right, too, as is one of a user's network with a note that names the argument.
"""

import dis
import importlib
import inspect
import math
import random
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from flatroll import (
    buffers,
    deploy,
    disk,
    estimators,
    export,
    kernels,
    layout,
    modules,
    rollouts,
    sharing,
    specs,
    trees,
    wrappers,
)
from flatroll.wrappers import testing

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / folder) for folder in ("src", "wrappers", "buffers", "estimators", "examples"))


@dataclass
class Case:
    """A callable, fresh valid arguments, and what is done with what it returns."""

    name: str
    call: Callable[..., Any]
    valid: Callable[[], dict[str, Any]]
    use: Callable[[Any], object] = lambda made: None
    more: tuple[str, ...] = ()  # arguments that the signature hides behind **options
    long: tuple[str, ...] = ()  # arguments of which a huge value is legal, and takes as long
    free: tuple[str, ...] = ()  # arguments that take anything
    called: tuple[str, ...] = ()  # arguments that are the user's functions, whose own errors pass unchanged
    names: dict[str, str] = field(default_factory=dict)  # by what else an error may call an argument

    def arguments(self) -> list[str]:
        """The names of the arguments to be wrong."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found = [name for name, one in inspect.signature(self.call).parameters.items() if one.kind in kinds]
        return [name for name in (*found, *self.more) if name not in (*self.free, "loss", "cls")]


def wrong_values() -> dict[str, Any]:
    """Values that few arguments take."""
    return {
        "None": None,
        "empty string": "",
        "string": "text",
        "number as string": "3",
        "minus one": -1,
        "zero": 0,
        "fraction": 1.5,
        "nan": math.nan,
        "inf": math.inf,
        "huge": 10**30,
        "True": True,
        "bytes": b"x",
        "object": object(),
        "empty list": [],
        "empty tuple": (),
        "empty dict": {},
        "list of None": [None],
        "list of numbers": [1, 2],
        "nested list": [[1, 2], [3]],
        "scalar tensor": torch.tensor(2),
        "empty tensor": torch.zeros(0),
        "int matrix": torch.zeros(2, 3, dtype=torch.int64),
        "meta tensor": torch.zeros(3, device="meta"),
        "array": np.array([1.0, 2.0]),
        "NumPy nan": np.float64("nan"),
        "function": lambda: None,
        "dtype": torch.float16,
        "type": int,
        "empty tensordict": TensorDict({}, []),
        "complex": 1j,
        "linear": nn.Linear(2, 2),
    }


def wrong_tensors(valid: torch.Tensor) -> dict[str, Any]:
    """A tensor with another dtype, shape, device or class, or with other numbers."""
    changed: dict[str, Any] = {
        "float64": valid.double(),
        "float16": valid.half(),
        "int64": valid.long(),
        "bool": valid.bool(),
        "complex": valid.to(torch.complex64),
        "meta": torch.empty_like(valid, device="meta"),
        "array": valid.detach().numpy(),
        "list": valid.tolist(),
        "a dim more": valid.unsqueeze(-1),
        "a dim in front": valid.unsqueeze(0),
        "first": valid[:1],
        "none": valid[:0],
        "one row less": valid[:-1],
        "flat": valid.flatten(),
        "one number": valid.flatten()[0],
        "sparse": valid.to_sparse() if valid.dtype != torch.bool else valid,
    }
    if valid.is_floating_point():
        changed |= {"all nan": valid * math.nan, "all inf": valid + math.inf, "huge": valid * 1e30}
    elif valid.dtype != torch.bool:
        changed |= {"negative": -valid - 1, "huge": valid + 2**62}
    return changed


def wrong_batches(valid: TensorDictBase) -> dict[str, Any]:
    """A batch without an entry, with a wrong one, of another shape, or of another class."""
    if not valid.batch_dims:
        return {}
    changed: dict[str, Any] = {
        "dict": valid.to_dict(),
        "no rows": valid[:0],
        "one row": valid[0],
        "two dims": valid[None],
        "meta": valid.to("meta"),
        "first column": valid[next(iter(valid.keys(True, True)))],
        "stack": torch.stack([valid, valid]),
    }
    for key in valid.keys(True, True):
        column = valid[key]
        kinds: dict[str, Any] = {
            "wide": column[..., None].expand(*column.shape, 2).contiguous(),
            "double": column.double(),
            "long": column.long(),
            "nan": torch.full_like(column.float(), math.nan),
            "complex": column.to(torch.complex64),
        }
        for kind, other in kinds.items():
            changed[f"{kind} {key}"] = valid.clone().set(key, other)
        changed[f"without {key}"] = valid.clone().exclude(key)
        changed[f"text {key}"] = valid.clone().set_non_tensor(key, "text")
    return changed


def wrong(case: Case, argument: str, valid: dict[str, Any]) -> dict[str, Any]:
    """All wrong values of one argument, by their names."""
    value = valid.get(argument)
    changed = wrong_values()
    if isinstance(value, torch.Tensor):
        changed |= {f"{name} of it": one for name, one in wrong_tensors(value).items()}
    if isinstance(value, TensorDictBase):
        changed |= {f"{name} of it": one for name, one in wrong_batches(value).items()}
    if argument in (*case.called, "env", "policy"):
        for name in ("function", "type", "linear"):
            del changed[name]
    if argument in case.long:
        for name in ("huge", "inf"):
            del changed[name]
    return changed


class Stuck(Exception):
    """A call took longer than anything here takes."""


def _stuck(*_: object) -> None:
    raise Stuck("it does not end")


def fault(case: Case, argument: str, arguments: dict[str, Any], seconds: int = 60) -> str | None:
    """Make the call; what is wrong with its error, or None."""
    before = signal.signal(signal.SIGPROF, _stuck)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of processor time: a busy machine is not stuck
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.use(case.call(**arguments))
    except Exception as error:
        if isinstance(error, (OSError, ImportError)):
            return None
        value = arguments[argument]
        names = {argument, *case.names.get(argument, "").split(), *entries(arguments, argument)}
        told = repr(value) if isinstance(value, (str, int, tuple)) else None
        if isinstance(value, str) and argument in ("path", "source"):
            told = value  # of a file by its path
        return foreign(error, names, told)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return None


def entries(arguments: dict[str, Any], argument: str) -> set[str]:
    """By what an error may call a batch: as such, or one of its entries."""
    value = arguments[argument]
    if argument not in ("batch", "tensordict", "data", "sample", "td", "tensordicts", "source"):
        return set()
    keys = value.keys(True, True) if isinstance(value, TensorDictBase) else ()
    return {"batch", "rows", "data", *(str(name) for key in keys for name in layout.as_tuple(key)), *USUAL}


USUAL = (
    "observation",
    "action",
    "reward",
    "done",
    "terminated",
    "is_init",
    "traj_ids",
    "step_count",
    "truncated",
)


def foreign(error: BaseException, names: set[str], shown: str | None) -> str | None:
    """Why an error is not one of ours, or None: we raised it, and its text names the argument, or shows what came."""
    told = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    notes = " ".join(
        getattr(error, "__notes__", ())
    )  # a user's network has failed: its error is left as it is
    if any(re.search(rf"\b{re.escape(name)}\b", notes) for name in names):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    frame, _ = frames[-1]
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    here = [
        f"{Path(frame.f_code.co_filename).resolve().relative_to(ROOT)}:{line}"
        for frame, line in frames
        if str(Path(frame.f_code.co_filename).resolve()).startswith(OURS)
    ]
    place = here[-1] if here else "outside"
    assert last is not None
    if not str(Path(frame.f_code.co_filename).resolve()).startswith(OURS):
        return f"raised elsewhere, from {place}: {told}"
    operation = next(one for one in dis.get_instructions(frame.f_code) if one.offset == last.tb_lasti)
    if operation.opname not in ("RAISE_VARARGS", "RERAISE"):
        return f"not raised by a statement, {place}: {told}"
    text = str(error)
    if not (shown and shown in text) and not any(
        re.search(rf"\b{re.escape(name)}\b", text) for name in names
    ):
        return f"names no argument, {place}: {told}"
    return None


# Valid arguments -----------------------------------------------------------------------------------------------------


def env(lengths: Any = ((3, 1, 4), (2, 5), (6,))) -> Any:
    """Three scripted envs."""
    return testing.ScriptedVectorEnv(testing.Script(3, lengths=[list(one) for one in lengths]))


def batch(rows: int = 12) -> TensorDict:
    """Rows of scripted envs with what losses and estimators read."""
    generator = torch.Generator().manual_seed(0)
    made = rollouts.rollout(env(), num_steps=20, seed=0)[:rows]
    for key in ("state_value", "advantage", "value_target", ("next", "state_value")):
        made[key] = torch.rand(rows, 1, generator=generator)
    made["action_log_prob"] = -torch.rand(rows, generator=generator)
    return TensorDict(made.to_dict(), [rows])


def value() -> Any:
    """A network of values."""
    return TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"])


def policy() -> Any:
    """An actor of the scripted envs."""
    return modules.actor(env(), norm=False, hidden=(4,))


def columns(*names: str) -> dict[str, torch.Tensor]:
    """Columns of eight rows in two trajectories, by what estimators call them."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, 0, 1, 0, 0, 0, 0, 1], dtype=torch.bool)[:, None]
    flags = {"done", "terminated", "ends"}
    return {name: ends.clone() if name in flags else torch.rand(8, 1, generator=generator) for name in names}


def filled(storage: Any = None, sampler: Any = None, **options: Any) -> Any:
    """A buffer with rows."""
    storage = buffers.LazyTensorStorage(64) if storage is None else storage
    made = buffers.ReplayBuffer(
        storage=storage, sampler=sampler, batch_size=options.pop("batch_size", 8), **options
    )
    made.extend(batch(20))
    return made


def _estimators() -> Iterator[Case]:
    gamma, lmbda = {"gamma": 0.99}, {"lmbda": 0.95}
    returns = columns("next_state_value", "reward", "done")
    whole = {**returns, **columns("state_value")}
    functions: dict[str, dict[str, Any]] = {
        "generalized_advantage_estimate": {**gamma, **lmbda, **whole},
        "td0_advantage_estimate": {**gamma, **whole},
        "td0_return_estimate": {**gamma, **returns},
        "td1_advantage_estimate": {**gamma, **whole},
        "td1_return_estimate": {**gamma, **returns},
        "td_lambda_advantage_estimate": {**gamma, **lmbda, **whole},
        "td_lambda_return_estimate": {**gamma, **lmbda, **returns},
        "vtrace_advantage_estimate": {**gamma, **columns("log_pi", "log_mu"), **whole},
        "reward2go": {**gamma, **columns("reward", "done")},
    }
    for name, arguments in functions.items():
        yield Case(name, getattr(estimators, name), lambda arguments=arguments: dict(arguments))
    more = (
        "shifted",
        "differentiable",
        "skip_existing",
        "device",
        "advantage_key",
        "value_target_key",
        "value_key",
    )
    for name in ("GAE", "TDLambdaEstimator", "TD0Estimator", "TD1Estimator"):
        extra = lmbda if name in ("GAE", "TDLambdaEstimator") else {}
        cls = getattr(estimators, name)
        yield Case(
            name,
            cls,
            lambda extra=extra: {**gamma, **extra, "value_network": value()},
            lambda made: made(batch()),
            more,
        )
    yield Case(
        "VTrace",
        estimators.VTrace,
        lambda: {**gamma, "value_network": value(), "actor_network": policy()},
        lambda made: made(batch()),
        more,
    )
    gae = estimators.GAE(gamma=0.99, lmbda=0.95, value_network=value())
    for call in (
        gae,
        gae.value_estimate,
        estimators.TDLambdaEstimator(gamma=0.9, lmbda=0.9, value_network=value()),
    ):
        yield Case(
            "GAE()",
            lambda tensordict, final=None, time_dim=None, call=call: call(
                tensordict, final=final, time_dim=time_dim
            ),
            lambda: {"tensordict": batch()},
            free=("call",),
            long=(
                "tensordict",
            ),  # tensordict takes a number for the first entry, and refuses this one itself
        )
    yield Case(
        "GAE.value_estimate",
        lambda tensordict, next_value: gae.value_estimate(tensordict, next_value=next_value),
        lambda: {"tensordict": batch(), "next_value": torch.rand(12, 1)},
    )
    renamed = estimators.GAE(gamma=0.99, lmbda=0.95, value_network=value())
    yield Case("GAE.set_keys", renamed.set_keys, dict, more=("reward", "done", "value", "advantage"))

    def ppo_batch() -> TensorDict:  # with the parameters of the policy that acted, for a KL divergence
        made = batch()
        made["logits"] = torch.zeros(12, 5)
        return made

    policies = {"actor_network": policy, "critic_network": value}
    for name in ("ClipPPOLoss", "PPOLoss", "KLPENPPOLoss", "A2CLoss", "ReinforceLoss"):
        cls = getattr(estimators, name)
        options = (
            "entropy_bonus entropy_coeff samples_mc_entropy critic_coeff loss_critic_type clip_value "
            "normalize_advantage separate_losses burn_in reduction diagnostics"
        )
        if name == "ReinforceLoss":
            options = "critic_coeff loss_critic_type clip_value separate_losses burn_in reduction"
        yield Case(
            name,
            cls,
            lambda: {name: make() for name, make in policies.items()},
            lambda made: made(ppo_batch()),
            tuple(set(options.split()) - set(inspect.signature(cls).parameters)),
            long=("samples_mc_entropy", "samples_mc_kl"),
            names={
                "actor_network": "actor",
                "critic_network": "critic",
                "actor": "actor_network",
                "critic": "critic_network",
            },
        )
        loss = cls(**{name: make() for name, make in policies.items()})
        yield Case(
            f"{name}()", lambda tensordict, loss=loss: loss(tensordict), lambda: {"tensordict": ppo_batch()}
        )
    yield Case(
        "ClipPPOLoss.make_value_estimator",
        lambda value_type=None, **options: estimators.ClipPPOLoss(policy(), value()).make_value_estimator(
            value_type, **options
        ),
        dict,
        more=("gamma", "lmbda"),
    )

    def q() -> Any:
        return modules.q_network(env(), norm=False, hidden=(4,))

    yield Case("DQNLoss", estimators.DQNLoss, lambda: {"value_network": q()}, lambda made: made(batch()))
    dqn = estimators.DQNLoss(q())
    yield Case("DQNLoss()", lambda tensordict: dqn(tensordict), lambda: {"tensordict": batch()})
    options = (
        "num_qvalue_nets loss_function alpha_init min_alpha max_alpha fixed_alpha target_entropy "
        "delay_actor delay_qvalue reduction"
    )
    yield Case(
        "DiscreteSACLoss",
        estimators.DiscreteSACLoss,
        lambda: {"actor_network": policy(), "qvalue_network": q(), "num_actions": 2},
        lambda made: made(batch()),
        tuple(options.split()),
        long=("num_qvalue_nets",),
    )
    yield Case(
        "SoftUpdate",
        estimators.SoftUpdate,
        lambda: {"loss_module": estimators.DQNLoss(q()), "eps": 0.99},
        lambda made: made.step(),
    )
    yield Case(
        "HardUpdate",
        estimators.HardUpdate,
        lambda: {"loss_module": estimators.DQNLoss(q())},
        lambda made: made.step(),
    )

    def continuous() -> Any:
        network = TensorDictModule(nn.Linear(3, 4), ["observation"], ["both"])
        halves = TensorDictModule(lambda x: (x[..., :2], x[..., 2:].exp()), ["both"], ["loc", "scale"])
        head = ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=modules.Gaussian
        )
        return ProbabilisticTensorDictSequential(network, halves, head)

    def critic() -> Any:
        both = lambda seen, action: seen.sum(-1, True) + action.sum(-1, True)  # noqa: E731
        return TensorDictModule(both, ["observation", "action"], ["state_action_value"])

    def continuous_batch() -> TensorDict:
        made = batch()
        made["action"] = torch.zeros(12, 2)
        return made

    networks = {"actor_network": continuous, "qvalue_network": lambda: [critic(), critic()]}
    yield Case(
        "SACLoss",
        estimators.SACLoss,
        lambda: {name: make() for name, make in networks.items()},
        lambda made: made(continuous_batch()),
        (*options.split(), "target_entropy"),
        long=("num_qvalue_nets",),
    )
    sac = estimators.SACLoss(**{name: make() for name, make in networks.items()})
    yield Case("SACLoss()", lambda tensordict: sac(tensordict), lambda: {"tensordict": continuous_batch()})
    scale = estimators.RewardScale()
    yield Case("RewardScale", estimators.RewardScale, dict)
    yield Case(
        "RewardScale()",
        lambda tensordict: scale(tensordict),
        lambda: {"tensordict": batch()},
        long=("tensordict",),  # as of GAE
    )
    yield Case("RewardScale.update", scale.update, lambda: {"batch": batch()})
    yield Case("RewardScale.scaled", scale.scaled, lambda: {"reward": torch.rand(4, 1)})

    def trained() -> dict[str, Any]:
        loss = estimators.DQNLoss(q())
        return {"loss": loss, "optimizer": torch.optim.Adam(loss.parameters(), foreach=True)}

    yield Case("UpdateStep", estimators.UpdateStep, trained, lambda made: made(batch()))
    yield Case(
        "UpdateStep()", lambda batch: estimators.UpdateStep(**trained())(batch), lambda: {"batch": batch()}
    )
    column = columns("a", "b", "ends")
    scans: dict[str, tuple[str, ...]] = {
        "segmented_scan": ("a", "b", "ends"),
        "residual_scan": ("gamma", "decay", "reward", "value", "next_value", "terminated", "ends"),
        "return_scan": ("gamma", "lmbda", "reward", "next_value", "terminated", "ends"),
        "vtrace_scan": ("gamma", "rho", "c", "reward", "value", "next_value", "terminated", "ends"),
    }
    for name, arguments in scans.items():
        yield Case(
            name,
            getattr(kernels, name),
            lambda arguments=arguments: {key: one[:, 0] for key, one in columns(*arguments).items()},
            names={"ends": "terminated", "terminated": "ends"},
        )
    yield Case("zeroed", kernels.zeroed, lambda: {"column": column["a"], "flag": column["ends"][:, 0]})
    yield Case("critic_ensemble", estimators.critic_ensemble, lambda: {"networks": value()}, long=("number",))
    yield Case("target_copy", estimators.target_copy, lambda: {"network": value()})


def _buffers() -> Iterator[Case]:
    def stored(storage: Any) -> None:
        filled(storage).sample()

    def sampled(sampler: Any) -> None:
        filled(sampler=sampler).sample()

    def transformed(transform: Any) -> None:
        filled(transform=transform).sample()

    def of_key(cls: Any) -> Any:
        return lambda key: cls(key)

    names = {"size": "max_size", "members": "transforms"}
    for name, use in {
        "LazyTensorStorage": stored,
        "ListStorage": lambda one: None,
        "LazyStackStorage": lambda one: None,
        "LazyMemmapStorage": stored,
    }.items():
        yield Case(
            name, getattr(buffers, name), lambda: {"max_size": 64}, use, long=("max_size",), names=names
        )
    yield Case("TensorStorage", buffers.TensorStorage, lambda: {"storage": torch.zeros(8)}, names=names)
    yield Case(
        "DiskStorage",
        buffers.DiskStorage,
        lambda: {"max_size": 64, "path": tempfile.mkdtemp()},
        long=("max_size",),
    )
    slices = {"slice_len": 2}
    priority = {"max_capacity": 64, "alpha": 0.6, "beta": 0.4}
    for name, arguments in {
        "RandomSampler": {},
        "SamplerWithoutReplacement": {},
        "SliceSampler": slices,
        "SliceSamplerWithoutReplacement": slices,
        "PrioritizedSampler": priority,
        "PrioritizedSliceSampler": {**priority, **slices},
    }.items():
        yield Case(
            name,
            getattr(buffers, name),
            lambda arguments=arguments: dict(arguments),
            sampled,
            names={
                "slice_len": "num_slices slice_len batch_size",
                "num_slices": "slice_len batch_size",
                "max_policy_lag": "policy_version",
                "compile": "compile",
            },
            long=("max_capacity",),
        )
    for name, arguments in {
        "Compose": {"transforms": [buffers.MultiStepTransform(2, 0.9)]},
        "ToTensorImage": {"in_keys": ["observation"]},
        "RenameTransform": {"in_keys": ["observation"], "out_keys": ["seen"]},
        "MultiStepTransform": {"n_steps": 2, "gamma": 0.9},
        "NextStateReconstructor": {"strict": False},
        "RandomCropTensorDict": {"sub_seq_len": 2},
        "HindsightTransform": {"reward_fn": lambda *_: torch.zeros(1)},
        "NextObservationDelta": {},
        "Resize": {"w": 2, "in_keys": ["observation"]},
    }.items():
        use = (
            transformed
            if name in ("Compose", "RenameTransform", "MultiStepTransform", "NextStateReconstructor")
            else lambda one: None
        )
        yield Case(
            name, getattr(buffers, name), lambda arguments=arguments: dict(arguments), use, names=names
        )
    yield Case(
        "MultiStep", buffers.MultiStep, lambda: {"gamma": 0.9, "n_steps": 2}, lambda made: made(batch())
    )
    for name in ("SelectTransform", "ExcludeTransform"):
        cls = getattr(buffers, name)
        yield Case(
            name,
            of_key(cls),
            lambda: {"key": "observation"},
            transformed,
            names={"key": "keys selected_keys excluded_keys in_keys"},
        )

    def circulate(buffer: Any) -> None:
        buffer.extend(batch())
        buffer.sample()

    user = ("collate_fn", "transform")

    def made() -> dict[str, Any]:
        return {"storage": buffers.LazyTensorStorage(64), "batch_size": 4}

    yield Case(
        "ReplayBuffer", buffers.ReplayBuffer, made, circulate, names={"transform": "transforms"}, called=user
    )
    more = [
        "sampler",
        "writer",
        "collate_fn",
        "prefetch",
        "transform",
        "batch_size",
        "dim_extend",
        "generator",
        "checkpointer",
        "shared",
    ]
    yield Case(
        "TensorDictReplayBuffer",
        buffers.TensorDictReplayBuffer,
        made,
        circulate,
        tuple(more[1:]),
        called=user,
    )

    def prioritized() -> dict[str, Any]:
        return {**made(), "alpha": 0.6, "beta": 0.4}

    for name in ("TensorDictPrioritizedReplayBuffer", "PrioritizedReplayBuffer"):
        yield Case(name, getattr(buffers, name), prioritized, circulate, tuple(more[2:]), called=user)
    one = filled()
    lists = buffers.ReplayBuffer(storage=buffers.ListStorage(8), batch_size=2)
    lists.extend([1, 2, 3])
    prior = filled(sampler=buffers.PrioritizedSampler(64, 0.6, 0.4))
    yield Case("ReplayBuffer.extend", lambda data: filled().extend(data), lambda: {"data": batch()})
    yield Case("ReplayBuffer.add", lambda data: filled().add(data), lambda: {"data": batch()[0]})
    yield Case("ReplayBuffer.sample", one.sample, dict, long=("batch_size",))
    yield Case(
        "ReplayBuffer[]",
        lambda index: one[index],
        lambda: {"index": 0},
        names={"index": "index indices rows row"},
    )
    yield Case(
        "ListStorage[]",
        lambda index: lists[index],
        lambda: {"index": 0},
        names={"index": "index indices rows row"},
    )
    yield Case("ListStorage.sample", lists.sample, dict, long=("batch_size",))
    yield Case(
        "ReplayBuffer.update_priority",
        prior.update_priority,
        lambda: {"index": torch.tensor([0, 1]), "priority": torch.tensor([0.5, 1.0])},
    )
    yield Case(
        "ReplayBuffer.load_state_dict",
        lambda state: filled().load_state_dict(state),
        lambda: {"state": one.state_dict()},
        names={"state": "state_dict"},
    )
    yield Case("ReplayBuffer.dumps", one.dumps, lambda: {"path": tempfile.mkdtemp()})
    yield Case("ReplayBuffer.loads", one.loads, lambda: {"path": _saved(one)}, names={"path": "path folder"})
    yield Case(
        "ReplayBuffer.append_transform", filled().append_transform, lambda: {"transform": buffers.Transform()}
    )
    yield Case("ReplayBuffer.writer_for", one.writer_for, lambda: {"num_envs": 2}, long=("num_envs",))
    sampler = buffers.PrioritizedSampler(64, 0.6, 0.4)
    schedule = {"obj": sampler, "param_name": "beta"}
    yield Case(
        "LinearScheduler",
        buffers.LinearScheduler,
        lambda: {**schedule, "final_value": 1.0, "num_steps": 4},
        lambda made: made.step(),
    )
    yield Case("StepScheduler", buffers.StepScheduler, lambda: dict(schedule), lambda made: made.step())
    yield Case(
        "LambdaScheduler",
        buffers.LambdaScheduler,
        lambda: {**schedule, "lambda_fn": lambda step: 0.5},
        lambda made: made.step(),
        called=("lambda_fn",),
    )
    yield Case(
        "SchedulerList",
        buffers.SchedulerList,
        lambda: {"schedulers": [buffers.StepScheduler(**schedule)]},
        lambda made: made.step(),
    )
    yield Case(
        "TensorDictMaxValueWriter", buffers.TensorDictMaxValueWriter, lambda: {"rank_key": ("next", "reward")}
    )
    yield Case("collate", buffers.collate, lambda: {"samples": [batch()]})


def _saved(buffer: Any) -> str:
    folder = tempfile.mkdtemp()
    buffer.dumps(folder)
    return folder


def _rollouts() -> Iterator[Case]:
    collecting = {"frames_per_batch": 12}
    yield Case(
        "Collector",
        rollouts.Collector,
        lambda: {"create_env_fn": env(), "policy": policy(), **collecting, "total_frames": 24},
        lambda made: next(iter(made)),
        long=("frames_per_batch", "total_frames", "init_random_frames", "trajs_per_batch"),
        names={"create_env_fn": "env envs"},
        called=("create_env_fn", "policy", "postproc", "pre_collect_hook", "post_collect_hook"),
    )
    yield Case(
        "rollout",
        rollouts.rollout,
        lambda: {"env": env(), "policy": policy(), "num_steps": 5},
        long=("num_steps",),
    )
    yield Case(
        "evaluate",
        rollouts.evaluate,
        lambda: {"env": env(), "policy": policy(), "episodes": 3},
        long=("episodes",),
    )
    yield Case(
        "Evaluator",
        rollouts.Evaluator,
        lambda: {"env": env(), "policy": policy(), "episodes": 3, "every": 4},
        lambda made: made(4),
        ("seed", "max_steps"),
        long=("episodes",),
    )
    yield Case("batch_spec", rollouts.batch_spec, lambda: {"env": env()})
    yield Case(
        "bootstrap_mean", rollouts.bootstrap_mean, lambda: {"values": torch.rand(5)}, long=("resamples",)
    )
    yield Case(
        "interquartile_mean",
        rollouts.interquartile_mean,
        lambda: {"scores": torch.rand(5, 4)},
        long=("resamples",),
    )
    yield Case(
        "check_env_specs",
        rollouts.check_env_specs,
        lambda: {"env": env(), "num_steps": 3},
        long=("num_steps",),
    )
    yield Case("RandomPolicy", rollouts.RandomPolicy, lambda: {"action_spec": env().action_space})
    for name in (
        "InitTracker",
        "StepCounter",
        "TrajId",
        "RewardSum",
        "CompactObs",
        "NextObservationDelta",
        "NormalizeObservation",
    ):
        yield Case(
            name,
            getattr(wrappers, name),
            lambda: {"env": env()},
            lambda made: made.reset(),
            names={"in_keys": "in_keys keys"},
        )
    yield Case(
        "RecurrentPrimer",
        wrappers.RecurrentPrimer,
        lambda: {"env": env(), "policy": modules.GRUModule(3, 4, in_key="observation", out_key="h")},
    )
    yield Case("as_vector_env", wrappers.as_vector_env, lambda: {"env": env()}, lambda made: made.reset())
    yield Case(
        "ScriptedVectorEnv",
        testing.ScriptedVectorEnv,
        lambda: {"script": testing.Script(2)},
        lambda made: made.reset(),
    )
    yield Case("Script", testing.Script, dict, long=("num_envs",))
    adapted = wrappers.as_vector_env(env())
    adapted.reset(seed=0)
    yield Case("step", adapted.step, lambda: {"actions": np.zeros(3, dtype=np.int64)})
    yield Case("reset", wrappers.as_vector_env(env()).reset, dict)
    yield Case(
        "check_vector_env", testing.check_vector_env, lambda: {"env": env(), "steps": 3}, long=("steps",)
    )


def _layout() -> Iterator[Case]:
    keys = dict.fromkeys(("key", "color_by"), "keys")
    for name in [
        "run_starts",
        "run_ends",
        "split_trajectories",
        "audit",
        "describe",
        "mark_cuts",
        "step_mdp",
        "timeline_svg",
        "observation_keys",
    ]:
        function = getattr(layout, name)
        first = next(iter(inspect.signature(function).parameters))
        yield Case(
            name, function, lambda first=first: {first: batch()}, names=keys, long=("limit", "max_runs")
        )
    yield Case("explain", layout.explain, lambda: {"batch": batch(), "i": 3})
    yield Case(
        "join", layout.join, lambda: {"parts": layout.split_trajectories(batch())}, names={"parts": "batch"}
    )
    yield Case("require", layout.require, lambda: {"batch": batch(), "key": "action"})
    yield Case("marker", layout.marker, lambda: {"batch": batch(), "key": "is_init"})
    yield Case(
        "flat_column",
        layout.flat_column,
        lambda: {"column": torch.zeros(12, 1), "batch": batch(), "key": "x"},
        names={"column": "batch"},  # errors call it batch['x']
    )
    pair = {"obs": torch.rand(4, 2), "next_obs": torch.rand(4, 2)}
    yield Case("encode_delta", layout.encode_delta, lambda: dict(pair))
    yield Case(
        "decode_delta", layout.decode_delta, lambda: {"obs": torch.rand(4, 2), "delta": torch.rand(4, 2)}
    )
    for name in ("TED2Flat", "TED2Nested"):
        yield Case(name, getattr(layout, name), dict, lambda made: made(batch()))


def _modules() -> Iterator[Case]:
    def in_runs(module: Any) -> None:
        with modules.set_recurrent_mode("recurrent"):
            module(batch())

    sizes = {"input_size": 3, "hidden_size": 4}
    recurrent = {**sizes, "in_key": "observation", "out_key": "features", "state": "zero"}
    more = ("in_key", "out_key", "in_keys", "out_keys", "recurrent_backend", "burn_in")
    for name in (
        "GRUModule",
        "LSTMModule",
        "MinGRUModule",
        "LinearRecurrentModule",
        "LRUModule",
        "S6Module",
        "FFMModule",
        "DeltaNetModule",
    ):
        yield Case(
            name,
            getattr(modules, name),
            lambda: dict(recurrent),
            in_runs,
            tuple(one for one in more if one != "recurrent_backend" or name in ("GRUModule", "LSTMModule")),
            long=("input_size", "hidden_size", "num_layers"),
            names={
                "in_keys": "in_key",
                "out_keys": "out_key",
                "in_key": "in_keys",
                "out_key": "out_keys",
                "gru": "input_size",
                "lstm": "input_size",
            },
        )
    gru = modules.GRUModule(**recurrent)
    yield Case("GRUModule()", lambda tensordict: gru(tensordict), lambda: {"tensordict": batch()})
    for name in ("GRU", "LSTM", "GRUCell", "LSTMCell"):
        yield Case(
            name,
            getattr(modules, name),
            lambda: dict(sizes),
            long=("input_size", "hidden_size", "num_layers"),
        )
    for name in ("actor", "critic", "q_network"):
        yield Case(
            name, getattr(modules, name), lambda: {"env": env()}, lambda made: made(batch()), long=("hidden",)
        )
    yield Case(
        "RunningNorm",
        modules.RunningNorm,
        lambda: {"in_key": "observation", "shape": (3,)},
        lambda made: made(batch()),
    )
    yield Case("EpsilonGreedy", modules.EpsilonGreedy, dict)
    yield Case(
        "set_epsilon", modules.set_epsilon, lambda: {"network": modules.EpsilonGreedy(), "epsilon": 0.1}
    )
    yield Case("ActionMask", modules.ActionMask, lambda: {"key": "logits"})
    yield Case("BurnIn", modules.BurnIn, lambda: {"modules": [gru], "burn_in": 2})
    yield Case(
        "TensorDictPrimer", modules.TensorDictPrimer, lambda: {"primers": {"state": specs.Unbounded((4,))}}
    )
    yield Case("set_recurrent_mode", modules.set_recurrent_mode, dict)
    pair = {"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)}
    yield Case("Gaussian", modules.Gaussian, lambda: dict(pair), lambda made: made.sample())
    yield Case("SquashedGaussian", modules.SquashedGaussian, lambda: dict(pair), lambda made: made.sample())
    yield Case(
        "JointCategorical",
        modules.JointCategorical,
        lambda: {"logits": torch.zeros(3, 5), "nvec": (2, 3), "shape": (2,)},
        lambda made: made.sample(),
    )
    yield Case(
        "JointBernoulli",
        modules.JointBernoulli,
        lambda: {"logits": torch.zeros(3, 5)},
        lambda made: made.sample(),
    )


def _specs() -> Iterator[Case]:
    def use(made: Any) -> None:
        made.rand()

    yield Case("Bounded", specs.Bounded, lambda: {"low": -1.0, "high": 1.0, "shape": (3,)}, use)
    yield Case("Unbounded", specs.Unbounded, lambda: {"shape": (3,)}, use)
    yield Case("Categorical", specs.Categorical, lambda: {"n": 3}, use)
    yield Case("OneHot", specs.OneHot, lambda: {"n": 3}, use, long=("n",))
    yield Case("MultiCategorical", specs.MultiCategorical, lambda: {"nvec": [2, 3]}, use)
    yield Case("MultiOneHot", specs.MultiOneHot, lambda: {"nvec": [2, 3]}, use)
    yield Case("Binary", specs.Binary, lambda: {"n": 3}, use, long=("n",))
    yield Case("NonTensor", specs.NonTensor, lambda: {"shape": (2,)}, free=("example_data",))
    yield Case("as_spec", specs.as_spec, lambda: {"space": env().action_space}, use)
    yield Case("as_space", specs.as_space, lambda: {"spec": specs.Categorical(3)})
    yield Case("stack", specs.stack, lambda: {"specs": [specs.Categorical(3), specs.Categorical(3)]})
    yield Case("make_composite_from_td", specs.make_composite_from_td, lambda: {"data": batch()})
    spec = specs.Bounded(-1.0, 1.0, (3,))
    for name in ("is_in", "project", "assert_is_in", "encode"):
        function = getattr(spec, name)
        first = next(iter(inspect.signature(function).parameters))
        yield Case(f"Bounded.{name}", function, lambda first=first: {first: torch.zeros(3)})


def _disk() -> Iterator[Case]:
    path = {"path": tempfile.mkdtemp}
    yield Case(
        "Folder", disk.Folder, lambda: {"path": tempfile.mkdtemp(), "write": True}, lambda made: made.close()
    )
    yield Case(
        "Checkpoint",
        disk.Checkpoint,
        lambda: {"path": tempfile.mkdtemp(), "policy": policy()},
        lambda made: made.save(),
    )

    def appended(columns: Any) -> None:
        with disk.Folder(path["path"](), write=True) as folder:
            folder.append(columns)

    yield Case("Folder.append", appended, lambda: {"columns": {"x": torch.zeros(3)}})
    yield Case("Ragged", disk.Ragged, lambda: {"values": torch.zeros(3), "lengths": torch.tensor([1, 2])})


def _trees() -> Iterator[Case]:
    yield Case("count_states", trees.count_states, lambda: {"batch": batch()}, names={"keys": "entry"})
    yield Case("first_of_state", trees.first_of_state, lambda: {"batch": batch()}, names={"keys": "entry"})
    yield Case(
        "CountSampler",
        trees.CountSampler,
        dict,
        lambda made: filled(sampler=made).sample(),
        names={"keys": "entry"},
    )
    yield Case("StateCounter", trees.StateCounter, dict)
    edges = {"value": torch.rand(4), "count": torch.ones(4), "parent": torch.tensor([0, 0, 1, 1])}
    yield Case("ucb", trees.ucb, lambda: dict(edges))
    yield Case("puct", trees.puct, lambda: {**edges, "prior": torch.rand(4)})
    yield Case("best_edges", trees.best_edges, lambda: {"score": torch.rand(4), "parent": edges["parent"]})
    yield Case(
        "RandomProjectionHash",
        trees.RandomProjectionHash,
        dict,
        lambda made: made(torch.rand(2, 3)),
        long=("n_components",),
        called=("init_method",),
    )
    yield Case("SipHash", trees.SipHash, dict, lambda made: made(torch.rand(2, 3)))
    yield Case(
        "QueryModule",
        trees.QueryModule,
        lambda: {"in_keys": ["observation"]},
        lambda made: made(batch()),
        called=("hash_module", "hash_to_int", "aggregator"),
    )
    yield Case("MCTSForest", trees.MCTSForest, dict, lambda made: made.extend(batch()))


def _export() -> Iterator[Case]:
    yield Case("to_numpy", export.to_numpy, lambda: {"batch": batch()})
    yield Case("from_numpy", export.from_numpy, lambda: {"columns": {"x": np.zeros(3)}})
    yield Case("export", export.export, lambda: {"source": batch(), "path": f"{tempfile.mkdtemp()}/x.h5"})
    for name in ("import_h5", "import_parquet", "import_arrow", "import_minari", "import_lerobot"):
        first = next(iter(inspect.signature(getattr(export, name)).parameters))
        yield Case(
            name,
            getattr(export, name),
            lambda first=first: {first: "/nowhere/rows.h5"},
            names={"source": "path"},
        )


def _deploy() -> Iterator[Case]:
    path = f"{tempfile.mkdtemp()}/policy.pt2"
    rows = batch()
    yield Case(
        "export_policy", deploy.export_policy, lambda: {"policy": policy(), "path": path, "batch": rows}
    )
    yield Case("read_record", deploy.read_record, lambda: {"path": path})


def _text() -> Iterator[Case]:
    from tiny_text import SENTENCE, make_critic, make_model, score, train_tokenizer

    from flatroll import text

    tokenizer, model = train_tokenizer(), make_model()
    table = text.Sequences()
    table.add(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([3, 2]))
    prompts = text.PromptData(
        input_ids=torch.tensor([[5, 6, 1], [8, 9, 2]]),
        attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]),
        prompt_rindex=torch.tensor([1, 2]),
        batch_size=[2],
    )
    yield Case("kl_estimate", text.kl_estimate, lambda: {"log_ratio": torch.rand(3)})
    yield Case("ConstantKLController", text.ConstantKLController, lambda: {"kl_coef": 0.1})
    first = {"init_kl_coef": 0.1, "target": 1.0, "horizon": 10}
    yield Case(
        "AdaptiveKLController", text.AdaptiveKLController, lambda: dict(first), lambda made: made.update(kl=1)
    )
    adaptive = text.AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)
    yield Case(
        "AdaptiveKLController.update", adaptive.update, lambda: {"kl_values": [-0.1]}, names={"kl": "KL"}
    )
    yield Case("Sequences", text.Sequences, dict)
    yield Case(
        "Sequences[]", lambda number: table[number], lambda: {"number": 0}, names={"number": "sequence"}
    )
    added = {"tokens": torch.tensor([5, 6]), "lengths": torch.tensor([2])}
    yield Case(
        "Sequences.add", lambda tokens, lengths: text.Sequences().add(tokens, lengths), lambda: dict(added)
    )
    yield Case(
        "Sequences.padded",
        table.padded,
        lambda: {"numbers": torch.tensor([0, 1])},
        names={"numbers": "sequence"},
        long=("length",),
    )
    yield Case("Sequences.forget", lambda before: text.Sequences(3).forget(before), lambda: {"before": 3})
    yield Case(
        "Sequences.load_state_dict",
        lambda state: text.Sequences().load_state_dict(state),
        lambda: {"state": table.state_dict()},
    )
    rows = TensorDict({"observation": torch.tensor([[0, 2], [1, 1]])}, [2])
    yield Case(
        "rows_of_texts",
        lambda sequences=None, **texts: text.rows_of_texts(
            text.Sequences() if sequences is None else sequences, **texts
        ),
        lambda: {
            "tokens": torch.tensor([[5, 6, 7], [5, 8, 0]]),
            "own": torch.tensor([[False, True, True], [False, True, False]]),
            "log_probs": torch.tensor([[0.0, -0.1, -0.2], [0.0, -0.3, 0.0]]),
            "rewards": torch.tensor([1.0, 0.0]),
            "lengths": torch.tensor([3, 2]),
            "truncated": torch.tensor([False, True]),
            "groups": torch.tensor([0, 0]),
            "step": "token",
        },
    )
    yield Case(
        "merge_prefixes",
        text.merge_prefixes,
        lambda: {"batch": rows.clone(), "sequences": table},
        names={"batch": "sequence"},
    )
    yield Case(
        "TextModule",
        text.TextModule,
        lambda: {"model": make_critic(), "sequences": table},
        lambda made: made(rows.clone()),
    )
    module = text.TextModule(model, table)
    yield Case(
        "TextModule()",
        lambda batch: module(batch),
        lambda: {"batch": rows.clone()},
        names={"batch": "sequence"},
    )
    for name in ("TensorDictTokenizer", "PromptTensorDictTokenizer"):
        sample = {"text": [SENTENCE[:9]], "prompt": [SENTENCE[:9]], "label": [SENTENCE[9:]]}
        yield Case(
            name,
            getattr(text, name),
            lambda: {"tokenizer": tokenizer, "max_length": 8},
            lambda made, sample=sample: made(sample),
            long=("max_length",),
        )
        made = getattr(text, name)(tokenizer, 8)
        yield Case(
            f"{name}()",
            lambda sample, made=made: made(sample),
            lambda sample=sample: {"sample": dict(sample)},
            free=("made",),
            names={"sample": "example"},
        )
    models = {"model": model, "ref_model": make_model(1), "reward_model": score}
    yield Case(
        "RolloutFromModel",
        text.RolloutFromModel,
        lambda: {**models, "max_new_tokens": 3},
        lambda made: made.rollout_from_data(prompts),
        long=("max_new_tokens", "num_steps", "num_answers"),
    )
    rollout = text.RolloutFromModel(**models, max_new_tokens=3)
    yield Case(
        "RolloutFromModel.rollout_from_data",
        rollout.rollout_from_data,
        lambda: {"batch": prompts},
        names={"batch": "input_ids attention_mask prompt_rindex prompts"},
    )
    yield Case(
        "TokenizedDatasetLoader",
        text.TokenizedDatasetLoader,
        lambda: {
            "split": "train",
            "max_length": 8,
            "dataset_name": "none",
            "tokenizer_fn": text.TensorDictTokenizer,
            "tokenizer": tokenizer,
        },
        long=("max_length",),
    )
    yield Case(
        "create_infinite_iterator",
        text.create_infinite_iterator,
        lambda: {"iterator": [1, 2]},
        lambda made: next(made),
    )


def _sharing() -> Iterator[Case]:
    table = sharing.Table.like({"x": torch.zeros(3)})
    yield Case("Memory", sharing.Memory, lambda: {"size": 64})
    yield Case("Block", sharing.Block, lambda: {"tables": [table]}, free=("memory",), long=("slots",))
    yield Case("SharedWeights", sharing.SharedWeights, lambda: {"state": {"weight": torch.zeros(3)}})


def _datasets() -> Iterator[Case]:
    from flatroll import datasets

    pandas: Any = importlib.import_module("pandas")

    def converted() -> str:
        folder = tempfile.mkdtemp() + "/set"
        datasets.convert([batch()], folder)
        return folder

    folder = converted()
    yield Case(
        "convert",
        datasets.convert,
        lambda: {"batches": [batch()], "path": tempfile.mkdtemp() + "/set"},
        names={"batches": "batch rows"},
        long=("segment_bytes",),
    )
    options = (
        "root download fetch download_url sampler writer collate_fn pin_memory prefetch transform split_trajs "
        "priority_key verify generator codec frame_stack progress"
    )
    yield Case(
        "BaseDatasetExperienceReplay",
        datasets.BaseDatasetExperienceReplay,
        lambda: {"dataset_id": folder, "batch_size": 4},
        lambda made: made.sample(),
        tuple(options.split()),
        long=("batch_size",),
        called=("collate_fn", "transform", "fetch"),
        names={"transform": "transforms"},
    )
    data = datasets.BaseDatasetExperienceReplay(folder, batch_size=4)
    yield Case("BaseDatasetExperienceReplay.sample", data.sample, dict, long=("batch_size",))
    yield Case(
        "BaseDatasetExperienceReplay.as_dataset",
        data.as_dataset,
        dict,
        lambda made: next(iter(made)),
        long=("batch_size",),
    )
    steps = {"observations": np.arange(3.0), "actions": np.zeros(3), "rewards": np.ones(3)}
    d4rl = {**steps, "terminals": np.array([False, True, False])}
    reads: dict[str, dict[str, Any]] = {
        "read_atari_dqn": {"path": folder},
        "read_d4rl": {"source": d4rl},
        "read_gen_dgrl": {"path": folder},
        "read_openml": {
            "features": pandas.DataFrame({"a": [0.0, 1.0, 2.0]}),
            "label": pandas.Series([0, 1, 0]),
        },
        "read_rlds": {
            "episodes": [[{"observation": 1.0, "reward": 0.5}, {"observation": 2.0, "is_last": True}]]
        },
        "read_roboset": {"paths": [folder]},
        "read_vd4rl": {"paths": [folder]},
    }
    for name, arguments in reads.items():
        yield Case(
            name,
            getattr(datasets, name),
            lambda arguments=arguments: dict(arguments),
            lambda made: list(made),
            names={
                "paths": "paths path file",
                "path": "file folder",
                "episodes": "episode step",
                "source": "path",
            },
        )
    window = {"rewards": torch.arange(6.0).view(3, 2)}
    yield Case(
        "TrajectoryReplayBuffer",
        datasets.TrajectoryReplayBuffer,
        dict,
        lambda made: (made.add_trajectories([window]), made.sample(num_chunks=1), made.close()),
        long=("cache_size", "sample_window_size", "max_size"),
    )

    def kept() -> Any:
        buffer = datasets.TrajectoryReplayBuffer(sample_window_size=10)
        buffer.add_trajectories([window])
        return buffer

    yield Case(
        "TrajectoryReplayBuffer.add_trajectories",
        lambda trajectories: kept().add_trajectories(trajectories),
        lambda: {"trajectories": [window]},
        names={"trajectories": "trajectory"},
    )
    one = kept()
    yield Case("TrajectoryReplayBuffer.sample", one.sample, lambda: {"num_chunks": 1}, long=("num_chunks",))
    yield Case(
        "TrajectoryReplayBuffer.sample_slices",
        one.sample_slices,
        lambda: {"num_slices": 2, "slice_len": 2},
        long=("num_slices",),
    )
    yield Case("TrajectoryReplayBuffer.trajectory", one.trajectory, lambda: {"trajectory_id": 0})
    yield Case("TrajectoryReplayBuffer.is_ready", one.is_ready, lambda: {"min_size": 1})
    yield Case(
        "TrajectoryReplayBuffer.save_checkpoint",
        one.save_checkpoint,
        lambda: {"save_path": tempfile.mkdtemp()},
        called=("barrier",),
    )
    yield Case("TrajectoryCache", datasets.TrajectoryCache, dict, long=("max_size",))


def _trainers() -> Iterator[Case]:
    from flatroll.trainers import sb3, sb3_buffer

    yield Case(
        "FlatVecEnv",
        sb3.FlatVecEnv,
        lambda: {"env": gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")},
        lambda made: made.reset(),
    )
    space = gym.spaces.Box(-1.0, 1.0, (3,))
    yield Case(
        "FlatReplayBuffer",
        sb3_buffer.FlatReplayBuffer,
        lambda: {
            "buffer_size": 8,
            "observation_space": space,
            "action_space": gym.spaces.Discrete(2),
            "n_envs": 2,
        },
        long=("buffer_size", "n_envs"),
        called=("storage",),
        names={"compact": "compact compact_obs", "storage": "storage scratch_dir"},
    )


ROOMS: dict[str, Callable[[], Iterator[Case]]] = {
    "estimators": _estimators,
    "buffers": _buffers,
    "rollouts": _rollouts,
    "layout": _layout,
    "modules": _modules,
    "specs": _specs,
    "disk": _disk,
    "sharing": _sharing,
    "trees": _trees,
    "export": _export,
    "deploy": _deploy,
    "text": _text,
    "datasets": _datasets,
    "trainers": _trainers,
}


def public_cases(*names: str) -> Iterator[Case]:
    """The cases of some rooms, and those of some names; all by default."""
    by_name = set(names) - set(ROOMS)
    for room, cases in ROOMS.items():
        if not names or room in names:
            yield from cases()
        elif by_name:
            yield from (case for case in cases() if case.name in by_name)


def every_call(cases: list[Case]) -> Iterator[tuple[Case, str, str]]:
    """All calls: the case, its argument, the name of the wrong value."""
    for case in cases:
        valid = case.valid()
        for argument in case.arguments():
            for name in wrong(case, argument, valid):
                yield case, argument, name


def run(calls: list[tuple[Case, str, str]]) -> Iterator[tuple[str, str]]:
    """Make the calls; what was called and what is wrong, of each whose error is not ours."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # where a wrong path may become a file
        for case, argument, name in calls:
            valid = case.valid()
            value = wrong(case, argument, valid)[name]
            problem = fault(case, argument, {**valid, argument: value})
            if problem is not None:
                yield f"{case.name}({argument}={name})", problem


def main(calls: int, seed: int, *names: str) -> int:
    """Make some calls, chosen at random, print what is wrong; 1 if anything is."""
    cases = list(public_cases(*names))
    chosen = list(every_call(cases))
    random.Random(seed).shuffle(chosen)
    chosen = sorted(chosen[:calls], key=lambda one: (one[0].name, one[1], one[2]))
    found = list(run(chosen))
    for called, problem in found:
        print(f"{called}: {problem}", flush=True)
    by_name = Counter(called.partition("(")[0] for called, _ in found)
    print(
        f"{len(chosen)} calls of {len(cases)} names, {len(found)} errors that are not ours: {dict(by_name)}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
