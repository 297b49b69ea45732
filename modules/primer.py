"""The initial recurrent state of a policy's episodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.keys import NestedKey


@dataclass(frozen=True)
class TensorDictPrimer:
    """Holds the initial recurrent states of episodes, by state key.

    Attributes:
        defaults: for each state key the value of one row, such as ``[num_layers, hidden_size]``.

    >>> primer = TensorDictPrimer({"recurrent_state": torch.zeros(1, 8)})
    >>> primer.expand(3)["recurrent_state"].shape
    torch.Size([3, 1, 8])
    """

    defaults: dict[NestedKey, Tensor]

    def expand(self, batch_size: int | Sequence[int], device: torch.device | str | None = None) -> TensorDict:
        """Return copies of the initial states for a whole batch.

        Args:
            batch_size: number of rows, or a batch shape ``[*B]``.
            device: where to put them; default: where they are.
        """
        shape = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        primed = TensorDict({}, batch_size=shape, device=device)
        for key, value in self.defaults.items():
            primed.set(key, value.to(device).expand(*shape, *value.shape).clone())
        return primed
