"""What a policy reads and writes in one step, by the names that its file has for them."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictModuleBase
from torch import Tensor

from flatroll.layout.checks import check_type
from flatroll.layout.keys import (
    ACTION,
    IS_INIT,
    NEXT,
    NestedKey,
    as_tuple,
    is_hidden,
    next_key,
    plain_key,
)
from flatroll.layout.tensordict_seam import get_entry, leaves
from flatroll.modules.by_space import EpsilonGreedy
from flatroll.modules.memory import MemoryModule
from flatroll.wrappers.markers import recurrent_states

#: Name in a file -> key in a batch.
Names = dict[str, NestedKey]

_WAY_OUT = "a plain network becomes one by TensorDictModule(network, ['observation'], ['action'])"


class Interface(NamedTuple):
    """What a policy reads and writes in one step.

    Attributes:
        inputs: entries that it reads, states included.
        outputs: entries that the file returns: actions, or with ``sample=True`` what they are drawn from, and the next
            states.
        scores: what choices of an action are made from. They are compared and not returned: two options of nearly
            equal scores are a tie, which rounding may decide.
        states: first value of one row's state, by the state's input.
        is_init: the input that resets the states; None without one.
    """

    inputs: Names
    outputs: Names
    scores: Names
    states: dict[str, Tensor]
    is_init: str | None

    def next_of(self, state: str) -> str:
        """Return the output that the next step reads as this state."""
        return name_of(next_key(self.inputs[state]))


def name_of(key: Any) -> str:
    """Return the name of an entry in a file: its parts joined with a dot."""
    return ".".join(as_tuple(key))


def check_policy(policy: object) -> TensorDictModuleBase:
    """Return a policy that can be exported; TypeError for anything that is no tensordict module.

    Raises:
        ValueError: weights of half precision.
    """
    check_type("policy", policy, torch.nn.Module, "a tensordict module", hint=_WAY_OUT)
    module: Any = policy
    if not (hasattr(module, "in_keys") and hasattr(module, "out_keys")):
        raise TypeError(f"policy must be a tensordict module, got {type(policy).__name__}: {_WAY_OUT}")

    half = [name for name, x in module.named_parameters() if x.dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise ValueError(
            f"policy must have weights of float32 or float64, got half precision in {half[0]!r}: export policy.float()"
        )
    found: TensorDictModuleBase = module
    return found


def read_interface(policy: TensorDictModuleBase, step: TensorDictBase, *, sample: bool) -> Interface:
    """Return what a policy reads and writes.

    Args:
        policy: a tensordict module.
        step: a batch that the policy has just acted on.
        sample: whether the file returns what actions are drawn from, in place of actions.

    Raises:
        ValueError: with ``sample``, the policy neither draws its action nor rates actions; an input and an output, or
            two of either, have the same name; a state has no first value, or memories are reset by several entries.
    """
    states = {name_of(key): value.detach().cpu() for key, value in recurrent_states(policy).items()}
    actions, scores = _actions_and_scores(policy)
    if sample and not scores:
        raise ValueError(
            "sample=True needs a policy that draws its action from a distribution, like one of flatroll.modules.actor, "
            f"or rates actions, like a q_network; got {type(policy).__name__}: leave it out"
        )

    if sample:
        written = _existing(step, scores)
        scores = []
    elif actions:
        written = _existing(step, actions)
        if not any(_is_choice(get_entry(step, key)) for key in written):
            scores = []
    else:
        written = _existing(step, _last_outputs(policy, states))

    read = reads_of(policy)
    check_states(policy, [key for key in step.keys(True, True) if plain_key(as_tuple(key)) not in read])
    following = [next_key(key) for key in read if name_of(key) in states]
    inputs = _named("read", read)
    outputs = _named("written", [*written, *following])
    if both := sorted(inputs.keys() & outputs.keys()):
        raise ValueError(
            f"policy reads and writes {both[0]!r}, and a file has one entry of a name: write it under another key"
        )
    return Interface(
        inputs=inputs,
        outputs=outputs,
        scores={
            name: key
            for name, key in _named("written", _existing(step, scores)).items()
            if name not in inputs
        },
        states={name: states[name] for name in inputs if name in states},
        is_init=_find_is_init(policy, inputs),
    )


def reads_of(policy: TensorDictModuleBase) -> list[NestedKey]:
    """Return the keys that a policy reads.

    >>> import gymnasium as gym
    >>> from flatroll.modules import actor
    >>> reads_of(actor(gym.make_vec("CartPole-v1", num_envs=2), recurrent="gru"))
    ['observation', 'recurrent_state', 'is_init']
    """
    module: Any = policy
    written = [as_tuple(key) for part in module.modules() for key in getattr(part, "out_keys", ())]
    # An entry whose parts are written by the policy, the parameters of several distributions, is none of its inputs.
    parents = {key[:length] for key in written for length in range(1, len(key))}
    parents -= {(NEXT,)}
    return [plain_key(as_tuple(key)) for key in module.in_keys if as_tuple(key) not in parents]


def check_states(policy: TensorDictModuleBase, written: Iterable[Any]) -> None:
    """Raise ValueError for a state without a first value: ``key`` is read, ``("next", key)`` is written."""
    known = {as_tuple(key) for key in recurrent_states(policy)}
    after = {as_tuple(key) for key in written}
    for key in reads_of(policy):
        if next_key(key) in after and as_tuple(key) not in known:
            raise ValueError(
                f"policy reads {key!r} and writes {next_key(key)!r}, a state that each step hands to the next one, and "
                "no part of it says what an episode starts from: give it make_tensordict_primer, a method that returns "
                "a flatroll.modules.TensorDictPrimer"
            )


def samplers_of(policy: torch.nn.Module) -> list[Any]:
    """Return the parts of a policy that draw actions from distributions."""
    return [part for part in policy.modules() if isinstance(part, ProbabilisticTensorDictModule)]


def choosers_of(policy: torch.nn.Module) -> list[Any]:
    """Return the parts of a policy that choose the action of the highest value."""
    return [
        part
        for part in policy.modules()
        if isinstance(part, TensorDictModule) and isinstance(part.module, EpsilonGreedy)
    ]


def _actions_and_scores(policy: TensorDictModuleBase) -> tuple[list[Any], list[Any]]:
    """Return the keys of actions, and of what they are drawn or chosen from."""
    module: Any = policy
    actions: list[Any] = []
    scores: list[Any] = []
    for sampler in samplers_of(policy):
        actions += sampler.dist_sample_keys
        scores += sampler.in_keys
    for chooser in choosers_of(policy):
        actions += chooser.out_keys
        scores += chooser.in_keys

    if not actions:
        actions = [key for key in module.out_keys if as_tuple(key)[0] == ACTION]
    return actions, scores


def _last_outputs(policy: TensorDictModuleBase, states: Iterable[str]) -> list[Any]:
    """Return what a policy writes and no part of it reads, less states."""
    module: Any = policy
    read = {
        as_tuple(key)
        for part in module.modules()
        if part is not policy
        for key in getattr(part, "in_keys", ())
    }
    carried = {f"{NEXT}.{name}" for name in states}
    return [
        key
        for key in module.out_keys
        if as_tuple(key) not in read and name_of(key) not in carried and not is_hidden(key)
    ]


def _existing(step: TensorDictBase, keys: Iterable[Any]) -> list[NestedKey]:
    """Return the keys of the tensors under these keys."""
    found: list[NestedKey] = []
    for key in keys:
        entry = get_entry(step, key)
        if isinstance(entry, Tensor):
            found.append(plain_key(as_tuple(key)))
        elif isinstance(entry, TensorDictBase):
            found += [plain_key((*as_tuple(key), *as_tuple(leaf))) for leaf in leaves(entry)]
    return found


def _is_choice(action: Any) -> bool:
    return isinstance(action, Tensor) and not action.is_floating_point()


def _named(what: str, keys: Iterable[Any]) -> Names:
    names: Names = {}
    for key in keys:
        key = plain_key(as_tuple(key))
        name = name_of(key)
        if names.setdefault(name, key) != key:
            raise ValueError(
                f"entries {names[name]!r} and {key!r}, {what} by the policy, would both be named {name!r} in the file: "
                "rename one of them"
            )
    return names


def _find_is_init(policy: torch.nn.Module, inputs: Names) -> str | None:
    """Return the input that resets the states of memories; ValueError for several."""
    found: list[str] = []
    for part in policy.modules():
        if isinstance(part, MemoryModule):
            keys: Any = part.in_keys
            name = name_of(keys[-1])
            if name in inputs and name not in found:
                found.append(name)

    if len(found) > 1:
        raise ValueError(
            f"memories of the policy must be reset by one entry, got {found[0]!r} and {found[1]!r}: give their in_keys "
            "the same last key"
        )
    if found:
        return found[0]
    if IS_INIT in inputs:
        return IS_INIT
    return None
