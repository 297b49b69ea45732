"""Calls an actor of known parts on columns: without a tensordict and without an object for its distribution.

A collector calls its policy at every vector step, on a few rows. There the network takes a third of the time of a call;
the rest builds a tensordict, a distribution and their checks anew. What the parts of `flatroll.modules.actor` do with
the columns is known, so `ColumnActor` does only that, with the same numbers from the generator. Results have the same
bits, except for log-probabilities of choices: they are made by log_softmax, one operation for the seven of
``Categorical``, and may differ from its in the last digits (and so may a choice that is within these of another).

Any other policy is called as it is: one with parts of another kind, with hooks, compiled, under autocast, with a
distribution that has no `DrawsFromParameters`, or of several actions. Under another interaction type than random use
no `ColumnActor`: it draws.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor
from torch.distributions import Categorical

from flatroll.layout.keys import NestedKey, as_tuple, plain_key
from flatroll.layout.sampling import base_sample_key
from flatroll.layout.tensordict_seam import (
    PLAIN_ACTOR,
    PLAIN_MODULE,
    PLAIN_SEQUENCE,
    SAMPLING_ACTOR,
    call_function_of,
    calls_do_more,
    hooks_of,
    parts_of,
    plain_attributes,
    samples_once,
)

#: Tensors ``[E, ...]`` by key.
Columns: TypeAlias = dict[NestedKey, Tensor]

#: What a draw without a distribution returns: actions ``[E, *shape]``, their log-probabilities ``[E]``, and what
#: transforms made the actions of, or None. None in place of all three: the distribution is to draw, or to refuse.
Drawn: TypeAlias = tuple[Tensor, Tensor, Tensor | None] | None


class ColumnModule(Protocol):
    """A module that also computes its outputs from columns.

    A class counts only if it defines ``on_columns`` where it defines ``forward``: a subclass with another ``forward``
    does something else.
    """

    in_keys: Sequence[Any]
    out_keys: Sequence[Any]

    def takes_columns(self) -> bool:
        """Return whether the next call of ``forward`` would do what ``on_columns`` does."""
        ...

    def on_columns(self, columns: Columns) -> None:
        """Do what ``forward`` does with a tensordict ``[E]`` of these entries; keys are tuples only if nested."""
        ...


class DrawsFromParameters(Protocol):
    """A distribution whose class draws without making one."""

    @classmethod
    def drawer(cls, **options: Any) -> "Callable[..., Drawn]":
        """Return a function of the parameters, by name: what `draw` returns for ``cls(..., **options)``, or None."""
        ...


class ColumnActor:
    """The parts of an actor, called on columns.

    Make it with `of`, after a first call of the policy, which checks what it reads. Every call checks that the policy
    is still what it was then: hooks, other parts or another distribution may come at any time.
    """

    def __init__(self, parts: "_Parts", draw: Any = None) -> None:
        self._parts = parts
        self._draw = draw
        #: The parts in turn, with the columns that a plain one reads; None for a `ColumnModule`.
        self._calls: list[tuple[Any, list[NestedKey] | None]] = []
        for module in parts.modules:
            reads = None
            if not _takes_columns(module):
                reads = _plain_keys(module.in_keys)
            self._calls.append((module, reads))

        made: set[NestedKey] = set()
        #: The columns that a call needs.
        self._reads: set[NestedKey] = set()
        for module in parts.modules:
            self._reads |= {key for key in _plain_keys(module.in_keys) if key not in made}
            made |= {*_plain_keys(module.out_keys)}

        sampler = parts.sampler
        if sampler is not None:
            self._parameters: list[str] = list(sampler.in_keys)
            self._reads |= {key for key in self._parameters if key not in made}
            [self._action] = _plain_keys(sampler.dist_sample_keys)
            self._log_prob = None
            if sampler.return_log_prob:
                [self._log_prob] = _plain_keys(sampler.log_prob_keys)
            self._base = base_sample_key(self._action)

    @classmethod
    def of(cls, policy: Any) -> "ColumnActor | None":
        """Return the actor's parts; None if the policy is called as it is."""
        parts = _Parts()
        own = plain_attributes(policy, ProbabilisticTensorDictSequential, PLAIN_ACTOR | SAMPLING_ACTOR)
        if own is None:
            return cls(parts) if parts.enter(policy) else None

        *modules, sampler = parts.open(policy, own)
        draw = _find_drawer(sampler)
        if draw is None or not all(map(parts.enter, modules)):
            return None
        parts.end_with(sampler)
        return cls(parts, draw)

    @property
    def draws(self) -> bool:
        """Whether it draws actions; otherwise it computes them, under every interaction type."""
        return self._draw is not None

    def __call__(self, columns: Columns) -> bool:
        """Add what the actor writes to the columns; False if the policy must be called as it is."""
        if not self._parts.are_unchanged() or not columns.keys() >= self._reads:
            return False

        for module, reads in self._calls:
            if reads is None:
                module.on_columns(columns)
                continue

            outputs = call_function_of(module, [columns[key] for key in reads])
            for key, value in outputs.items():
                if not isinstance(key, str):
                    key = plain_key(key)
                if key != "_":  # the name of an unused output
                    columns[key] = value

        if self._draw is None:
            return True

        drawn = self._draw(**{name: columns[name] for name in self._parameters})
        if drawn is None:
            return False
        columns[self._action], log_prob, base = drawn
        if self._log_prob is not None:
            columns[self._log_prob] = log_prob
            if base is not None:
                columns[self._base] = base
        return True


#: What no option is.
_MISSING: Any = object()


class _Parts:
    """The parts of a policy that is called on columns, as they were found.

    Attributes:
        modules: in the order of their calls; those of sequences within the policy are among them.
        sampler: the last part, if it draws the action.
    """

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.sampler: Any = None
        # The modules that are to be asked at each call, and what the sampler draws from.
        self._asked: list[Any] = []
        self._distribution: Any = None
        self._options: dict[str, Any] = {}
        # What the policy and the sequences within it hold, and the parts that were in each.
        self._lists: list[tuple[Mapping[str, Any], list[Any]]] = []
        # All parts and sequences, with what each read; and their tables of hooks.
        self._reads: list[tuple[Any, list[Any]]] = []
        self._hooks: list[Mapping[Any, Any]] = []

    def note(self, module: Any) -> None:
        """Note what a part reads and its hooks."""
        self._reads.append((module, list(module.in_keys)))
        self._hooks += hooks_of(module.__dict__)

    def open(self, sequence: Any, own: Mapping[str, Any]) -> list[Any]:
        """Note a sequence with these attributes; return its parts."""
        held = parts_of(own)
        parts = list(held.values())
        self._lists.append((held, parts))
        self.note(sequence)
        return parts

    def enter(self, module: Any) -> bool:
        """Add a part or, if it is a sequence, the parts of that; False if one is of another kind."""
        own = plain_attributes(module, TensorDictSequential, PLAIN_SEQUENCE)
        if own is not None:
            return all(map(self.enter, self.open(module, own)))

        own = plain_attributes(module, TensorDictModule, PLAIN_MODULE)
        if own is None and _takes_columns(module):
            own = plain_attributes(module, type(module), {})
        if own is None:
            return False
        self.modules.append(module)
        if _takes_columns(module):
            self._asked.append(module)
        self.note(module)
        return True

    def end_with(self, sampler: Any) -> None:
        """Add the part that draws the action."""
        self.sampler = sampler
        self._distribution = sampler.distribution_class
        self._options = dict(sampler.distribution_kwargs)
        self.note(sampler)

    def are_unchanged(self) -> bool:
        """Return whether the policy has these parts, which read the same entries and do nothing but run."""
        if torch.is_autocast_enabled("cpu") or any(self._hooks) or calls_do_more():
            return False
        for held, parts in self._lists:
            if [*held.values()] != parts:
                return False
        for module, keys in self._reads:
            if module.in_keys != keys or "_compiled_call_impl" in module.__dict__:
                return False
        for module in self._asked:
            if not module.takes_columns():
                return False

        sampler = self.sampler
        if sampler is None:
            return True
        options = sampler.distribution_kwargs
        if sampler.distribution_class is not self._distribution or len(options) != len(self._options):
            return False
        return all(options.get(name, _MISSING) is value for name, value in self._options.items())


def _plain_keys(keys: Sequence[Any]) -> list[NestedKey]:
    return [plain_key(as_tuple(key)) for key in keys]


def _takes_columns(module: Any) -> bool:
    """Return whether a module is a `ColumnModule`."""
    for kind in type(module).__mro__:
        if "forward" in kind.__dict__:
            return "on_columns" in kind.__dict__
    return False


def _find_drawer(sampler: Any) -> "Callable[..., Drawn] | None":
    """Return what draws from the parameters that a sampler reads; None if the distribution itself is to draw."""
    if type(sampler) is not ProbabilisticTensorDictModule or not samples_once(sampler) or sampler.cache_dist:
        return None

    scores = list(sampler.log_prob_keys or [])
    if len(sampler.dist_sample_keys) != 1 or (sampler.return_log_prob and len(scores) != 1):
        return None

    distribution = sampler.distribution_class
    options = sampler.distribution_kwargs
    draw: Any = None
    if distribution is Categorical:
        if options.keys() <= {"validate_args"}:
            draw = draw_choice
    else:
        # a subclass may draw otherwise
        own: Any = getattr(distribution, "__dict__", {}).get("drawer")
        if own is not None:
            draw = own.__get__(None, distribution)(**options)

    # A distribution takes its parameters by name: probabilities are no logits.
    if draw is None or sampler.dist_keys != sampler.in_keys:
        return None
    if {*sampler.in_keys} != {*inspect.signature(draw).parameters}:
        return None
    found: Callable[..., Drawn] = draw
    return found


def draw_choice(logits: Tensor) -> Drawn:
    """Draw an option of each row as ``Categorical(logits=logits)`` does, ``[N, n]``; None where it would refuse to."""
    if logits.ndim != 2:
        return None

    log_probs = logits.log_softmax(-1)
    probabilities = log_probs.exp()
    if probabilities.is_cpu:
        # As torch.multinomial draws one sample on the host, the largest probability divided by an exponential number,
        # but without its checks of the probabilities.
        waits = torch.empty_like(probabilities).exponential_()
        choice = (probabilities / waits).argmax(-1, keepdim=True)
    else:
        choice = torch.multinomial(probabilities, 1, True)

    log_prob = log_probs.gather(-1, choice).squeeze(-1)
    # NaN is the largest number to argmax, so where a row had one, or had infinite logits, the log-probability of its
    # option is NaN. On a device torch.multinomial has looked.
    if log_prob.is_cpu and not math.isfinite(log_prob.sum().item()):
        return None
    return choice.squeeze(-1), log_prob, None
