"""Updaters of target networks: Polyak averaging (soft) and periodic copies (hard)."""

from typing import Any

import torch
from typing_extensions import override

from flatroll.estimators.losses.base import LossModule, parameters_and_buffers


class TargetNetUpdater:
    """Base of the updaters: moves each network's target copy in a loss that has some."""

    def __init__(self, loss_module: LossModule) -> None:
        if not isinstance(loss_module, LossModule):
            raise TypeError(f"loss_module must be a loss of flatroll, got {type(loss_module).__name__}")
        self.loss_module = loss_module
        if not loss_module.delayed_networks():
            raise ValueError(
                f"this {type(loss_module).__name__} has no delayed network: build it with delay_value=True (DQNLoss, "
                "ReinforceLoss, SACLoss with a value_network), delay_qvalue=True or delay_actor=True (SACLoss, "
                "DiscreteSACLoss); other losses need no updater"
            )

    @torch.no_grad()
    def init_(self) -> None:
        """Copy the networks into their target copies; they are equal when the loss is built."""
        self._move(1.0)

    def step(self) -> None:
        """Update the target copies; call it once after each optimizer step."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    @torch.no_grad()
    def _move(self, share: float) -> None:
        """Move the parameters of the copies by ``share`` of the way; buffers are copied."""
        for source, target in self.loss_module.delayed_networks().values():
            (learned, read), (followers, copies) = map(parameters_and_buffers, (source, target))
            if followers:  # target += share * (network - target), all parameters in one call
                torch._foreach_lerp_(followers, learned, share)  # pyright: ignore[reportPrivateImportUsage]
            for buffer, copy in zip(read, copies, strict=True):
                copy.copy_(buffer)

    def state_dict(self) -> dict[str, Any]:
        """Return the updater's state; the target copies themselves are in the loss's state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the updater from a :meth:`state_dict`."""


class SoftUpdate(TargetNetUpdater):
    """Polyak averaging: ``target = eps * target + (1 - eps) * network`` at each :meth:`step`.

    Buffers (running statistics) are copied.

    Args:
        loss_module: a loss with target copies.
        eps: share of the old target, in [0, 1].
        tau: share of the network, ``1 - eps``. One of the two must be given.

    Raises:
        ValueError: no target copy; both or none of ``eps`` and ``tau``; one outside [0, 1].

    Example:
        >>> from flatroll.estimators import DQNLoss
        >>> network = torch.nn.Linear(2, 3)
        >>> loss = DQNLoss(network)
        >>> copy = loss.target_value_network.module
        >>> _ = torch.nn.init.ones_(network.bias), torch.nn.init.zeros_(copy.bias)
        >>> SoftUpdate(loss, tau=0.25).step()
        >>> copy.bias.data
        tensor([0.2500, 0.2500, 0.2500])

    References:
        T. P. Lillicrap et al., Continuous control with deep reinforcement learning,
        https://arxiv.org/abs/1509.02971
    """

    def __init__(
        self, loss_module: LossModule, *, eps: float | None = None, tau: float | None = None
    ) -> None:
        super().__init__(loss_module)
        if (eps is None) == (tau is None):
            raise ValueError(f"give one of eps (share of the old) and tau (1 - eps), got {eps} and {tau}")
        name, number = ("eps", eps) if tau is None else ("tau", tau)
        if number is None or not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {number}")
        self.eps = number if tau is None else 1.0 - number

    @override
    def step(self) -> None:
        self._move(1.0 - self.eps)


class HardUpdate(TargetNetUpdater):
    """Copy the networks into their target copies at every ``value_network_update_interval``-th :meth:`step`.

    Args:
        loss_module: a loss with target copies.
        value_network_update_interval: steps from one copy to the next. Default: 1000.

    Raises:
        ValueError: no target copy, or an interval below 1.

    Example:
        >>> from flatroll.estimators import DQNLoss
        >>> network = torch.nn.Linear(2, 3)
        >>> loss = DQNLoss(network)
        >>> updater, copy = HardUpdate(loss, value_network_update_interval=2), loss.target_value_network.module
        >>> _ = torch.nn.init.ones_(network.bias), torch.nn.init.zeros_(copy.bias)
        >>> for _ in range(2):
        ...     updater.step()
        ...     print(torch.equal(copy.bias, network.bias))
        False
        True

    References:
        V. Mnih et al., Human-level control through deep reinforcement learning, 2015.
    """

    def __init__(self, loss_module: LossModule, *, value_network_update_interval: int = 1000) -> None:
        super().__init__(loss_module)
        if value_network_update_interval < 1:
            raise ValueError(
                f"value_network_update_interval must be at least 1, got {value_network_update_interval}"
            )
        self.value_network_update_interval = value_network_update_interval
        self.counter = 0

    @override
    def step(self) -> None:
        self.counter += 1
        if self.counter == self.value_network_update_interval:
            self.counter = 0
            self._move(1.0)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"counter": self.counter}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counter = int(state_dict["counter"])
