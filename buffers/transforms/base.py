"""The interface of a replay buffer's transforms, and the function that applies one."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

from tensordict import TensorDictBase
from torch import Tensor


@runtime_checkable
class Transform(Protocol):
    """Changes the samples of a buffer: anything with ``forward(td) -> td``.

    An optional ``inv(td) -> td`` is applied to what is stored. With an attribute ``wants_ends = True``, samples come
    as ``forward(td, ends)``: ``ends``, bool ``[N]``, is True at rows that the next row of the sample does not follow
    in its trajectory. With ``look_ahead = n``, the buffer calls ``read(columns, ahead, get)`` on the columns of a
    sample before the sampler marks them: ``ahead``, int64 ``[N, n]``, holds the positions of each row and of those
    after it in its trajectory, -1 where there is none, and ``get(positions, keys)`` reads columns of other rows.
    """

    def forward(self, td: TensorDictBase, /) -> TensorDictBase:
        """Return the transformed sample."""
        ...


TransformLike: TypeAlias = Transform | Callable[[TensorDictBase], TensorDictBase]


def apply(transform: TransformLike, td: TensorDictBase, ends: Callable[[], Tensor]) -> TensorDictBase:
    """Apply ``transform`` to a sample; pass ``ends()``, bool ``[N]``, only if it has ``wants_ends``."""
    if not isinstance(transform, Transform):
        return transform(td)
    if getattr(transform, "wants_ends", False):
        wanting: Any = transform
        changed: TensorDictBase = wanting.forward(td, ends())
        return changed
    return transform.forward(td)


def looks_ahead(transform: TransformLike) -> int:
    """Return how many rows, each row itself included, the transform reads per row: ``look_ahead``, or 0."""
    return int(getattr(transform, "look_ahead", 0))
