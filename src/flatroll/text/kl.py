"""Estimates of the KL divergence from log-ratios of sampled tokens, and controllers of its coefficient."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from flatroll.layout.checks import as_text, check_choice, check_dense_tensor, check_number

#: Names of the estimates of `kl_estimate`.
KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]

#: One update multiplies the coefficient by at least this factor.
_SMALLEST_FACTOR = 0.1


def kl_estimate(log_ratio: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Return an estimate of KL(policy, reference) for each sampled token.

    With ``r = log p(token) - log p_ref(token)``, and tokens drawn from ``p``:

    | estimator | value           | properties |
    |---|---|---|
    | ``k1``    | ``r``           | unbiased, negative for some tokens |
    | ``k2``    | ``r ** 2 / 2``  | biased, never negative, small variance |
    | ``k3``    | ``exp(-r)-1+r`` | unbiased, never negative |

    Source: Schulman, "Approximating KL Divergence" (2020).

    Args:
        log_ratio: ``r`` of any shape.
        estimator: ``"k1"`` (default), ``"k2"`` or ``"k3"``.

    Returns:
        a tensor of the shape of ``log_ratio``.

    Raises:
        ValueError: ``estimator`` has another value.

    >>> import torch
    >>> for estimator in ("k1", "k2", "k3"):
    ...     print(kl_estimate(torch.tensor([0.5, -0.5]), estimator))
    tensor([ 0.5000, -0.5000])
    tensor([0.1250, 0.1250])
    tensor([0.1065, 0.1487])
    """
    check_dense_tensor("log_ratio", log_ratio)
    if check_choice("estimator", estimator, ("k1", "k2", "k3")) == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return (-log_ratio).expm1() + log_ratio


class HasCoefficient(Protocol):
    """An object with a KL penalty coefficient, such as a `RolloutFromModel`."""

    kl_coef: float


class KLControllerBase(ABC):
    """Holds the coefficient of the KL penalty and adapts it to the KL of the rollouts.

    Args:
        coef: the first coefficient.
        model: object whose attribute ``kl_coef`` follows the coefficient, such as a `RolloutFromModel`. Default: None.

    Raises:
        AttributeError: ``model`` has no attribute ``kl_coef``.
    """

    def __init__(self, coef: float, model: HasCoefficient | None = None) -> None:
        self.coef = float(check_number("coef", coef))
        self.model = model
        if model is not None:
            if not hasattr(model, "kl_coef"):
                raise AttributeError(
                    f"model must have an attribute 'kl_coef', as RolloutFromModel has; got a {type(model).__name__}"
                )
            model.kl_coef = self.coef

    @abstractmethod
    def update(
        self, kl_values: Sequence[float] | None = None, *, kl: float | None = None, n_steps: int | None = None
    ) -> float:
        """Update from the rollouts since the last call; return the new coefficient."""


class ConstantKLController(KLControllerBase):
    """Keeps the coefficient constant.

    Args:
        kl_coef: the coefficient, not negative. Default: that of ``model``.
        model: object whose attribute ``kl_coef`` is set to the coefficient. Default: None.

    Raises:
        ValueError: the coefficient is negative or not finite, or neither argument gives one.

    >>> ConstantKLController(kl_coef=0.1).update([-0.3])
    0.1
    """

    def __init__(self, *, kl_coef: float | None = None, model: HasCoefficient | None = None) -> None:
        if kl_coef is None:
            kl_coef = getattr(model, "kl_coef", None)
        if kl_coef is None and (model is None or hasattr(model, "kl_coef")):
            raise ValueError("kl_coef is missing: pass a number, or a model that has one")

        coef = 0.0 if kl_coef is None else check_number("kl_coef", kl_coef, least=0, below=math.inf)
        super().__init__(coef, model)

    def update(
        self, kl_values: Sequence[float] | None = None, *, kl: float | None = None, n_steps: int | None = None
    ) -> float:
        """Return the coefficient, ignoring the arguments, and set it on the model."""
        if self.model is not None:
            self.model.kl_coef = self.coef
        return self.coef


class AdaptiveKLController(KLControllerBase):
    """Raises the coefficient when the KL is above a target, and lowers it when it is below.

    ``coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * n_steps / horizon``

    The factor is at least 0.1, so that the coefficient stays positive however large ``n_steps / horizon`` is.
    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2.

    Args:
        init_kl_coef: the first coefficient, positive.
        target: the KL to hold, positive, in the unit of the values passed to `update` (per token from
            `RolloutFromModel`).
        horizon: number of steps, with a KL far from the target, in which the coefficient changes by 20 %.
        model: object whose attribute ``kl_coef`` is set to the coefficient. Default: None.

    Raises:
        ValueError: a number is not positive and finite.

    >>> controller = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)
    >>> round(controller.update(kl=3.0, n_steps=5), 6), round(controller.update(kl=0.1, n_steps=5), 6)
    (0.11, 0.099)
    """

    def __init__(
        self, *, init_kl_coef: float, target: float, horizon: int, model: HasCoefficient | None = None
    ) -> None:
        for name, value in (("init_kl_coef", init_kl_coef), ("target", target), ("horizon", horizon)):
            check_number(name, value, above=0, below=math.inf)
        super().__init__(init_kl_coef, model)
        self.target = float(target)
        self.horizon = horizon

    def update(
        self, kl_values: Sequence[float] | None = None, *, kl: float | None = None, n_steps: int | None = None
    ) -> float:
        """Update the coefficient from the KL of one or more rollouts, given in one of two ways.

        Args:
            kl_values: mean KL *rewards* of the rollouts, ``-coef * KL`` each (entry ``reward_kl``), at the
                present coefficient. A KL above the target is a negative number here.
            kl: mean KL of the rollouts, above the target if it is to raise the coefficient.
            n_steps: how many steps ``kl`` is the mean of. Default: 1. With ``kl_values``: their number.

        Returns:
            the new coefficient, a float.

        Raises:
            ValueError: none or both of ``kl_values`` and ``kl`` are given, ``kl_values`` is empty, a number is not
                finite, or ``n_steps`` is not positive.
        """
        if (kl_values is None) == (kl is None):
            raise ValueError("pass either kl_values (rewards, -coef * KL) or kl= (the KL itself)")

        if kl_values is not None:
            if not isinstance(kl_values, Sequence | Tensor) or (
                isinstance(kl_values, Tensor) and not kl_values.ndim
            ):
                raise TypeError(f"kl_values must be a list of numbers, got {as_text(kl_values)}")
            rewards = [x if isinstance(x, float) else float(check_number("kl_values", x)) for x in kl_values]
            if not rewards:
                raise ValueError("kl_values is empty: do a rollout before the update")
            if n_steps is not None:
                raise ValueError("n_steps is only for kl=; with kl_values the number of values is used")
            n_steps = len(rewards)
            kl = -math.fsum(rewards) / len(rewards) / self.coef

        assert kl is not None
        if not isinstance(kl, float):
            kl = float(check_number("kl", kl))
        if not math.isfinite(kl):
            raise ValueError(f"the KL must be finite, got {kl}: a log-probability is not finite")
        n_steps = 1 if n_steps is None else check_number("n_steps", n_steps, above=0)

        error = min(max(kl / self.target - 1, -0.2), 0.2)
        factor = max(1 + error * n_steps / self.horizon, _SMALLEST_FACTOR)
        self.coef = min(max(self.coef * factor, sys.float_info.min), sys.float_info.max)

        if self.model is not None:
            self.model.kl_coef = self.coef
        return self.coef
