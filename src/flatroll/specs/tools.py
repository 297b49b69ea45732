"""Functions on Composites: made from data, and keys that only some of stacked specs have."""

from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensor_collection

from flatroll.layout.keys import is_entry
from flatroll.specs.bounded import Unbounded
from flatroll.specs.composite import Composite
from flatroll.specs.leaf import TensorSpec
from flatroll.specs.non_tensor import NonTensor
from flatroll.specs.stacked import Stacked, StackedComposite, stack


def make_composite_from_td(
    data: TensorDictBase, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False
) -> Composite:
    """Return the Composite of a tensordict's shapes, dtypes and devices, with any values.

    Args:
        data: the tensordict.
        unsqueeze_null_shapes: tensors without dims count as ``[1]``.
        dynamic_shape: the last dim of each tensor, if it is no batch dim, takes any length.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> make_composite_from_td(TensorDict({"a": torch.zeros(4, 3)}, [4]))["a"]
    UnboundedContinuous(shape=(4, 3), dtype=torch.float32)
    """
    specs: dict[str, TensorSpec] = {}
    value: Any
    for key, value in data.items(is_leaf=is_entry):
        if isinstance(value, NonTensorData | NonTensorStack):
            first = value.reshape(-1)[0].data if value.numel() else None
            dims = value.ndim - data.ndim
            specs[key] = NonTensor(value.shape, value.device, example_data=first, feature_dims=dims)
        elif is_tensor_collection(value):
            specs[key] = make_composite_from_td(
                value, unsqueeze_null_shapes=unsqueeze_null_shapes, dynamic_shape=dynamic_shape
            )
        else:
            shape = tuple(value.shape) or ((1,) if unsqueeze_null_shapes else ())
            shape = (*shape[:-1], -1) if dynamic_shape and value.ndim > data.ndim else shape
            specs[key] = Unbounded(shape, value.device, value.dtype)
    return Composite(specs, shape=data.shape)


def contains_lazy_spec(spec: TensorSpec) -> bool:
    """Whether a spec is, or holds, a stack of different specs."""
    if isinstance(spec, Stacked | StackedComposite):
        return True
    return isinstance(spec, Composite) and any(map(contains_lazy_spec, spec._present().values()))


def check_no_exclusive_keys(spec: TensorSpec, recurse: bool = True) -> bool:
    """Whether all Composites of each stack have the same keys; ``recurse`` looks into nested ones."""
    if isinstance(spec, StackedComposite) and any(len(part) > len(spec) for part in spec.specs):
        return False
    if isinstance(spec, Composite) and recurse:
        return all(map(check_no_exclusive_keys, spec._present().values()))
    return True


def consolidate_spec(
    spec: TensorSpec, recurse_through_entries: bool = True, recurse_through_stack: bool = True
) -> TensorSpec:
    """Return a spec whose stacks have the same keys throughout: a key that is missing gets a spec of size 0.

    Args:
        spec: any spec; it stays as it is.
        recurse_through_entries: nested Composites, too.
        recurse_through_stack: the Composites of a stack, too.

    Raises:
        ValueError: specs of one key are of different classes.

    >>> import torch
    >>> one, two = Composite(a=Unbounded((3,))), Composite(a=Unbounded((3,)), b=Unbounded((2,)))
    >>> consolidate_spec(torch.stack([one, two]))["b"].shape
    torch.Size([2, -1])
    """
    settings: Any = (recurse_through_entries, recurse_through_stack)
    if isinstance(spec, StackedComposite):
        parts: list[Any] = [
            consolidate_spec(part, *settings) if recurse_through_stack else part.clone()
            for part in spec.specs
        ]
        examples: dict[str, list[TensorSpec]] = {}
        for part in parts:
            for key, entry in part._present().items():
                examples.setdefault(key, []).append(entry)
        for part in parts:
            for key, entries in examples.items():
                if key not in part._specs:
                    part[key] = _empty_like(entries, part.shape)
        spec = stack(parts, spec.dim)
    else:
        spec = spec.clone()
    if isinstance(spec, Composite) and recurse_through_entries:
        for key, entry in spec._present().items():
            if isinstance(entry, Composite):
                spec[key] = consolidate_spec(entry, *settings)
    return spec


def _empty_like(specs: list[TensorSpec], batch: Any) -> TensorSpec:
    """A spec of size 0 for data that are not there, with as many dims."""
    first = specs[0]
    if any(type(spec) is not type(first) for spec in specs):
        raise ValueError(f"specs of one key must be of one class, got {first!r} and others")
    if isinstance(first, Composite):
        return first.empty()
    outer = first.ndim - first._own_dims
    # Size 0 where the others differ, or else behind the batch's dims.
    sizes = [
        0 if size == -1 or any(spec.shape[d] != size for spec in specs) else size
        for d, size in enumerate(first.shape[:outer])
    ]
    if 0 not in sizes:
        sizes = [size if d < len(batch) else 0 for d, size in enumerate(sizes)]
    if isinstance(first, Stacked):
        rest = [size for d, size in enumerate(sizes) if d != first.dim]
        return Stacked(*(_of_sizes(spec, rest) for spec in first.specs), dim=first.dim)
    return _of_sizes(first, sizes)


def _of_sizes(spec: TensorSpec, sizes: list[int]) -> TensorSpec:
    """A spec of the first of a spec's values, repeated."""
    one = spec[(0,) * len(sizes)]
    return one.expand(*sizes, *one.shape)  # type: ignore[no-any-return]
