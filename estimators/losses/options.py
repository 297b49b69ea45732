"""Arguments that the policy-gradient losses share, and the checks of them."""

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, TypeAlias, TypedDict, cast

import torch
from tensordict import unravel_key
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.distributions import require_actor
from flatroll.estimators.masked import Distance, Reduction
from flatroll.layout.keys import NestedKey, as_tuple

#: A factor: a number, or a tensor of one.
Coefficient: TypeAlias = float | Tensor


class CriticOptions(TypedDict, total=False):
    """Options of every policy-gradient loss; :class:`PolicyGradientLoss` says what they mean."""

    actor: TensorDictModuleBase | None
    critic: TensorDictModuleBase | None
    critic_coeff: Coefficient | None
    loss_critic_type: Distance
    clip_value: bool | Coefficient | None
    normalize_advantage: bool
    separate_losses: bool
    burn_in: int
    reduction: Reduction | None
    diagnostics: bool
    functional: bool
    device: torch.device | str | None


class PolicyOptions(CriticOptions, total=False):
    """Options of the losses with an entropy term."""

    entropy_bonus: bool
    entropy_coeff: Coefficient | Mapping[NestedKey, float] | None
    samples_mc_entropy: int


#: Arguments that have another name or place here, and where.
_ELSEWHERE = {
    "entropy_coef": "entropy_coeff=",
    "critic_coef": "critic_coeff=",
    "gamma": "make_value_estimator(gamma=...)",
    "lmbda": "make_value_estimator(lmbda=...)",
    "advantage_key": "set_keys(advantage=...)",
    "value_target_key": "set_keys(value_target=...)",
    "value_key": "set_keys(value=...)",
}


def refuse_unknown(loss: object, unknown: Mapping[str, object]) -> None:
    """Raise TypeError if there are unknown arguments, naming the loss, the argument, and what may have been meant.

    >>> refuse_unknown(3, {"gamma": 0.9})
    Traceback (most recent call last):
    TypeError: int got an unexpected keyword argument 'gamma': use make_value_estimator(gamma=...)
    """
    for name in unknown:
        makers = [cls.__dict__["__init__"] for cls in type(loss).__mro__[:-1] if "__init__" in cls.__dict__]
        own = {x for make in makers for x in inspect.signature(make).parameters}
        near = get_close_matches(name, sorted(own - {"self"}), 1)
        meant = _ELSEWHERE.get(name, f"{near[0]}=" if near else None)
        hint = f": use {meant}" if meant else ""
        raise TypeError(f"{type(loss).__name__} got an unexpected keyword argument {name!r}{hint}")


def check_networks(
    loss: object,
    actor_network: TensorDictModuleBase | None,
    critic_network: TensorDictModuleBase | None,
    actor: TensorDictModuleBase | None,
    critic: TensorDictModuleBase | None,
) -> tuple[TensorDictModuleBase, TensorDictModuleBase | None]:
    """Return actor and critic, each given by either of its two names.

    Raises:
        TypeError: one is given by both names, the actor is missing, or one is no network of its kind.
    """
    for name, by_name, short, by_short in (
        ("actor_network", actor_network, "actor", actor),
        ("critic_network", critic_network, "critic", critic),
    ):
        if by_name is not None and by_short is not None:
            raise TypeError(f"give {name}= or {short}=, not both: they are two names of one argument")
    actor_network = actor if actor_network is None else actor_network
    critic_network = critic if critic_network is None else critic_network
    if actor_network is None:
        raise TypeError(f"{type(loss).__name__} needs an actor_network")
    require_actor(actor_network)
    if critic_network is not None and not hasattr(critic_network, "in_keys"):
        raise TypeError(
            "critic_network must be a tensordict module, e.g. TensorDictModule(net, "
            f"in_keys=['observation'], out_keys=['state_value']), got {type(critic_network).__name__}"
        )
    return actor_network, critic_network


def keys_written_by(actor: TensorDictModuleBase) -> dict[str, Any]:
    """Return the keys under which an actor writes ``action`` and ``sample_log_prob``, as far as it says."""
    heads: list[Any] = [part for part in actor.modules() if isinstance(part, ProbabilisticTensorDictModule)]
    if not heads:
        return {}
    # its distribution is that of its last part alone, unless it says that it is one of all parts that sample
    sampler: Any = actor if getattr(actor, "return_composite", False) else heads[-1]
    keys: dict[str, Any] = {"action": list(sampler.dist_sample_keys)}
    # it refuses to say where it was built under another set_composite_lp_aggregate
    with suppress(RuntimeError):
        log_prob_keys = list(sampler.log_prob_keys)
        # the log-probability of several parts may stand in one entry, too: the loss looks where it is
        keys |= {"sample_log_prob": log_prob_keys} if len(log_prob_keys) == 1 else {}
    return keys


def clip_distance(clip_value: bool | Coefficient | None) -> Coefficient | None:
    """Return the largest move of a value, above 0; None where none is set.

    Raises:
        ValueError: it is True, or not above 0.
    """
    if clip_value is True:
        raise ValueError("clip_value=True takes the clip_epsilon of ClipPPOLoss: give a number here")
    if clip_value is None or clip_value is False:
        return None
    is_number = isinstance(clip_value, (int, float)) or (
        isinstance(clip_value, Tensor) and clip_value.numel() == 1
    )
    if is_number and not clip_value > 0:
        raise ValueError(f"clip_value must be above 0, got {clip_value!r}; None leaves the value unclipped")
    return clip_value


def clip_limits(clip_epsilon: Coefficient | Sequence[float], single: bool = False) -> dict[str, Coefficient]:
    """Return the limits of probability ratios by the names of their buffers: one of both sides, or a pair.

    With ``single``, ``clip_value=True`` asks for one.

    Raises:
        ValueError: it is no number or pair, not above 0, or reaches 1 on the lower side.

    >>> clip_limits((0.2, 0.3))
    {'clip_epsilon_low': 0.2, 'clip_epsilon_high': 0.3}
    """
    numbers: dict[str, Coefficient] = {"clip_epsilon": cast(Coefficient, clip_epsilon)}
    if isinstance(clip_epsilon, Sequence):
        if len(clip_epsilon) != 2:
            raise ValueError(f"clip_epsilon must be a number or a pair, of length 2, got {clip_epsilon}")
        numbers = {"clip_epsilon_low": clip_epsilon[0], "clip_epsilon_high": clip_epsilon[1]}
    low, *_, high = 2 * (*numbers.values(),)  # one number is both
    if not (0.0 < low < 1.0 and high > 0.0):
        raise ValueError(f"clip_epsilon must be above 0, and below 1 on the lower side, got {clip_epsilon}")
    if single and len(numbers) > 1:
        raise ValueError("clip_value=True needs one clip_epsilon, not a pair: give clip_value a number")
    return numbers


def entropy_coefficients(coefficients: Mapping[NestedKey, float]) -> dict[NestedKey, float]:
    """Return a copy with each key of an action's part in its plain form.

    Raises:
        ValueError: there are none, or one is not a finite number.
    """
    numbers: dict[NestedKey, float] = {}
    for key, number in coefficients.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError(f"entropy_coeff[{key!r}] must be a finite number, got {number!r}")
        numbers[cast(NestedKey, unravel_key(key))] = float(number)
    if not numbers:
        raise ValueError("entropy_coeff must have a number for each part of the action, got an empty mapping")
    return numbers


def weighted_entropy(
    entropies: Mapping[NestedKey, Tensor], coefficients: Mapping[NestedKey, float]
) -> Tensor:
    """Add up the entropies ``[*B]`` of an action's parts, each times its own coefficient.

    A part is named by its action's key, or by the key of its log-probability (``"..._log_prob"``).

    Raises:
        KeyError: a part has no coefficient, or a coefficient no part.

    >>> parts = {("arm", "action"): torch.tensor([1.0]), ("leg", "action"): torch.tensor([10.0])}
    >>> weighted_entropy(parts, {("arm", "action"): 0.5, ("leg", "action_log_prob"): 0.1})
    tensor([1.5000])
    """
    left, total = dict(coefficients), None
    for key, entropy in entropies.items():
        *path, last = as_tuple(key)
        names = (key, unravel_key((*path, f"{last}_log_prob")))
        known = [name for name in names if name in left]
        if not known:
            raise KeyError(
                f"entropy_coeff has no number for the action's part {key!r}: it has {list(coefficients)}"
            )
        term = left.pop(known[0]) * entropy
        total = term if total is None else total + term
    if left or total is None:
        raise KeyError(f"entropy_coeff names {list(left)}, but the action's parts are {list(entropies)}")
    return total
