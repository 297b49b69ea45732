"""Several transforms as one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

from tensordict import TensorDictBase
from torch import Tensor, nn

from flatroll.buffers.columns.column import Columns
from flatroll.buffers.transforms.transform import (
    RowChooser,
    Transform,
    TransformLike,
    apply,
    apply_inverses,
    check_transform,
    lookahead,
    read_others,
    row_chooser,
)
from flatroll.layout.checks import check_type


class Compose(Transform):
    """Several transforms as one: ``forward`` applies them in order, ``inv`` in reverse order.

    Members are transforms, functions of the batch and other objects with ``forward``. Inputs from the buffer (ends of
    slices, rows ahead) are passed on to members.

    Args:
        *transforms: the members in order; or one list of them.
        transforms: the list, by name.

    Raises:
        TypeError: a member is not a transform, or ``transforms`` is given twice.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import RenameTransform
    >>> both = Compose(RenameTransform(["x"], ["y"]), lambda td: td.set("y", td["y"] + 1))
    >>> both(TensorDict({"x": torch.zeros(2)}, [2]))["y"], len(both)
    (tensor([1., 1.]), 2)
    """

    def __init__(
        self,
        *members: TransformLike | list[TransformLike],
        transforms: Iterable[TransformLike] | None = None,
    ) -> None:
        super().__init__()
        if members and transforms is not None:
            raise TypeError("pass the transforms one by one or as transforms=[...], not both")

        if transforms is not None:
            self._hold(transforms)
        elif len(members) == 1 and isinstance(members[0], list):
            self._hold(members[0])
        else:
            self._hold(members)

    def _hold(self, transforms: Iterable[Any]) -> None:
        """Make ``transforms`` the members."""
        members = list(check_type("transforms", transforms, Iterable, "a list of transforms"))
        for member in members:
            check_transform(member, "each of transforms")
        self._transforms: list[TransformLike] = members
        # Registered, so that .to() and state_dict() reach members that are modules.
        self._registered = nn.ModuleList(member for member in members if isinstance(member, nn.Module))

    @property
    def transforms(self) -> tuple[TransformLike, ...]:
        """The members in order."""
        return tuple(self._transforms)

    @property
    def wants_ends(self) -> bool:
        """Whether a member wants to know at which rows of a sample the next one does not follow."""
        return any(getattr(transform, "wants_ends", False) for transform in self._transforms)

    @property
    def look_ahead(self) -> int:
        """Number of consecutive rows the buffer looks up for each sampled row, 0 if no member reads ahead."""
        return max(map(lookahead, self._transforms), default=0)

    def read(self, columns: Columns, ahead: Tensor, get: Callable[..., Any]) -> Columns:
        """Return a sample's columns as changed by the members that look ahead; see `MultiStepTransform.read`."""
        return read_others(self._transforms, columns, ahead, None, get)

    @property
    def chooser(self) -> RowChooser | None:
        """The member that chooses rows of trajectories (a `HindsightTransform`), or None."""
        return row_chooser(self._transforms)

    def forward(self, td: TensorDictBase, ends: Tensor | None = None) -> TensorDictBase:
        """Apply the members in order; ``ends`` (bool ``[N]``) of a buffer is passed to those that want it.

        Raises:
            TypeError: a member returned None.
            ValueError: a member wants ``ends``, and one before it changed the number of rows.
        """
        get_ends = None if ends is None else lambda: ends
        for transform in self._transforms:
            td = apply(transform, td, get_ends)
        return td

    def inv(self, td: TensorDictBase, /) -> TensorDictBase:
        """Apply the ``inv`` of the members that have one, the last member first."""
        result: TensorDictBase = apply_inverses(self._transforms, td)
        return result

    def append(self, transform: TransformLike) -> None:
        """Add a member after the last one."""
        self._hold([*self._transforms, transform])

    def insert(self, index: int, transform: TransformLike) -> None:
        """Add a member before the one at ``index``.

        Raises:
            ValueError: fewer than ``index`` members.
        """
        if not -len(self) <= index <= len(self):
            raise ValueError(f"index must be within the {len(self)} members, got {index}")

        self._hold([*self._transforms[:index], transform, *self._transforms[index:]])

    def pop(self, index: int = -1) -> TransformLike:
        """Remove and return the member at ``index``, by default the last one."""
        members: list[TransformLike] = list(self._transforms)
        member: TransformLike = members.pop(index)
        self._hold(members)
        return member

    def __len__(self) -> int:
        return len(self._transforms)

    def __iter__(self) -> Iterator[TransformLike]:
        return iter(self.transforms)

    @overload
    def __getitem__(self, index: int) -> TransformLike: ...

    @overload
    def __getitem__(self, index: slice) -> "Compose": ...

    def __getitem__(self, index: int | slice) -> "TransformLike | Compose":
        """Member ``index``; or several members, the same objects, as a `Compose`."""
        members: Sequence[TransformLike] = self._transforms
        if isinstance(index, slice):
            return Compose(*members[index])
        return members[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._transforms))})"
