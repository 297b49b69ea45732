"""The value estimators by name, as losses take them."""

import inspect
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeAlias, cast

from tensordict.nn import TensorDictModuleBase

from flatroll.estimators.base import ValueEstimator
from flatroll.estimators.gae import GAE
from flatroll.estimators.reductions import one_of
from flatroll.estimators.td import TD0Estimator, TD1Estimator, TDLambdaEstimator
from flatroll.estimators.vtrace import VTrace


class ValueEstimators(StrEnum):
    """Names of the estimators; the plain text will do as well.

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
    if isinstance(kind, str):
        one_of("value_type", str(kind), tuple(_CLASSES))
    chosen = _CLASSES[str(kind)] if isinstance(kind, str) else cast(type[ValueEstimator], kind)
    known = inspect.signature(chosen).parameters
    found: dict[str, Any] = {**_DEFAULTS, **networks}
    if networks["value_network"] is None and "value_network" not in arguments:
        raise ValueError(f"this loss has no critic_network: give {chosen.__name__} a value_network=")
    return chosen(**{name: value for name, value in found.items() if name in known} | arguments)
