"""Builds batches, reads entries and calls networks without tensordict's overhead.

All uses of tensordict's private attributes are in this file, each with the public API as a fallback: modules that are
not plain (subclasses, hooks, arguments by name, ``skip_existing``, inside ``torch.compile``) are called normally.
Measured with tensordict 0.14.3, one core: :func:`nest` takes 3 µs of the 15 that the public constructor takes for six
columns, :func:`get_entry` 0.3 µs of 1.3 to 2.4, and a plain module's call 60 to 90 µs less than its own. An update of
a small network takes a millisecond.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    probabilistic,
    set_interaction_type,
    utils,
)
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor
from torch.distributions import Distribution, Independent, TransformedDistribution
from torch.nn.modules import module as torch_module

from flatroll.layout.keys import NestedKey, as_tuple, plain_key
from flatroll.layout.sampling import base_sample_key, components, draw

# The variables that hold tensordict's modes. Reading one takes 0.1 µs; the public functions take a lock and 1 µs.
_TYPE: Any = getattr(probabilistic, "_interaction_type", None)
_SKIPS: Any = getattr(utils, "_skip_existing", None)

#: Whether the private attributes exist and are used. Tests also run with False.
USES_PRIVATES = (
    all(hasattr(TensorDict, name) for name in ("_new_unsafe", "_maybe_names"))
    and isinstance(getattr(TensorDict({}), "_tensordict", None), dict)
    and hasattr(_SKIPS, "_mode")
)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Hooks on every module of the process.
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}", {}) for name in _HOOKS)
# The attributes of a module that only calls its function, or its parts in turn. With a version of tensordict
# that renames them, no module counts as plain, and all are called.
PLAIN_MODULE: dict[str, Any] = {
    "_kwargs": None,
    "method": None,
    "method_kwargs": {},
    "_get_kwargs": {},
    "inplace": True,
}
PLAIN_SEQUENCE: dict[str, Any] = {"partial_tolerant": False, "inplace": None}
_SELECTING_NOTHING = PLAIN_SEQUENCE | {"_select_before_return": False}
PLAIN_ACTOR: dict[str, Any] = {"partial_tolerant": False, "return_composite": False}
SAMPLING_ACTOR: dict[str, Any] = {"inplace": None, "_requires_sample": True}


def nest(
    columns: Mapping[NestedKey, Tensor] | Mapping[str, Tensor], *rows: int, device: torch.device | None = None
) -> TensorDict:
    """Build a tensordict ``[*rows]`` from columns with nested keys; nothing is checked.

    >>> nest({"a": torch.zeros(2), ("next", "a"): torch.ones(2)}, 2)["next", "a"]
    tensor([1., 1.])
    """
    tree: dict[str, Any] = {}
    for key, value in columns.items():
        place = tree
        if not isinstance(key, str):
            for parent in key[:-1]:
                place = place.setdefault(parent, {})
            key = key[-1]
        place[key] = value

    make = TensorDict._new_unsafe if USES_PRIVATES else TensorDict
    return make(tree, batch_size=torch.Size(rows), device=device)


def get_entry(batch: TensorDictBase, key: NestedKey) -> Any:
    """Return ``batch.get(key, None)``.

    >>> batch = TensorDict({"next": {"reward": torch.ones(2)}}, [2])
    >>> get_entry(batch, ("next", "reward")), get_entry(batch, ("next", "done"))
    (tensor([1., 1.]), None)
    """
    place: Any = batch
    names = (key,) if type(key) is str else key
    for name in names:
        if type(place) is not TensorDict or not USES_PRIVATES:
            if place is None:
                return None
            return batch.get(key, None)
        place = place._tensordict.get(name)

    if place is None or isinstance(place, Tensor):
        return place
    return batch.get(key, None)


def leaves(batch: TensorDictBase, path: tuple[str, ...] = ()) -> dict[NestedKey, Tensor]:
    """Return the tensors of a batch by key, below ``path``: the inverse of :func:`nest`.

    TypeError for an entry that is no tensor, instead of dropping it.

    >>> list(leaves(TensorDict({"reward": torch.ones(2), "next": {"reward": torch.ones(2)}}, [2])))
    ['reward', ('next', 'reward')]
    """
    if USES_PRIVATES and type(batch) is TensorDict:
        items = batch._tensordict.items()  # takes half of the time
    else:
        items = batch.items()

    columns: dict[NestedKey, Tensor] = {}
    for name, value in items:
        if isinstance(value, Tensor):
            key: NestedKey = name
            if path:
                key = (*path, name)
            columns[key] = value
        elif isinstance(value, TensorDictBase) and not is_non_tensor(value):
            columns |= leaves(value, (*path, name))
        else:
            raise TypeError(
                f"batch[{plain_key((*path, name))!r}] is a {type(value).__name__}: this storage takes tensors only, "
                "ListStorage takes anything"
            )
    return columns


def set_entry(batch: TensorDictBase, key: NestedKey, value: Tensor) -> None:
    """Do ``batch.set(key, value)``, in a third of the time if the tensordict is plain and the value fits.

    >>> batch = TensorDict({"reward": torch.ones(2)}, [2])
    >>> set_entry(batch, "td_error", torch.zeros(2))
    >>> batch["td_error"]
    tensor([0., 0.])
    """
    if USES_PRIVATES and type(batch) is TensorDict and type(key) is str and not batch.is_locked:
        rows = batch.batch_size
        device = batch.device
        # Values that are tensordicts take the general path below.
        if (
            isinstance(value, Tensor)
            and value.shape[: len(rows)] == rows
            and (device is None or device == value.device)
        ):
            batch._tensordict[key] = value
            return
    batch.set(key, value)


def shallow_copy(batch: TensorDictBase) -> TensorDictBase:
    """Return ``batch.copy()``, which copies nested tensordicts, too, in a quarter of the time.

    >>> batch = TensorDict({"next": {"reward": torch.ones(2)}}, [2])
    >>> copy = shallow_copy(batch)
    >>> copy["next", "done"] = torch.zeros(2)
    >>> list(batch["next"].keys()), copy["next", "reward"] is batch["next", "reward"]
    (['reward'], True)
    """
    if not USES_PRIVATES or type(batch) is not TensorDict:
        return batch.copy()

    entries = dict(batch._tensordict)
    for key, value in entries.items():
        if not isinstance(value, Tensor):
            entries[key] = shallow_copy(cast(TensorDictBase, value))
    names = batch._maybe_names()
    return TensorDict._new_unsafe(entries, batch_size=batch.batch_size, device=batch.device, names=names)


def plain_attributes(network: object, kind: type, plain: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attributes of a network of this kind if calling it does nothing but call its ``forward``.

    Subclasses do not count, except for actors that sample as their base class does, such as TorchRL's.

    None if it is another one, or if its attributes are not all like those in ``plain``.
    """
    own_kind: Any = type(network)
    if own_kind is not kind and not (kind is ProbabilisticTensorDictSequential and _has_same_call(own_kind)):
        return None

    if calls_do_more():
        return None

    own = network.__dict__
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    ):
        return None

    # network.compile() sets _compiled_call_impl
    if own.get("_compiled_call_impl") is not None:
        return None

    if torch.compiler.is_compiling():  # torch.compile cannot compare dict views
        if all(name in own and own[name] == value for name, value in plain.items()):
            return own
        return None

    if plain.items() <= own.items():
        return own
    return None


def calls_do_more() -> bool:
    """Return whether any module's call does more than call its ``forward``: skips existing entries, runs hooks."""
    return not USES_PRIVATES or bool(_SKIPS._mode) or any(_GLOBAL_HOOKS)


def hooks_of(own: Mapping[str, Any]) -> list[Mapping[Any, Any]]:
    """Return the tables of hooks of a module with these attributes."""
    return [own[name] for name in _HOOKS]


@cache
def _has_same_call(actor: type) -> bool:
    """Whether a class of actors inherits all that sampling takes from ``ProbabilisticTensorDictSequential``."""
    names = ("__call__", "forward", "get_dist", "get_dist_params", "dist_sample_keys", "log_prob_keys")
    base = ProbabilisticTensorDictSequential
    return issubclass(actor, base) and all(getattr(actor, name) is getattr(base, name) for name in names)


def interaction_kind() -> InteractionType | None:
    """Return tensordict's interaction type; None if no block sets one."""
    if hasattr(_TYPE, "_mode"):
        kind: InteractionType | None = _TYPE._mode
        return kind
    return interaction_type()


def exchange_interaction_type(kind: InteractionType | None) -> InteractionType | None:
    """Set tensordict's interaction type for all threads; return the old one. Takes 0.1 µs, a ``with`` block 2 µs.

    >>> before = exchange_interaction_type(InteractionType.MODE)
    >>> exchange_interaction_type(before)
    <InteractionType.MODE: 'mode'>
    """
    if hasattr(_TYPE, "_mode"):
        before: InteractionType | None = _TYPE._mode
        _TYPE._mode = kind
        return before
    before = interaction_type()
    set_interaction_type(kind).__enter__()
    return before


def call_network(network: TensorDictModuleBase, batch: TensorDictBase) -> TensorDictBase:
    """Return ``network(batch)``, without tensordict's overhead; the outputs are written into ``batch``.

    >>> import torch
    >>> from tensordict.nn import TensorDictModule
    >>> net = TensorDictModule(torch.nn.Identity(), in_keys=["a"], out_keys=["b"])
    >>> call_network(net, TensorDict({"a": torch.ones(2)}, [2]))["b"]
    tensor([1., 1.])
    """
    outputs = call_plain(network, batch)
    if outputs is not None:
        for key, value in outputs.items():
            if key != "_":  # the name of an unused output
                set_entry(batch, key, value)
        return batch

    own = plain_attributes(network, TensorDictSequential, _SELECTING_NOTHING)
    if own is None:
        out: TensorDictBase = network(batch)
        return out

    for part in parts_of(own).values():
        batch = call_network(part, batch)
    return batch


def call_policy(policy: Any, batch: TensorDictBase) -> Any:
    """Return ``policy(batch)``, without tensordict's overhead; intermediate entries may stay in ``batch``.

    Actors that write log-probabilities also write what their actions are made of, see :func:`find_base_keys`.
    """
    own = plain_attributes(policy, TensorDictSequential, PLAIN_SEQUENCE)
    if own is not None:
        for part in parts_of(own).values():
            batch = call_network(part, batch)
        return batch

    if plain_attributes(policy, ProbabilisticTensorDictSequential, SAMPLING_ACTOR) is not None:
        ready = prepare_sampling(policy, batch)
        if ready is not None:
            sampler, batch, _ = ready
            return _sample(sampler, batch)
    return call_network(policy, batch)


def find_base_keys(policy: Any) -> list[NestedKey]:
    """Return the keys under which :func:`call_policy` may store base samples."""
    if plain_attributes(policy, ProbabilisticTensorDictSequential, SAMPLING_ACTOR | PLAIN_ACTOR) is None:
        return []

    sampler = list(parts_of(policy.__dict__).values())[-1]
    if not isinstance(sampler, ProbabilisticTensorDictModule) or not keeps_base(sampler):
        return []
    action_keys: list[Any] = sampler.dist_sample_keys
    return [base_sample_key(key) for key in action_keys]


def keeps_base(sampler: ProbabilisticTensorDictModule) -> bool:
    """Return whether a tensordict or TorchRL sampler writes log-probabilities of possibly transformed samples."""
    if not sampler.return_log_prob or not samples_once(sampler):
        return False
    dist: Any = sampler.distribution_class  # a class, or a function that makes anything
    layered = (TransformedDistribution, Independent, CompositeDistribution)
    return not isinstance(dist, type) or issubclass(dist, layered)


def samples_once(sampler: ProbabilisticTensorDictModule) -> bool:
    """Return whether a sampler is tensordict's or TorchRL's and draws one sample from torch's default generators."""
    kind = type(sampler)
    own = sampler.__dict__
    known = kind is ProbabilisticTensorDictModule or (
        kind.__name__ == "SafeProbabilisticModule" and kind.__module__.startswith("torchrl.")
    )

    if not known or own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    return sampler.num_samples is None and own.get("_generator") is None and not own.get("_generator_key")


def _sample(sampler: ProbabilisticTensorDictModule, batch: TensorDictBase) -> TensorDictBase:
    """Do what the sampler does, in a third of the time; also keep the base samples, from before the transforms."""
    kind = interaction_kind() or sampler.default_interaction_type
    if kind is InteractionType.RANDOM and samples_once(sampler):
        parts = components(build_distribution(sampler, batch))
        action_keys: list[Any] = sampler.dist_sample_keys
        same_names = None in parts or list(parts) == action_keys

        if same_names and len(parts) == len(action_keys):
            if not sampler.return_log_prob:
                for key, part in zip(action_keys, parts.values(), strict=True):
                    sample = part.rsample() if part.has_rsample else part.sample()
                    set_entry(batch, key, sample)
                return batch

            log_prob_keys: list[Any] = sampler.log_prob_keys or []
            if len(log_prob_keys) == len(action_keys):
                for key, log_prob_key, part in zip(action_keys, log_prob_keys, parts.values(), strict=True):
                    action, log_prob, base = draw(part, reparametrize=part.has_rsample)
                    set_entry(batch, key, action)
                    set_entry(batch, log_prob_key, log_prob)
                    if base is not None:
                        set_entry(batch, base_sample_key(key), base)
                return batch

    out: TensorDictBase = sampler(batch)
    return out


def build_distribution(
    sampler: ProbabilisticTensorDictModule,
    batch: TensorDictBase,
    outputs: Mapping[NestedKey, Any] | None = None,
) -> Distribution:
    """Return ``sampler.get_dist(batch)``, where entries of ``outputs`` replace those of the batch.

    >>> from torch.distributions import Normal
    >>> sampler = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal)
    >>> build_distribution(sampler, TensorDict({"loc": torch.zeros(2), "scale": torch.ones(2)}, [2]))
    Normal(loc: torch.Size([2]), scale: torch.Size([2]))
    """
    if outputs is None:
        outputs = {}

    plain = type(sampler).get_dist is ProbabilisticTensorDictModule.get_dist
    if plain and sampler.dist_keys == sampler.in_keys:
        keys: list[Any] = sampler.in_keys
        columns = {}
        for key in keys:
            if type(key) is str:
                columns[key] = outputs[key] if key in outputs else get_entry(batch, key)

        if len(columns) == len(keys):
            # faster than get_dist(), which runs only if this fails, to raise its own error
            with suppress(TypeError):
                built: Distribution = sampler.distribution_class(**columns, **sampler.distribution_kwargs)
                return built

    if outputs:
        batch = shallow_copy(batch).update(outputs)
    dist: Distribution = sampler.get_dist(batch)
    return dist


def prepare_sampling(
    actor: TensorDictModuleBase, batch: TensorDictBase, readers: Iterable[TensorDictModuleBase] | None = None
) -> tuple[ProbabilisticTensorDictModule, TensorDictBase, dict[NestedKey, Any]] | None:
    """Run an actor up to its last, sampling part.

    Args:
        actor: any; one that is no plain sequence, or samples in other parts, too, is left alone.
        batch: what it reads.
        readers: the networks that read the batch afterwards; then it stays as it is, and its copy, into which the
            actor's parts write, is only made where one of them may read that. Default: None, anybody; then the parts
            write into the batch itself.

    Returns:
        the last part; the batch, or its copy; and all that the last part reads, by key, where that was not written
        there, else nothing. None, and nothing has run, if the actor is another one.
    """
    own = plain_attributes(actor, ProbabilisticTensorDictSequential, PLAIN_ACTOR)
    if own is None:
        return None

    *parts, last = parts_of(own).values()
    sampling = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)
    if not isinstance(last, ProbabilisticTensorDictModule) or any(isinstance(x, sampling) for x in parts):
        return None

    # parts may query the interaction type: that of the enclosing block, else the last part's default
    before = interaction_kind()
    exchange_interaction_type(before or last.default_interaction_type)
    try:
        if readers is not None:
            # what the only part before the last one makes
            made: list[Any] = parts[0].out_keys if len(parts) == 1 else []
            roots = {key if isinstance(key, str) else key[0] for key in made}

            alone = all(key in made for key in last.in_keys)
            for reader in readers:  # a reader that is not a plain function may read any entry
                read: Any = reader.in_keys
                alone = alone and plain_attributes(reader, TensorDictModule, PLAIN_MODULE) is not None
                alone = alone and not any((key if isinstance(key, str) else key[0]) in roots for key in read)

            if made and alone:
                outputs = call_plain(parts[0], batch)
                if outputs is not None:
                    return last, batch, outputs
            batch = shallow_copy(batch)

        for part in parts:
            batch = call_network(part, batch)
    finally:
        exchange_interaction_type(before)

    return last, batch, {}


def call_for(network: TensorDictModuleBase, batch: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Return what the network writes under ``key``, or None if it does not write it; the batch stays as it is."""
    out_keys: list[Any] = network.out_keys
    if key not in out_keys and as_tuple(key) not in map(as_tuple, out_keys):
        return None  # an entry of the batch with this name is not the network's

    if len(out_keys) == 1:
        outputs = call_plain(network, batch)
        if outputs is not None:
            value = outputs[out_keys[0]]
            if isinstance(value, Tensor):
                return value  # a plain function does not write into the batch, so no copy is needed

    found: Tensor | None = get_entry(call_network(network, shallow_copy(batch)), key)
    return found


def call_plain(
    network: TensorDictModuleBase, batch: TensorDictBase | Mapping[NestedKey, Tensor]
) -> dict[NestedKey, Any] | None:
    """Call the network's function and return its outputs by key; None, without a call, if it does more than that.

    >>> network = TensorDictModule(torch.nn.Identity(), in_keys=["a"], out_keys=["b"])
    >>> call_plain(network, {"a": torch.ones(2)})
    {'b': tensor([1., 1.])}
    """
    if plain_attributes(network, TensorDictModule, PLAIN_MODULE) is None:
        return None

    entries: Any = batch
    inputs = []
    for key in cast(list[Any], network.in_keys):
        if type(batch) is TensorDict and type(key) is str:
            column = entries._tensordict.get(key)
        else:
            column = entries.get(key, None)
        if not isinstance(column, Tensor):
            return None
        inputs.append(column)

    return call_function_of(network, inputs)


def call_function_of(network: TensorDictModuleBase, inputs: Sequence[Tensor]) -> dict[NestedKey, Any]:
    """Call the function of a plain module; return its outputs by key."""
    # looking up network.module would take longer than everything else here
    own = network.__dict__
    function = own["module"] if "module" in own else own["_modules"]["module"]
    try:
        out = function(*inputs)
    except Exception as error:
        error.add_note(f"In the network with in_keys {network.in_keys} and out_keys {network.out_keys}")
        raise

    keys: list[Any] = network.out_keys
    if isinstance(out, Tensor) and len(keys) == 1:
        return {keys[0]: out}
    if isinstance(out, (dict, TensorDictBase)) and all(key in out for key in keys):
        out = tuple(out[key] for key in keys)
    elif not isinstance(out, tuple):
        out = () if out is None else (out,)

    if len(out) != len(keys):
        raise ValueError(f"a network with out_keys {keys} returned {len(out)} tensors: give each a key")

    outputs = {}
    for key, value in zip(keys, out, strict=True):
        if not isinstance(value, Tensor):
            value = TensorDict.from_any(value)
        outputs[key] = value
    return outputs


def parts_of(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a sequence with these attributes, which are in a ModuleList or a ModuleDict."""
    parts: Any = own["_modules"]["module"]
    held: dict[str, Any] = parts._modules
    return held
