"""Calls policies on the columns of one step, tensordict modules or callables; checks the actions of a batch."""

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import Tensor, nn

from flatroll.layout.column_actor import ColumnActor
from flatroll.layout.keys import ACTION, IS_INIT, NestedKey, as_tuple, is_hidden, next_key, plain_key
from flatroll.layout.tensordict_seam import (
    call_policy,
    exchange_interaction_type,
    find_base_keys,
    get_entry,
    nest,
)
from flatroll.layout.transfers import move
from flatroll.rollouts.arguments import Devices
from flatroll.wrappers.arrays import Array, Tree, action_limits, map_tree, to_torch
from flatroll.wrappers.markers import recurrent_states

T = TypeVar("T")
Columns = dict[NestedKey, Tensor]
#: A tensordict module, or a callable from observation to action.
Policy: TypeAlias = Callable[..., Any]
#: A module, its state dict, or a tensordict of its parameters.
Weights: TypeAlias = nn.Module | TensorDictBase | Mapping[str, Any]


class PolicyModule(Protocol):
    """The interface of a tensordict module; any object with it will do."""

    in_keys: Sequence[NestedKey]
    out_keys: Sequence[NestedKey]

    def __call__(self, data: TensorDictBase, /) -> TensorDictBase: ...


# One per process: a fork could copy a lock that another thread holds.
_TURNS: dict[int, Any] = {}


def act_in_turn(policy: Callable[..., T], exploration: InteractionType, *inputs: Any) -> T:
    """Call a policy with tensordict's interaction type, which is global to all threads, set to ``exploration``.

    A lock makes threads take turns; otherwise one could act with the type that another thread has set, or restore the
    wrong one.
    """
    # re-entrant, because a policy may itself collect a rollout
    with _TURNS.get(os.getpid()) or _TURNS.setdefault(os.getpid(), RLock()):
        before = exchange_interaction_type(exploration)
        try:
            return policy(*inputs)
        finally:
            exchange_interaction_type(before)


def is_module(policy: object) -> TypeGuard[PolicyModule]:
    """Return whether a policy reads and writes tensordicts."""
    return hasattr(policy, "in_keys") and hasattr(policy, "out_keys")


def as_function_of_obs(
    policy: Policy, space: spaces.Space[Any], devices: Devices
) -> Callable[[Any, Array], Any]:
    """Wrap a callable policy as a function from the observation (tensor, dict or tuple) to the action.

    The function's second argument, bool ``(E,)``, marks the envs that begin an episode; it is passed to a policy's
    parameter ``is_init`` as a tensor ``[E, 1]``.

    Raises:
        TypeError: the policy is not callable; or, when called, it returns no action.
    """
    if not callable(policy):
        raise TypeError(
            "policy must be a tensordict module, a callable from observation to action, or None, got "
            f"{type(policy).__name__}"
        )

    one_action = not isinstance(space, spaces.Dict | spaces.Tuple)
    takes_is_init = has_parameter(policy, IS_INIT)

    def act(obs: Tree, first: Array) -> Any:
        if takes_is_init:
            given = {IS_INIT: to_torch(first).unsqueeze(-1)}
        else:
            given = {}

        if devices.policy is not None:
            leaves: list[Tensor] = []
            map_tree(leaves.append, (obs, given))
            moved = iter(move(leaves, devices.policy))
            obs, given = map_tree(lambda _: next(moved), (obs, given))

        try:
            action = policy(obs, **given)
        except RuntimeError as error:
            seen: list[Tensor] = []
            map_tree(seen.append, obs)
            _note_input(error, policy, seen)
            raise

        if action is None or (one_action and isinstance(action, (tuple, dict, TensorDictBase))):
            raise _no_action_error(policy, type(action).__name__)
        return action

    return act


class ModulePolicy:
    """Runs a tensordict module as the policy, on a tensordict of batch size ``[E]`` at each step.

    It receives the observation, the markers, the chosen info entries and its recurrent states. Its ``out_keys``
    besides the action become columns of the batch, including log-probabilities next to the parts of an action
    (``("action", "arm_log_prob")``). Names that begin with ``_`` and the ``recomputed_keys`` of its submodules, such
    as a `RunningNorm`, are left out. States with such names are carried from step to step without being columns; the
    module itself resets them where ``is_init`` is set.

    Raises:
        ValueError: the module declares a state but does not write its ``("next", key)``.
    """

    def __init__(
        self,
        policy: PolicyModule,
        space: spaces.Space[Any],  # action space of one env
        action_keys: Sequence[NestedKey],  # keys of its leaves
        num_envs: int,
        devices: Devices,
        exploration: InteractionType,  # how its probabilistic modules choose actions
        *,
        recurrent: bool = True,  # use the recurrent states that the policy declares (make_tensordict_primer)
        primed: Mapping[NestedKey, Tensor]
        | None = None,  # states declared by the env's wrappers, for a module that declares none
    ) -> None:
        self._policy = policy
        self._space = space
        self._num_envs = num_envs
        self._devices = devices
        self._exploration = exploration
        leaves = [*map(as_tuple, action_keys)]
        #: The columns that it may write.
        self.writes = _columns_of(policy, leaves)

        # Entries next to the parts of an action: columns, and what a CompositeDistribution also writes there.
        scores = [(*leaf[:-1], f"{leaf[-1]}_log_prob") for leaf in leaves if len(leaf) > 1]
        self._beside = [key for key in (*map(as_tuple, self.writes), *scores) if key[0] == ACTION]

        #: The initial values of its recurrent states, for one row; and of those that are carried but no columns.
        self.defaults: Columns = {}
        self.carried: Columns = {}
        declared = {}
        if recurrent:
            declared = recurrent_states(policy)
        written = set(map(as_tuple, policy.out_keys))
        for key, value in declared.items():
            self._prime_one(key, value)
            if next_key(key) not in written:
                raise ValueError(
                    f"the policy has the recurrent state {key!r} but not {next_key(key)!r} in its out_keys "
                    f"{list(policy.out_keys)}: it would lose its state at every step. Keep it with select_out_keys(...)"
                )

        if recurrent and primed:
            self.prime(primed)

        self._written: list[NestedKey] | None = None  # the keys of `writes` that it has written
        self._on_columns: ColumnActor | None = None  # its parts, if they are known

    def prime(self, states: Mapping[NestedKey, Tensor]) -> None:
        """Also carry these states, if the policy writes them under ``"next"`` and did not declare them."""
        written = set(map(as_tuple, self._policy.out_keys))
        for key, value in states.items():
            if next_key(key) in written:
                self._prime_one(key, value)

    def _prime_one(self, key: NestedKey, value: Tensor) -> None:
        """Carry a state from this initial value, unless it is carried already."""
        if is_hidden(key):
            # It stays where the module runs.
            place = self._devices.policy or self._devices.env
            self.carried.setdefault(key, value.to(place))
        else:
            self.defaults.setdefault(key, value.to(self._devices.env))

    def get_snapshot(self) -> dict[str, Any]:
        """Return what the first call has found out."""
        return {
            "written": self._written,
            "beside": list(self._beside),
            "on columns": self._on_columns is not None,
        }

    def set_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Go on without a first call, which may make log-probabilities that differ in the last digit."""
        written = snapshot["written"]
        if written is None or not set(written) <= set(self.writes):
            return  # the first call is to come, or it was of another policy

        self._written = list(written)
        self._beside = list(snapshot["beside"])
        self._on_columns = None
        if snapshot["on columns"]:
            self._on_columns = self._find_parts()

    def __call__(self, columns: Columns) -> tuple[Any, Columns, Columns]:
        """Return the action, the other columns, and what is carried to the next step by key.

        Recurrent states among the columns are the ones before the step.
        """
        actor = self._on_columns
        if actor is None:
            return self._call_as_it_is(columns)

        made = dict(columns)
        try:
            acted = actor(made)
        except RuntimeError as error:
            _note_input(error, self._policy, columns.values())
            raise

        assert self._written is not None  # by the first call, which was not of the parts
        if not acted or not all(key in made for key in self._written):
            # whatever it is, the next steps would meet it again
            self._on_columns = None
            return self._call_as_it_is(columns)

        written = {key: made[key] for key in self._written}
        for key in self.defaults:
            written[key] = made[key]
        return made[ACTION], written, {key: made[next_key(key)] for key in self.carried}

    def _call_as_it_is(self, columns: Columns) -> tuple[Any, Columns, Columns]:
        """Do the same with a tensordict; the first call looks for the parts of the policy and for what it writes."""
        if self._devices.policy is not None:
            # The columns change only after this call, which waits for the action if it is on a device.
            moved = move(list(columns.values()), self._devices.policy, held=True)
            columns = dict(zip(columns, moved, strict=True))
        data = nest(columns, self._num_envs)

        try:
            out = call_policy(self._policy, data)
        except RuntimeError as error:
            leaves: Any = data.values(True, True)
            _note_input(error, self._policy, leaves)
            raise

        if not isinstance(out, TensorDictBase):
            raise _no_action_error(self._policy, type(out).__name__)
        action = get_entry(out, ACTION)
        if action is None:
            raise _no_action_error(self._policy, f"entries {sorted(map(str, out.keys(True, True)))}")

        if self._written is None:
            self._note_first(out, action)
            assert self._written is not None

        # A key that was written before but is missing now raises KeyError here.
        written = {key: out[key] for key in self._written}

        for key in self.defaults:  # in first rows, as reset by the policy if it writes the state
            used = out.get(key, None)
            if used is None:
                written[key] = data.get(key)
            else:
                written[key] = used

        action, written = self._bring_home(action, written)
        if isinstance(action, TensorDictBase):
            if self._beside:
                parts = action.exclude(*(key[1:] for key in self._beside))
            else:
                parts = action
            action = _tuples(self._space, parts.to_dict())

        return action, written, {key: out[next_key(key)] for key in self.carried}

    def _bring_home(
        self, action: Tensor | TensorDictBase, written: Columns
    ) -> tuple[Tensor | TensorDictBase, Columns]:
        """Return the action and the other columns on the env's device; a device is waited for once."""
        parts: Columns
        if isinstance(action, TensorDictBase):
            parts = dict(action.items(True, True))
        else:
            parts = {ACTION: action}

        home = self._devices.env
        leaves = [*written.values(), *parts.values()]
        if all(leaf.device == home for leaf in leaves):
            return action, written

        moved = iter(move(leaves, home))
        written = {key: next(moved) for key in written}
        parts = {key: next(moved) for key in parts}
        if isinstance(action, TensorDictBase):
            return nest(parts, *action.batch_size), written
        return parts[ACTION], written

    def _note_first(self, out: TensorDictBase, action: Any) -> None:
        """Note what the first call wrote, and the parts of the policy if later calls can be of these."""
        self._written = [key for key in self.writes if out.get(key, None) is not None]
        self._beside = [key for key in self._beside if out.get(key, None) is not None]
        if not isinstance(action, TensorDictBase):
            self._on_columns = self._find_parts()

    def _find_parts(self) -> ColumnActor | None:
        """Return the parts of the policy if calls can be of these."""
        if self._devices.policy is not None:
            return None
        actor = ColumnActor.of(self._policy)
        if actor is not None and (self._exploration is InteractionType.RANDOM or not actor.draws):
            return actor
        return None


def _columns_of(policy: PolicyModule, leaves: Sequence[tuple[str, ...]]) -> list[NestedKey]:
    """Return the columns that a policy may write besides the action, whose parts are ``leaves``."""
    parts = policy.modules() if isinstance(policy, nn.Module) else ()
    recomputed = {as_tuple(key) for part in parts for key in getattr(part, "recomputed_keys", ())}
    inner = {
        leaf[:length] for leaf in leaves for length in range(1, len(leaf) + 1)
    }  # parts, and what holds them

    out_keys = dict.fromkeys(map(as_tuple, (*policy.out_keys, *find_base_keys(policy))))
    return [
        plain_key(key)
        for key in out_keys
        if not key[-1].startswith("_") and key not in recomputed and key not in inner
    ]


class ActionRange:
    """Raises ValueError for discrete actions outside the space and warns once about actions outside a Box.

    A Box's limits may be exceeded on purpose: the env receives the actions unchanged. Actions on a GPU cause no sync:
    their minimum and maximum are copied asynchronously and checked with a later batch.

    Args:
        space: the actions of one env.
        keys, paths: of the space's leaves, in a batch and in a tree of actions.
        device: device of the batches.

    >>> batch = TensorDict({"action": torch.tensor([0, 2])}, [2])
    >>> ActionRange(spaces.Discrete(2), ["action"], [()], torch.device("cpu")).look(batch)
    Traceback (most recent call last):
    ...
    ValueError: actions must lie in [0, 1] for Discrete(2), got 0 to 2
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        keys: Sequence[NestedKey],
        paths: Sequence[tuple[Any, ...]],
        device: torch.device,
    ) -> None:
        key_of = dict(zip(paths, keys, strict=True))
        self._limits = [(key_of[path], limits) for path, limits in action_limits(space)]
        if device.type == "meta":  # meta tensors have no values
            self._limits = []
        self._later = device.type != "cpu"
        self._ends: dict[NestedKey, tuple[Tensor, Tensor]] = {}  # minimum and maximum, and their host copy

    def look(self, batch: TensorDict) -> None:
        """Check the actions of a batch."""
        for key, limits in list(self._limits):
            actions: Tensor = batch.get(key)
            if self._later:
                values = self._copy_extrema(key, actions)
            else:
                values = actions.numpy()
            problem = limits.problem(values)
            if problem is None:
                continue
            if not isinstance(limits.space, spaces.Box):
                raise ValueError(problem)

            self._limits.remove((key, limits))
            warnings.warn(
                f"{problem}: the env received them unchanged. Put gymnasium.wrappers.ClipAction or "
                "RescaleAction around the env, or bound the policy's output",
                stacklevel=2,
            )

    def _copy_extrema(self, key: NestedKey, actions: Tensor) -> "np.ndarray[Any, Any]":
        """Return minimum and maximum ``[2, *S]`` of batches already copied, and start the copy of this batch's."""
        ends = torch.stack([actions.amin(0), actions.amax(0)])
        if key not in self._ends:
            here = torch.empty(ends.shape, dtype=ends.dtype, pin_memory=actions.is_cuda)
            limits = next(limits for own, limits in self._limits if own == key)

            # The values until the first copy has finished.
            for end, limit in zip(here, (limits.low, limits.high), strict=True):
                end.copy_(torch.from_numpy(np.array(limit)))
            self._ends[key] = ends, here
            ends = ends.clone()

        there, here = self._ends[key]
        came = here.numpy().copy()
        torch.minimum(there[0], ends[0], out=there[0])
        torch.maximum(there[1], ends[1], out=there[1])
        here.copy_(there, non_blocking=True)

        return came


def copy_weights(policy: object, weights: Weights) -> None:
    """Copy the weights of a module, its state dict, or a tensordict of its parameters into the policy.

    Raises:
        TypeError: the policy is not an ``nn.Module``.
    """
    if not isinstance(policy, nn.Module):
        raise TypeError(
            f"the policy, {type(policy).__name__}, is not an nn.Module: it has no weights to update"
        )
    if isinstance(weights, TensorDictBase):
        own: Any = TensorDict.from_module(policy)
        own.data.update_(weights.data)
        return

    if isinstance(weights, nn.Module):
        weights = weights.state_dict()
    policy.load_state_dict(weights)


def as_state(weights: Weights) -> Mapping[str, Any]:
    """Return weights by name from a module, state dict or tensordict of parameters; TypeError for others."""
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    if isinstance(state, TensorDictBase):
        state = state.data.flatten_keys(".").to_dict()
    if not isinstance(state, Mapping):
        raise TypeError(
            f"weights must be a module, its state dict or a tensordict of it, got {type(state).__name__}"
        )
    return state


def refuse_hidden_weights(policy: object) -> None:
    """Raise TypeError for a callable that uses a module without being one, before its weights are updated.

    Other processes act with copies of the callable and its module, and an update finds no weights to send. It checks
    closure variables, attributes, arguments of a `functools.partial`, and a bound method's object.
    """
    held: dict[Any, Any] = {}
    if isinstance(policy, partial):
        held = dict(enumerate(policy.args)) | policy.keywords
        policy = policy.func

    owner = getattr(policy, "__self__", policy)
    held |= {"self": owner} | getattr(owner, "__dict__", {})
    function = getattr(policy, "__func__", policy)
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        held |= {**used.nonlocals, **used.globals}

    for name, part in held.items():
        if isinstance(part, nn.Module) and part.state_dict():
            raise TypeError(
                f"the policy uses the module {name!r} ({type(part).__name__}) but is not an nn.Module, so an update "
                "would not reach the workers' copies: make the policy an nn.Module that has it as a part"
            )


def has_parameter(function: object, name: str) -> bool:
    """Return whether a callable (for a module: its ``forward``) has a parameter of this name."""
    called: Any = getattr(function, "forward", function)
    try:
        return name in inspect.signature(called).parameters
    except (TypeError, ValueError):  # functions written in C may have no signature
        return False


def refuse_memory(policy: object, where: str, way_out: str) -> None:
    """Raise ValueError for a callable with per-env state if it is called for only some envs at a time."""
    if not hasattr(policy, "in_keys") and has_parameter(policy, IS_INIT):
        raise ValueError(
            f"the policy takes is_init, so it keeps a state for each env, but {where} it is called for only "
            f"some of the envs: write it as a recurrent module (make_tensordict_primer), or {way_out}"
        )


def _note_input(error: RuntimeError, policy: object, observations: Iterable[Tensor]) -> None:
    """Add a note to a policy's error if its parameters have another device or dtype than the observations."""
    parameters = list(policy.parameters()) if isinstance(policy, nn.Module) else []
    seen = list(observations)

    places = {str(one.device) for one in parameters}
    if parameters and seen and places != {str(leaf.device) for leaf in seen}:
        error.add_note(
            f"the policy's parameters are on {', '.join(sorted(places))}, its input is on {seen[0].device}: move the "
            "policy with .to(...), or pass policy_device=..., to which the input is copied in each step"
        )

    if any(one.dtype is torch.float64 for one in parameters):
        return
    if any(leaf.dtype is torch.float64 for leaf in seen):
        error.add_note(
            "the env gives float64 observations, as MuJoCo's do: if the error is about dtypes, cast them with "
            "obs_dtype=torch.float32 of Collector and rollout, or with as_vector_env(env, dtype=torch.float32) inside "
            "a stack of wrappers"
        )


def _tuples(space: spaces.Space[Any], tree: Tree) -> Tree:
    """Return a tensordict's tree as the space has it: tuples and integer keys are named "0", "1", ... there."""
    if isinstance(tree, dict) and isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(_tuples(child, tree[str(i)]) for i, child in parts if str(i) in tree)
    if isinstance(tree, dict) and isinstance(space, spaces.Dict):
        children: dict[Any, Any] = dict(space.spaces)
        names = {str(name): name for name in children}
        given = {names.get(key, key): child for key, child in tree.items()}
        return {name: _tuples(children.get(name, space), child) for name, child in given.items()}
    return tree


def _no_action_error(policy: object, came: str) -> TypeError:
    name = getattr(policy, "__name__", type(policy).__name__)
    return TypeError(
        f"policy {name} returned no action: expected a tensor with one row for each env (a tensordict module: "
        f"a tensordict with an 'action' entry), got {came}"
    )
