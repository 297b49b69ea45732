"""`Composite`: a dict of specs, like a tensordict of tensors."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias, TypeGuard

import torch
from tensordict import TensorDict, is_tensor_collection
from typing_extensions import override

from flatroll.layout.keys import NestedKey, as_tuple, plain_key
from flatroll.specs.non_tensor import NonTensor
from flatroll.specs.shapes import Operation, Shape, grid
from flatroll.specs.tensor_spec import Device, OutsideSpecError, TensorSpec

#: What an entry can be set to: a spec, a dict of them, or None.
SpecLike: TypeAlias = "TensorSpec | Mapping[Any, Any] | None"
_MISSING: Any = object()
_ABSENT: Any = object()


class Composite(TensorSpec):
    """A dict of specs that share leading batch dims; tuple keys are nested.

    A mutable mapping until `lock_`. An entry of None is kept, and skipped by everything that reads values.

    Args:
        *args: at most one dict (dicts in it become Composites) or Composite.
        shape: batch dims, with which the shape of each entry begins. Default ``()``.
        batch_size: another name of shape.
        device: of all entries. Default None: theirs.
        data_cls: a tensorclass for the values, instead of `TensorDict`.
        step_mdp_static: kept for scripts that read it.
        names: of the batch dims of the values.
        **specs: further entries.

    >>> from flatroll.specs import Unbounded
    >>> spec = Composite(observation=Unbounded((4, 3)), next={"reward": Unbounded((4, 1))}, shape=(4,))
    >>> spec.rand()["next", "reward"].shape, spec[0]["observation"].shape
    (torch.Size([4, 1]), torch.Size([3]))
    >>> spec.problem(spec.zero().exclude("observation"))
    "'observation': the key is missing"
    """

    _default_device = None

    def __init__(
        self,
        *args: "Mapping[Any, SpecLike] | Composite",
        shape: Shape = None,
        batch_size: Shape = None,
        device: Device = None,
        data_cls: type[Any] | None = None,
        step_mdp_static: bool = False,
        names: Sequence[str | None] | None = None,
        **specs: "SpecLike",
    ) -> None:
        if shape is not None and batch_size is not None:
            raise TypeError("shape and batch_size are two names of one argument: pass one of them")
        if shape is None:
            shape = () if batch_size is None else batch_size
        super().__init__(shape, None, device, None, "")

        self.data_cls = data_cls
        self.step_mdp_static = step_mdp_static
        self.names = names
        self._specs: dict[str, TensorSpec | None] = {}
        self._locked = False
        self.of_tuple = False  # whether it describes a Gymnasium Tuple; its entries are then in order

        if len(args) > 1 or not all(isinstance(arg, Mapping | Composite) for arg in args):
            raise TypeError(f"Composite takes one dict of specs, or specs by name, got {args!r}")
        for entries in (*args, specs):
            for key, spec in entries.items():
                self[key] = spec

    # --- the mapping --------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> torch.Size:
        """The batch dims."""
        return self.shape

    @property
    def names(self) -> list[str | None]:
        """The names of the batch dims, None for a dim without one."""
        if self._names is None:
            return [None] * self.ndim
        return self._names

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        self._names: list[str | None] | None = None if names is None else list(names)
        if len(self.names) != self.ndim:
            raise ValueError(f"names must be one for each of {self.ndim} batch dims, got {names!r}")

    def __setitem__(self, key: NestedKey, spec: SpecLike) -> None:
        if not is_key(key):
            raise TypeError(f"keys are strings or tuples of strings, got {key!r}")

        first, *rest = as_tuple(key)
        inner = self._specs.get(first)
        if rest and isinstance(inner, Composite):
            inner[tuple(rest)] = spec
            return

        self._check_unlocked()
        if rest:
            spec = {tuple(rest): spec}
        self._specs[first] = self._as_entry(first, spec)

    def _check_unlocked(self) -> None:
        if self._locked:
            raise RuntimeError(f"this {type(self).__name__} is locked: call unlock_() to change it")

    def _as_entry(self, key: str, spec: SpecLike) -> "TensorSpec | None":
        """Return the spec as an entry: with leading batch dims, on the device."""
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self.shape, device=self.device)
        if spec is None:
            return None
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{key!r} must be a spec, a dict of specs or None, got {type(spec).__name__}")

        if self.device is not None and spec.device != self.device:
            if spec.device is not None:
                raise RuntimeError(
                    f"{key!r} is on {spec.device}, and this Composite on {self.device}: move it by spec.to(device)"
                )
            spec = spec.to(self.device)

        checked: TensorSpec = spec
        if spec.shape[: self.ndim] == self.shape and spec.batch_ndim >= self.ndim:
            return checked

        if spec.shape == self.shape[: spec.ndim]:
            if type(spec) is Composite:  # the dims apply to all its entries
                wider = Composite(
                    dict(spec.items()), shape=self.shape, device=spec.device, data_cls=spec.data_cls
                )
                wider.step_mdp_static = spec.step_mdp_static
                wider.of_tuple = spec.of_tuple
                if spec.locked:
                    return wider.lock_(recurse=False)
                return wider
            if isinstance(spec, NonTensor):
                checked = spec[(..., *(None,) * (self.ndim - spec.ndim))].expand(self.shape)
                return checked

        own = ""
        if spec.value_dims:
            own = f", of which the last {spec.value_dims} belong to one value"
        raise ValueError(
            f"the shape of {key!r} must begin with that of the Composite, {tuple(self.shape)}, got {tuple(spec.shape)}"
            f"{own}: write spec.expand(...)"
        )

    def __getitem__(self, index: Any) -> Any:
        """Return an entry for a key, else the spec of the indexed batch."""
        if not is_key(index):
            return super().__getitem__(index)

        first, *rest = as_tuple(index)
        entry = self._specs[first]
        if not rest:
            return entry
        if not isinstance(entry, Composite):
            raise KeyError(index)
        return entry[tuple(rest)]

    def __delitem__(self, key: NestedKey) -> None:
        first, *rest = as_tuple(key)
        if rest:
            del self[first][tuple(rest)]
            return
        self._check_unlocked()
        del self._specs[first]

    def get(self, key: NestedKey, default: Any = _MISSING) -> Any:
        """Return an entry, or the default; KeyError if there is neither."""
        try:
            return self[key]
        except KeyError:
            if default is _MISSING:
                raise
            return default

    def set(self, name: NestedKey, spec: SpecLike) -> Self:
        """Set an entry."""
        self[name] = spec
        return self

    def pop(self, key: NestedKey, default: Any = _MISSING) -> Any:
        """Remove an entry and return it, or the default."""
        spec = self.get(key, default)
        if key in self:
            del self[key]
        return spec

    def update(self, other: "Mapping[NestedKey, Any] | Composite") -> Self:
        """Set the entries of a dict or a Composite; those that are Composites in both are merged."""
        for key, spec in other.items():
            mine = self.get(key, None)
            if isinstance(mine, Composite) and isinstance(spec, Mapping | Composite):
                mine.update(spec)
                spec = mine
            self[key] = spec  # also a merged one, because a stack returns a copy
        return self

    def __contains__(self, key: object) -> bool:
        return is_key(key) and self.get(key, _ABSENT) is not _ABSENT

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._specs)

    def __bool__(self) -> bool:
        return True

    def is_empty(self, recurse: bool = False) -> bool:
        """Return whether there are no entries; with ``recurse``, ignore empty nested Composites."""
        if not recurse:
            return not self._specs
        return all(isinstance(spec, Composite) and spec.is_empty(True) for spec in self.present().values())

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
    ) -> list[tuple[NestedKey, Any]]:
        """Return keys and specs, selected as in `keys`."""
        found: list[tuple[NestedKey, Any]] = []
        for name in self:
            spec = self[name]
            if is_leaf is None:
                leaf = not isinstance(spec, Composite)
            else:
                leaf = is_leaf(type(spec))

            if include_nested and isinstance(spec, Composite):
                inner = spec.items(True, leaves_only, is_leaf=is_leaf)
                found += [((name, *as_tuple(key)), child) for key, child in inner]
            if leaf or not leaves_only:
                found.append((name, spec))
        return found

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
    ) -> list[NestedKey]:
        """Return the keys in tensordict's order: nested keys before their Composite's.

        Args:
            include_nested: those of nested Composites, too, as tuples.
            leaves_only: not those of Composites.
            is_leaf: which classes count as leaves. Default: all but Composite.
        """
        return [key for key, _ in self.items(include_nested, leaves_only, is_leaf=is_leaf)]

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
    ) -> list[Any]:
        """Return the specs, selected as in `keys`."""
        return [spec for _, spec in self.items(include_nested, leaves_only, is_leaf=is_leaf)]

    def empty(self) -> Self:
        """A Composite of this shape without entries."""
        return self._copy_with(_specs={}, _locked=False)

    @property
    def locked(self) -> bool:
        """Whether entries cannot be changed."""
        return self._locked

    @property
    def is_locked(self) -> bool:
        """Whether entries cannot be changed."""
        return self._locked

    def lock_(self, recurse: bool | None = True) -> Self:
        """Lock the spec and nested entries against changes."""
        if recurse is not False:
            for spec in self._composites():
                spec.lock_(recurse)
        self._locked = True
        return self

    def unlock_(self, recurse: bool | None = True) -> Self:
        """Allow changes again."""
        if recurse is not False:
            for spec in self._composites():
                spec.unlock_(recurse)
        self._locked = False
        return self

    def _composites(self) -> "list[Composite]":
        """The nested Composites."""
        return [spec for spec in self._specs.values() if isinstance(spec, Composite)]

    # --- shape, device ------------------------------------------------------------------------------------------

    def present(self) -> dict[str, TensorSpec]:
        """The entries that are not None."""
        return {name: spec for name, spec in self._specs.items() if spec is not None}

    def _map_entries(self, change: Callable[[TensorSpec], TensorSpec], **attributes: Any) -> Self:
        specs = {name: None if spec is None else change(spec) for name, spec in self._specs.items()}
        return self._copy_with(_specs=specs, _locked=False, **attributes)

    @override
    def map_dims(self, operation: Operation, dims: int) -> Self:
        shape, frame = self._map_shape(operation, dims)
        names = self._names
        if names is not None:  # let a tensordict permute the names
            sizes = [1 if size == -1 else size for size in self.shape]
            named: Any = names
            names = operation(TensorDict({}, sizes, names=named)).names

        return self._map_entries(
            lambda spec: spec.map_dims(operation, dims), shape=shape, _frame=frame, _names=names
        )

    @override
    def to(self, dest: torch.dtype | Device) -> Self:
        if dest is None:
            return self

        moved: dict[str, Any] = {}
        if not isinstance(dest, torch.dtype):
            moved["device"] = torch.device(dest)
        return self._map_entries(lambda spec: spec.to(dest), **moved)

    def clear_device_(self) -> Self:
        """Clear the Composite's device; entries keep theirs."""
        object.__setattr__(self, "device", None)
        for spec in self._composites():
            spec.clear_device_()
        return self

    @override
    def clone(self) -> Self:
        return self._map_entries(lambda spec: spec.clone())

    # --- values -------------------------------------------------------------------------------------------------

    def _values(self, shape: Shape, make: Callable[[TensorSpec], Any]) -> Any:
        return self._fill(shape, {name: make(spec) for name, spec in self.present().items()})

    def _fill(self, shape: Shape, values: dict[str, Any]) -> Any:
        size = self._full_shape(shape)
        if self.data_cls is not None:
            return self.data_cls.from_dict(values, batch_size=size, device=self.device)

        names = None
        if self._names is not None:
            names = [*(None,) * (len(size) - self.ndim), *self._names]
        return TensorDict(values, size, device=self.device, names=names)

    @override
    def rand(self, shape: Shape = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw a tensordict ``[*shape, *self.shape]``."""
        return self._values(shape, lambda spec: spec.rand(shape, generator=generator))

    @override
    def zero(self, shape: Shape = ()) -> Any:
        """A tensordict ``[*shape, *self.shape]`` of the values closest to zero."""
        return self._values(shape, lambda spec: spec.zero(shape))

    @override
    def one(self, shape: Shape = ()) -> Any:
        """A tensordict ``[*shape, *self.shape]`` of the values closest to one."""
        return self._values(shape, lambda spec: spec.one(shape))

    @override
    def is_in(self, value: Any) -> bool:
        """Return whether each entry is present and in the domain; other entries are ignored. Never raises."""
        if not _is_mapping(value):
            return False

        entries = value if isinstance(value, dict) else dict(value.items())
        return all(
            spec is None or (name in entries and spec.is_in(entries[name]))
            for name, spec in self._specs.items()
        )

    @override
    def problem(self, value: Any) -> str | None:
        """Describe which entry of a value is wrong, or return None."""
        if not _is_mapping(value):
            return f"a tensordict or a dict was expected, got {type(value).__name__}"
        for name, spec in self.present().items():
            entry = value.get(name, None)
            if entry is None:
                return f"{name!r}: the key is missing"

            text = spec.problem(entry)
            if text is not None:
                if isinstance(spec, Composite) and text.startswith(("'", "(")):
                    return _prefix(name, text)
                return f"{name!r}: {text}"
        return None

    @override
    def project(self, value: Any) -> Any:
        """Project each entry of a tensordict into the domain, in place, and return it.

        Raises:
            KeyError: an entry is missing.
        """
        for name, spec in self.present().items():
            entry = value.get(name, None)
            if entry is None:
                raise KeyError(
                    f"{name!r} is missing in the value to project, whose keys are {sorted(value.keys())}"
                )
            if not spec.is_in(entry):
                value[name] = spec.project(entry)
        return value

    @override
    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Make a tensordict from a dict of arrays, numbers or dicts.

        Raises:
            KeyError: an entry is missing, or none of the spec's.
            OutsideSpecError, ValueError: see `TensorSpec.encode`; the message names the key.
        """
        present = self.present()
        given = set(value.keys())
        wrong = sorted(given - self._specs.keys() | present.keys() - given)
        if wrong:
            raise KeyError(f"the keys must be {sorted(present)}, got {sorted(given)}: {wrong} differ")

        encoded = {}
        for name, spec in present.items():
            try:
                encoded[name] = spec.encode(value[name], ignore_device=ignore_device)
            except OutsideSpecError as error:
                raise OutsideSpecError(f"{name!r}: {error}") from error
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from error
        return self._fill((), encoded)

    @override
    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        """Raise a TypeError if an entry of a tensordict, or the value of one entry, has another dtype."""
        if key is not None:
            self[key].type_check(value, key)
            return

        for name, spec in self.present().items():
            own_key = None if isinstance(spec, Composite) else name
            spec.type_check(value.get(name), own_key)

    @override
    def to_numpy(self, value: Any, safe: bool | None = None) -> dict[str, Any]:
        """A dict of arrays; ``safe=True`` checks the value first."""
        if safe:
            self.assert_is_in(value)
        return {name: spec.to_numpy(value.get(name)) for name, spec in self.present().items()}

    @override
    def cardinality(self) -> int | float:
        counts = [spec.cardinality() for spec in self.present().values()]
        if counts:
            return math.prod(counts)
        return 0

    @override
    def enumerate(self, use_mask: bool = False) -> Any:
        listed = {name: spec.enumerate(use_mask) for name, spec in self.present().items()}
        rows = grid([torch.arange(values.shape[0]) for values in listed.values()])
        chosen = {name: values[rows[:, k]] for k, (name, values) in enumerate(listed.items())}
        return TensorDict(chosen, (len(rows), *self._full_shape(())), device=self.device)

    # --- the rest -----------------------------------------------------------------------------------------------

    @override
    def _settings(self) -> tuple[Any, ...]:
        return self.data_cls, self._specs

    @override
    def __repr__(self) -> str:
        lines = [f"{name}: {spec!r}".replace("\n", "\n    ") for name, spec in self._specs.items()]
        head = "" if self.device is None else f", device={self.device}"
        inside = "".join(f"    {line},\n" for line in lines)
        return f"{type(self).__name__}(\n{inside}    shape={tuple(self.shape)}{head})"


def is_key(index: object) -> "TypeGuard[NestedKey]":
    """Whether an index is a key: a string or a tuple of strings."""
    return isinstance(index, str) or (
        isinstance(index, tuple) and bool(index) and all(isinstance(name, str) for name in index)
    )


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping) or (is_tensor_collection(value) and hasattr(value, "items"))


def _prefix(name: str, text: str) -> str:
    """Prepend a name to the key at the start of a problem's text."""
    key, _, rest = text.partition(": ")
    inner = key.strip("()").replace("'", "").split(", ")
    return f"{plain_key((name, *inner))!r}: {rest}"
