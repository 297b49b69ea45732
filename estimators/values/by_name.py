"""The value estimators by name, as losses take them."""

import inspect
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeAlias, cast

from tensordict.nn import TensorDictModuleBase

from flatroll.estimators.masked import one_of
from flatroll.estimators.values.base import ValueEstimator
from flatroll.estimators.values.gae import GAE
from flatroll.estimators.values.td import TD0Estimator, TD1Estimator, TDLambdaEstimator
from flatroll.estimators.values.vtrace import VTrace


class ValueEstimators(StrEnum):
    """Names of the estimators; the plain text will do as well, and so will ``"TDLambda"`` for ``"td_lambda"``.

    >>> ValueEstimators.TDLambda == "td_lambda"
    True
    """

    TD0 = "td0"
    TD1 = "td1"
    TDLambda = "td_lambda"
    GAE = "gae"
    VTrace = "vtrace"


#: What a loss takes: a name, the class, or an estimator that is ready.
Kind: TypeAlias = ValueEstimators | str | type[ValueEstimator] | ValueEstimator

_DEFAULTS = {"gamma": 0.99, "lmbda": 0.95}
_CLASSES: dict[str, type[ValueEstimator]] = {
    "td0": TD0Estimator,
    "td1": TD1Estimator,
    "td_lambda": TDLambdaEstimator,
    "gae": GAE,
    "vtrace": VTrace,
}


def name_of(kind: str | type[ValueEstimator]) -> str:
    """The name of a kind.

    Raises:
        ValueError: there is no such estimator.

    >>> name_of("TDLambda"), name_of(GAE)
    ('td_lambda', 'gae')
    """
    if isinstance(kind, str):
        name = str(ValueEstimators.__members__.get(kind, kind))
        one_of("value_type", name, tuple(_CLASSES))
        return name
    for name, known in _CLASSES.items():
        if kind is known:
            return name
    raise ValueError(f"value_type must be a name in ValueEstimators or one of its classes, got {kind!r}")


def make_estimator(
    kind: Kind, networks: Mapping[str, TensorDictModuleBase | None], arguments: dict[str, Any]
) -> ValueEstimator:
    """The estimator of that kind.

    Args:
        kind: a name, a class, or an estimator, which is given back as it is.
        networks: ``value_network`` and ``actor_network``, taken where ``arguments`` name no others.
        arguments: of the class. Default: ``gamma`` 0.99, and ``lmbda`` 0.95 where there is one.

    Raises:
        ValueError: unknown name, arguments for an estimator that is ready, or no value network.
        TypeError: the class knows no such argument.
    """
    if isinstance(kind, ValueEstimator):
        if arguments:
            raise ValueError(f"this {type(kind).__name__} has its arguments, got {', '.join(arguments)}, too")
        return cast(ValueEstimator, kind)
    chosen = _CLASSES[name_of(kind)] if isinstance(kind, str) else cast(type[ValueEstimator], kind)
    known = inspect.signature(chosen).parameters
    found: dict[str, Any] = {**_DEFAULTS, **networks}
    if networks["value_network"] is None and "value_network" not in arguments:
        raise ValueError(
            f"this loss has no critic_network: give {chosen.__name__} a value_network=, or write the advantage "
            "into the batch yourself, e.g. with reward2go"
        )
    return chosen(**{name: value for name, value in found.items() if name in known} | arguments)
