"""The base class of transforms, the interface that any other object or function may have, and how they are applied."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from flatroll.buffers.columns.column import Columns
from flatroll.buffers.index.ring import Array
from flatroll.layout.checks import check_key_names
from flatroll.layout.keys import NestedKey, missing_marker, plain_key, without_next


@runtime_checkable
class SampleTransform(Protocol):
    """Changes the samples of a buffer: anything with ``forward(td) -> td``.

    An optional ``inv(td) -> td`` is applied to what is stored. With an attribute ``wants_ends = True``, samples come
    as ``forward(td, ends)``: ``ends``, bool ``[N]``, is True at rows that the next row of the sample does not follow
    in its trajectory. With ``look_ahead = n``, the buffer calls ``read(columns, ahead, get)`` on the columns of a
    sample before the sampler marks them: ``ahead``, int64 ``[N, n]``, holds the positions of each row and of those
    after it in its trajectory, -1 where there is none, and ``get(positions, keys)`` reads columns of other rows (as
    many for each of the N rows, side by side). With ``chooser``, a `RowChooser`, the buffer lets that one choose a row
    of the trajectory for each row or slice, and read it.
    """

    def forward(self, td: TensorDictBase, /) -> TensorDictBase:
        """Return the transformed sample."""
        ...


TransformLike: TypeAlias = SampleTransform | Callable[[TensorDictBase], TensorDictBase]

#: ``get(positions, keys)``: the named columns of the rows at ``positions`` (int64 ``[M]``).
Get: TypeAlias = Callable[[Tensor, Sequence[NestedKey]], Columns]


class RowChooser(Protocol):
    """The transform of a buffer that reads a chosen row of the same trajectory for some rows: `HindsightTransform`."""

    def choose(self, at: Array, count: Array, generator: torch.Generator | None) -> tuple[Array, Array]:
        """Choose rows when a sample is drawn, see `TrajectoryIndex.choose`."""
        ...

    def relabel(self, columns: Columns, chosen: Tensor, read: Get, get: Get) -> tuple[Columns, Get]:
        """Return the columns as the chosen rows change them, and ``get`` for the transforms that look ahead.

        Args:
            columns: of the N sampled rows, which may be changed in place.
            chosen: int64 ``[2, M]``, which of the rows, and the positions of the chosen ones.
            read: reads chosen rows by position.
            get: reads other rows by position.
        """
        ...


def keys_argument(name: str, keys: NestedKey | Sequence[NestedKey] | None) -> list[NestedKey]:
    """Return an argument that names entries as a list; one string is one key, None is not a key.

    Raises:
        ValueError: a tuple of several strings, which may mean one nested key or several keys.

    >>> keys_argument("in_keys", "pixels"), keys_argument("in_keys", ["pixels", ("next", "pixels")])
    (['pixels'], ['pixels', ('next', 'pixels')])
    """
    if keys is None:
        return []
    if isinstance(keys, str):
        return [keys]
    if isinstance(keys, tuple) and len(keys) > 1 and all(isinstance(key, str) for key in keys):
        raise ValueError(
            f"{name}={keys!r} may mean one nested key or {len(keys)} keys: write [{keys!r}] for the nested key, "
            f"{list(keys)!r} for the {len(keys)} keys"
        )
    return [plain_key(key) for key in check_key_names(name, keys)]


class Transform(nn.Module):
    """Base class of transforms of samples and batches: reads the entries ``in_keys``, writes ``out_keys``.

    A transform is called with a tensordict, changes it in place and returns it. In a buffer, samples go through
    ``forward`` and batches to store through ``inv``; ``Collector(postproc=transform)`` calls it on each batch.

    Write one in either of two ways: define ``_apply_transform(value)``, which maps one entry's tensor ``[*B, ...]``
    and is called once for each of the ``in_keys``; or define ``forward(td)``, which has the whole batch. The same for
    the way into the buffer: ``_inv_apply_transform(value)`` or ``inv(td)``.

    Being an `torch.nn.Module`, a transform may hold parameters and buffers, and moves with ``.to(device)``.

    Args:
        in_keys: entries to read; one string is one key, a nested key goes inside a list.
        out_keys: where to write what came of each, default ``in_keys``.
        in_keys_inv: entries to write on the way into a buffer, default none.
        out_keys_inv: entries to read for them, default ``in_keys_inv``. So, as in TorchRL, ``out_keys_inv`` are
            the names in the batch given to ``extend``, and ``in_keys_inv`` the names in the buffer.

    Raises:
        ValueError: keys given as a tuple of several strings, which may mean one nested key or several keys.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> class Double(Transform):
    ...     def _apply_transform(self, value):
    ...         return 2 * value
    >>> td = TensorDict({"x": torch.ones(3), "next": {"x": torch.ones(3)}}, [3])
    >>> Double(["x", ("next", "x")], ["y", ("next", "x")])(td)["next", "x"], td["x"], td["y"]
    (tensor([2., 2., 2.]), tensor([1., 1., 1.]), tensor([2., 2., 2.]))
    """

    def __init__(
        self,
        in_keys: NestedKey | Sequence[NestedKey] | None = None,
        out_keys: NestedKey | Sequence[NestedKey] | None = None,
        in_keys_inv: NestedKey | Sequence[NestedKey] | None = None,
        out_keys_inv: NestedKey | Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__()
        self.in_keys = keys_argument("in_keys", in_keys)
        if out_keys is None:
            self.out_keys = list(self.in_keys)
        else:
            self.out_keys = keys_argument("out_keys", out_keys)

        self.in_keys_inv = keys_argument("in_keys_inv", in_keys_inv)
        if out_keys_inv is None:
            self.out_keys_inv = list(self.in_keys_inv)
        else:
            self.out_keys_inv = keys_argument("out_keys_inv", out_keys_inv)

    @property
    def look_ahead(self) -> int:
        """Number of consecutive rows the buffer looks up for each sampled row, 0 for none; see `MultiStepTransform`."""
        return 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(in_keys={self.in_keys}, out_keys={self.out_keys})"

    def forward(self, td: TensorDictBase, /) -> TensorDictBase:
        """Write ``_apply_transform`` of the ``in_keys`` to the ``out_keys`` of ``td``, and return ``td``.

        Raises:
            KeyError: an entry is missing; nothing has been written then.
            ValueError: as many ``in_keys`` as ``out_keys`` are needed.
            TypeError: ``td`` is not a tensordict.
        """
        values = [self._apply_transform(self._entry(td, key)) for key in self.in_keys]
        self._write(td, self.out_keys, values)
        return td

    def inv(self, td: TensorDictBase, /) -> TensorDictBase:
        """Return a shallow copy of ``td`` with ``_inv_apply_transform`` of the ``out_keys_inv`` in the ``in_keys_inv``.

        Without ``in_keys_inv``, ``td`` itself. Errors as for :meth:`forward`.
        """
        if not self.in_keys_inv:
            return td

        values = [self._inv_apply_transform(self._entry(td, key)) for key in self.out_keys_inv]
        result = td.clone(recurse=False)
        self._write(result, self.in_keys_inv, values)
        return result

    def _apply_transform(self, value: Any) -> Any:
        """Return what to write for one of the ``in_keys``, given its value ``[*B, ...]``."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(td) or _apply_transform(value)")

    def _inv_apply_transform(self, value: Any) -> Any:
        """Return what to store for one of the ``in_keys_inv``, given its value ``[*B, ...]``; by default the same."""
        return value

    def _entry(self, td: TensorDictBase, key: NestedKey) -> Any:
        """The entry ``key`` of ``td``: a tensor, a nested tensordict or what is not a tensor; KeyError if missing."""
        value = check_batch(self, td).get(key, None)
        if value is None:
            raise KeyError(f"{type(self).__name__}: {missing_marker(key, td.keys(True, True)).args[0]}")
        return value

    def _write(self, td: TensorDictBase, keys: Sequence[NestedKey], values: Sequence[Any]) -> None:
        """Set the entries ``keys`` of ``td``, after everything was read."""
        if len(keys) != len(values):
            raise ValueError(f"{type(self).__name__} has {len(values)} entries for the keys {list(keys)}")
        for key, value in zip(keys, values, strict=True):
            td.set(key, value)


def check_batch(transform: object, td: object) -> TensorDictBase:
    """Return ``td`` if it is a tensordict; else raise a TypeError that names the transform."""
    if not isinstance(td, TensorDictBase):
        raise TypeError(f"{transform_name(transform)} needs tensordicts, got {type(td).__name__}")
    return td


def transform_name(transform: object) -> str:
    """The name of a function, or of an object's class."""
    return str(getattr(transform, "__name__", type(transform).__name__))


def apply(transform: TransformLike, td: TensorDictBase, ends: Callable[[], Tensor] | None) -> TensorDictBase:
    """Apply ``transform`` to a sample; pass ``ends()``, bool ``[N]``, only if it has ``wants_ends``.

    Raises:
        TypeError: the transform returned None.
        ValueError: it wants the ends of the drawn rows, and a transform before it changed the number of rows.
    """
    forward: Any = getattr(transform, "forward", None)
    if forward is None:
        changed = cast(Callable[[TensorDictBase], TensorDictBase], transform)(td)
    elif ends is None or not getattr(transform, "wants_ends", False):
        changed = forward(td)
    else:
        marks = ends()
        if isinstance(td, TensorDictBase) and td.batch_size[: marks.ndim] != marks.shape:
            raise ValueError(
                f"{transform_name(transform)} must know which rows are consecutive, and a transform before it changed "
                f"the sample's rows from {list(marks.shape)} to {list(td.batch_size)}: put that one after it"
            )
        changed = forward(td, marks)

    if changed is not None:
        return changed
    return _check_returned(transform, changed)


def apply_inverses(
    transforms: Sequence[TransformLike], data: object, final: TensorDictBase | None = None
) -> Any:
    """Put a batch to store, or each item of a list, through the ``inv`` of the transforms that have one, the last
    transform first.

    Raises:
        TypeError: a transform returned None.
        ValueError: a transform changed the number of rows, by which ``final`` counts, or an observation in it.
    """
    if isinstance(data, list):
        return [apply_inverses(transforms, item) for item in data]

    result = data
    for transform in reversed(transforms):
        inverse = getattr(transform, "inv", None)
        if inverse is not None:
            result = _check_returned(transform, inverse(result))

    if final is None or result is data:
        return result
    if not isinstance(result, TensorDictBase) or not isinstance(data, TensorDictBase):
        return result

    if result.batch_size != data.batch_size:
        raise ValueError(
            f"final refers to the rows of the batch, {list(data.batch_size)}, and the transforms' inv changed "
            "them to "
            f"{list(result.batch_size)}: leave final out, or change the rows before both are made"
        )
    for key in final.keys(True, True):
        root = without_next(key)  # inv is not applied to final's next observations
        if root != key and result.get(root, None) is not data.get(root, None):
            raise ValueError(
                f"the transforms' inv changes {root!r} and leaves final[{key!r}] as it is: store full batches "
                "without final, or change both before extend"
            )
    return result


def _check_returned(transform: object, result: object) -> Any:
    """Return ``result``; TypeError if it is None."""
    if result is None:
        raise TypeError(f"{transform_name(transform)} returned None: a transform must return the batch")
    return result


def lookahead(transform: TransformLike) -> int:
    """Return how many rows, each row itself included, the transform reads per row: ``look_ahead``, or 0."""
    return int(getattr(transform, "look_ahead", 0))


def row_chooser(transforms: Iterable[object]) -> RowChooser | None:
    """Return the transform that chooses rows of trajectories, which may be in a `Compose`; None without one.

    Raises:
        ValueError: there are two.
    """
    choosers = []
    for transform in transforms:
        chooser: RowChooser | None = getattr(transform, "chooser", None)
        if chooser is not None:
            choosers.append(chooser)

    if len(choosers) > 1:
        raise ValueError(f"there are two {transform_name(choosers[0])}, but a sample can use only one")
    if choosers:
        return choosers[0]
    return None


def needs_trajectory(transform: TransformLike) -> bool:
    """Return whether the transform reads other rows of the trajectories of sampled rows."""
    return lookahead(transform) > 0 or row_chooser([transform]) is not None


def changes_stored(transform: TransformLike) -> bool:
    """Return whether ``transform`` has an ``inv`` that may change what is stored."""
    if not isinstance(transform, Transform):
        return hasattr(transform, "inv")
    return bool(transform.in_keys_inv) or type(transform).inv is not Transform.inv


def read_others(
    transforms: Sequence[TransformLike],
    columns: Columns,
    ahead: Tensor | None,
    chosen: Tensor | None,
    get: Get,
    read: Get | None = None,
) -> Columns:
    """Return the columns of a sample as the transforms change them that read other rows: first the one that chooses
    rows, then those that look ahead, in order.

    Args:
        transforms: of the buffer.
        columns: of the sampled rows.
        ahead: int64 ``[N, n]``, positions of each row and those after it, -1 for none; None if no transform looks
            ahead.
        chosen: int64 ``[2, M]``, see `Draw.chosen`; None if no transform chooses.
        get: reads rows by position.
        read: reads chosen rows, default ``get``.
    """
    if chosen is not None:
        chooser = row_chooser(transforms)
        if chooser is not None:
            columns, get = chooser.relabel(columns, chosen, read or get, get)

    if ahead is not None:
        for transform in transforms:
            steps = lookahead(transform)
            if steps:
                reader: Any = transform
                columns = reader.read(columns, ahead[:, :steps], get)

    return columns


def check_row_count(transforms: Iterable[object], data: object, rows: int) -> None:
    """Raise ValueError if ``data`` is a tensordict that no longer has the ``rows`` rows that transforms were given."""
    if isinstance(data, TensorDictBase) and data.batch_size[:1] != (rows,):
        names = ", ".join(map(transform_name, transforms))
        raise ValueError(
            f"transforms ({names}) turned {rows} rows into {list(data.batch_size)}, which cannot be put back "
            "into the shape of the index: index with a slice, or sample"
        )


class Inverted(Transform):
    """Swaps the directions of ``transform``: its ``forward`` is applied to batches to store, its ``inv`` to samples.

    Raises:
        ValueError: a transform that needs to know the sample's trajectories.
    """

    def __init__(self, transform: TransformLike) -> None:
        super().__init__()
        if lookahead(transform) or getattr(transform, "wants_ends", False):
            raise ValueError(
                f"{transform_name(transform)} follows trajectories of samples and cannot be applied to what is stored: "
                "leave invert=True out, or apply it to the batch before extend"
            )
        self.transform = transform

    def forward(self, td: TensorDictBase, /) -> TensorDictBase:
        """Return ``transform.inv(td)``."""
        result: TensorDictBase = apply_inverses([self.transform], td)
        return result

    def inv(self, td: TensorDictBase, /) -> TensorDictBase:
        """Return ``transform.forward`` of a shallow copy of ``td``."""
        if isinstance(td, TensorDictBase):
            td = td.clone(recurse=False)
        return apply(self.transform, td, None)


def insert_transform(
    transforms: list[TransformLike], index: int, transform: TransformLike, invert: bool
) -> None:
    """Insert a transform before the one at ``index``, the other way round if ``invert``; see `ReplayBuffer`."""
    check_transform(transform)
    row_chooser([*transforms, transform])
    if not -len(transforms) <= index <= len(transforms):
        raise ValueError(f"index must be within the {len(transforms)} transforms, got {index}")
    if invert:
        transform = Inverted(transform)
    transforms.insert(index, transform)


def check_transform(transform: object, name: str = "transform") -> None:
    """Raise TypeError unless ``transform``, passed as the argument ``name``, is a function or has ``forward``."""
    if isinstance(transform, type) or not (callable(transform) or hasattr(transform, "forward")):
        got = type(transform).__name__
        if isinstance(transform, type):
            got = f"the class {transform.__name__}"
        raise TypeError(f"{name} must have forward(td) or be a function of td, got {got}")
