"""Schedulers for attributes of a sampler (``alpha``, ``beta``) or any other object."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from flatroll.buffers.replay_buffer import ReplayBuffer
from flatroll.layout.checks import check_choice, check_function, check_number, check_type, check_whole_number


class ParameterScheduler(ABC):
    """Sets an attribute at each :meth:`step` to the subclass's :meth:`value` (see `LinearScheduler`).

    Args:
        obj: a replay buffer, for its sampler, or any object.
        param_name: the attribute, ``"beta"`` for instance; a number or a tensor of one.
        min_value, max_value: bounds of the values set, default none.

    Attributes:
        initial_value: the attribute before the first step.
        steps: steps so far.

    Raises:
        AttributeError: there is no such attribute.
    """

    def __init__(
        self, obj: Any, param_name: str, min_value: float | None = None, max_value: float | None = None
    ) -> None:
        if min_value is None:
            min_value = -math.inf
        else:
            check_number("min_value", min_value, below=math.inf)
        if max_value is None:
            max_value = math.inf
        else:
            check_number("max_value", max_value, above=-math.inf)
        if min_value > max_value:
            raise ValueError(f"min_value must be at most max_value, got {min_value} and {max_value}")

        if isinstance(obj, ReplayBuffer):
            obj = obj.sampler
        self.obj = obj
        self.param_name = check_type("param_name", param_name, str, "the name of an attribute")
        if not hasattr(self.obj, param_name):
            raise AttributeError(f"obj must have an attribute {param_name!r}, got {type(self.obj).__name__}")

        self.min_value = min_value
        self.max_value = max_value
        self.initial_value = float(check_number(param_name, getattr(self.obj, param_name)))
        self.steps = 0

    @abstractmethod
    def value(self, current: float) -> float:
        """Return the value for step number ``steps``, given the ``current`` one."""

    def step(self) -> None:
        """Set the next value."""
        self.steps += 1
        current = getattr(self.obj, self.param_name)
        value: Any = min(max(self.value(float(current)), self.min_value), self.max_value)
        if isinstance(current, Tensor):
            value = current.new_tensor(value)
        setattr(self.obj, self.param_name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far and the initial value; the attribute itself is part of its object's state."""
        return {"steps": self.steps, "initial_value": self.initial_value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""
        self.steps, self.initial_value = state["steps"], state["initial_value"]


class LambdaScheduler(ParameterScheduler):
    """Sets an attribute to its initial value times a function of the number of steps.

    Args:
        obj, param_name, min_value, max_value: see `ParameterScheduler`.
        lambda_fn: factor, given the number of steps.

    >>> from flatroll.buffers import PrioritizedSampler
    >>> sampler = PrioritizedSampler(10, alpha=0.8, beta=0.5)
    >>> LambdaScheduler(sampler, "alpha", lambda steps: 0.5**steps).step()
    >>> sampler.alpha
    0.4
    """

    def __init__(
        self,
        obj: Any,
        param_name: str,
        lambda_fn: Callable[[int], float],
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        self.lambda_fn = check_function("lambda_fn", lambda_fn, "a function of the number of steps")

    @override
    def value(self, current: float) -> float:
        return self.initial_value * self.lambda_fn(self.steps)


class LinearScheduler(ParameterScheduler):
    """Moves an attribute in equal steps from its initial value to ``final_value``, where it stays.

    Args:
        obj, param_name: see `ParameterScheduler`.
        final_value: reached after ``num_steps`` steps.
        num_steps: at least 1.

    >>> from flatroll.buffers import LazyTensorStorage, PrioritizedSampler
    >>> sampler = PrioritizedSampler(10, alpha=0.7, beta=0.5)
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
    >>> scheduler, betas = LinearScheduler(buffer, "beta", final_value=1.0, num_steps=2), []
    >>> for _ in range(3):
    ...     scheduler.step()
    ...     betas.append(sampler.beta)
    >>> betas
    [0.75, 1.0, 1.0]
    """

    def __init__(self, obj: Any, param_name: str, final_value: float, num_steps: int) -> None:
        super().__init__(obj, param_name)
        self.final_value = float(check_number("final_value", final_value, above=-math.inf, below=math.inf))
        self.num_steps = check_whole_number("num_steps", num_steps)

    @override
    def value(self, current: float) -> float:
        if self.steps >= self.num_steps:
            return self.final_value
        return self.initial_value + (self.final_value - self.initial_value) * self.steps / self.num_steps


class StepScheduler(ParameterScheduler):
    """Multiplies an attribute by ``gamma``, or adds ``gamma`` to it, at every ``n_steps``-th step.

    Args:
        obj, param_name, min_value, max_value: see `ParameterScheduler`.
        gamma: factor or summand, default 0.9.
        n_steps: default 1.
        mode: ``"multiplicative"`` (default) or ``"additive"``.

    >>> from flatroll.buffers import PrioritizedSampler
    >>> sampler = PrioritizedSampler(10, alpha=0.8, beta=0.5)
    >>> scheduler = StepScheduler(sampler, "beta", gamma=0.25, n_steps=2, mode="additive", max_value=1.0)
    >>> for _ in range(4):
    ...     scheduler.step()
    >>> sampler.beta
    1.0
    """

    def __init__(
        self,
        obj: Any,
        param_name: str,
        gamma: float = 0.9,
        n_steps: int = 1,
        mode: Literal["multiplicative", "additive"] = "multiplicative",
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        self.gamma = float(check_number("gamma", gamma, above=-math.inf, below=math.inf))
        self.n_steps = check_whole_number("n_steps", n_steps)
        self.mode = check_choice("mode", mode, ("multiplicative", "additive"))

    @override
    def value(self, current: float) -> float:
        if self.steps % self.n_steps:
            return current
        if self.mode == "additive":
            return current + self.gamma
        return current * self.gamma


class SchedulerList:
    """Steps several schedulers together.

    Args:
        schedulers: one or several.

    >>> from flatroll.buffers import PrioritizedSampler
    >>> sampler = PrioritizedSampler(10, alpha=0.8, beta=0.5)
    >>> both = SchedulerList([StepScheduler(sampler, name, gamma=0.5) for name in ("alpha", "beta")])
    >>> both.step()
    >>> sampler.alpha, sampler.beta
    (0.4, 0.25)
    """

    def __init__(self, schedulers: ParameterScheduler | Iterable[ParameterScheduler]) -> None:
        if isinstance(schedulers, ParameterScheduler):
            schedulers = [schedulers]
        self.schedulers = list(
            check_type("schedulers", schedulers, (Sequence, Iterator), "a list of schedulers")
        )
        for scheduler in self.schedulers:
            check_type("each of schedulers", scheduler, ParameterScheduler, "a ParameterScheduler")

    def append(self, scheduler: ParameterScheduler) -> None:
        """Add a scheduler."""
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Step each of them once."""
        for scheduler in self.schedulers:
            scheduler.step()
