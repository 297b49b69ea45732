"""Conversions between specs and Gymnasium spaces; specs of the data in a tensordict."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensor_collection

from flatroll.layout.checks import check_device, check_flags, check_type
from flatroll.layout.keys import is_entry
from flatroll.specs.arithmetic import is_whole
from flatroll.specs.bounded import Bounded, Unbounded
from flatroll.specs.composite import Composite
from flatroll.specs.discrete import Binary, Categorical, Encoded, MultiCategorical
from flatroll.specs.non_tensor import NonTensor
from flatroll.specs.shapes import Shape, as_shape
from flatroll.specs.tensor_spec import Device, TensorSpec, as_dtype


def as_spec(space: "spaces.Space[Any]", batch_size: Shape = (), device: Device = None) -> TensorSpec:
    """Return the spec of a Gymnasium space.

    | space         | spec |
    |---|---|
    | Box           | `Bounded` (a bound may be infinite), or `Unbounded` if all are |
    | Discrete      | `Categorical`, with its ``start``: values are the env's own |
    | MultiDiscrete | `MultiCategorical`, with its ``start`` |
    | MultiBinary   | `Binary` |
    | Dict          | `Composite` of its entries; an integer key becomes its text, as in a batch |
    | Tuple         | `Composite` with the keys ``"0"``, ``"1"`` ... |
    | any other     | `NonTensor` that keeps the space: Text, Sequence, Graph, OneOf, your own |

    Args:
        space: the space of one sample, such as ``env.single_observation_space``.
        batch_size: dims put in front; nothing is copied for them.
        device: of the tensors.

    >>> as_spec(spaces.Discrete(3, start=5), 4)
    Categorical(shape=(4,), n=3, start=5, dtype=torch.int64)
    >>> as_spec(spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]))["0"]
    Categorical(shape=(), n=2, dtype=torch.int64)
    """
    batch = as_shape(batch_size, name="batch_size")
    if device is not None:
        device = check_device("device", device)
    spec = _from_space(space, device)

    if batch:
        return spec.expand(*batch, *spec.shape)
    return spec


def _from_space(space: Any, device: Device) -> TensorSpec:
    if isinstance(space, spaces.Dict):
        names = {key: str(key) for key in space.spaces if isinstance(key, str | int | np.integer)}
        if len(set(names.values())) < len(space.spaces):
            raise TypeError(
                f"the keys of a Dict space must be different strings or integers, got {list(space.spaces)}"
            )
        children = {names[key]: _from_space(child, device) for key, child in space.spaces.items()}
        return Composite(children, device=device)

    if isinstance(space, spaces.Tuple):
        children = {str(i): _from_space(child, device) for i, child in enumerate(space.spaces)}
        spec = Composite(children, device=device)
        spec.of_tuple = True
        return spec

    if isinstance(space, spaces.Box):
        return _spec_of_box(space, device)

    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), (), device, as_dtype(space.dtype), start=int(space.start))

    if isinstance(space, spaces.MultiDiscrete):
        counts = torch.as_tensor(space.nvec.astype(np.int64))
        start = torch.as_tensor(space.start.astype(np.int64))
        if not bool(start.any()):
            start = torch.tensor(0)
        return MultiCategorical(counts, space.shape, device, as_dtype(space.dtype), start=start)

    if isinstance(space, spaces.MultiBinary):
        binary = Binary(None, space.shape, device, as_dtype(space.dtype))
        binary.by_shape = not isinstance(space.n, int | np.integer)
        return binary

    if not isinstance(space, spaces.Space):
        raise TypeError(f"space must be a gymnasium space, got {type(space).__name__}")
    return NonTensor((), device, space=space, batched=True)


def _spec_of_box(space: spaces.Box, device: Device) -> TensorSpec:
    """Return the spec of a Box: `Unbounded` where no number has a bound."""
    dtype = as_dtype(space.dtype)
    below = space.bounded_below
    above = space.bounded_above
    if not below.any() and not above.any():
        return Unbounded(space.shape, device, dtype)

    low = _as_bound(space.low, dtype, device)
    high = _as_bound(space.high, dtype, device)
    box = Bounded(low, high, space.shape, device, dtype)
    if is_whole(dtype) and not (below.all() and above.all()):
        return box.open_where(torch.from_numpy(~below), torch.from_numpy(~above))
    return box


def as_space(spec: TensorSpec) -> "spaces.Space[Any]":
    """Return the Gymnasium space of a spec, so that ``as_space(as_spec(space)) == space``.

    Batch dims become part of the space, as in `gymnasium.vector.utils.batch_space`: a Categorical ``[4]`` is a
    MultiDiscrete of four. OneHot and MultiOneHot become MultiBinary spaces, which do not know that one flag is set.

    Raises:
        TypeError: no space holds such values: a NonTensor without a space, a stack of different specs.
        ValueError: a mask, or a dim of any length, which no space has.

    >>> as_space(as_spec(spaces.MultiDiscrete([3, 3], start=[0, 2])))
    MultiDiscrete([3 3], start=[0 2])
    """
    check_type("spec", spec, TensorSpec, "a spec", hint="as_spec makes one of a Gymnasium space")
    if -1 in spec.shape:
        raise ValueError(f"no Gymnasium space has dims of any length, got shape {tuple(spec.shape)}")
    if getattr(spec, "mask", None) is not None:
        raise ValueError("Gymnasium spaces have no mask: call spec.update_mask(None) first")

    if type(spec) is Composite:
        children = {key: as_space(child) for key, child in spec.present().items()}
        if spec.of_tuple:
            return spaces.Tuple(list(children.values()))
        return spaces.Dict(children)

    if spec.dtype is torch.bfloat16:
        raise TypeError(
            "NumPy has no bfloat16, so Gymnasium spaces have none: call spec.to(torch.float32) first"
        )
    dtype: Any = None
    if spec.dtype is not None:
        dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
    shape = tuple(spec.shape)

    if isinstance(spec, Bounded | Unbounded):
        low: Any = spec.space.low.cpu().numpy()
        high: Any = spec.space.high.cpu().numpy()
        below, above = spec.open_ends
        if below:
            low = -np.inf
        if above:
            high = np.inf
        return spaces.Box(low, high, shape, dtype)

    if isinstance(spec, Categorical):
        if shape:
            return spaces.MultiDiscrete(np.full(shape, spec.n), dtype, start=np.full(shape, spec.start))
        # int64 is the default; before Gymnasium 1.2.2 there is no dtype argument.
        options = {} if dtype in (None, np.int64) else {"dtype": dtype}
        return spaces.Discrete(spec.n, start=spec.start, **options)

    if isinstance(spec, MultiCategorical):
        return spaces.MultiDiscrete(spec.nvec.cpu().numpy(), dtype, start=spec.start.cpu().numpy())

    if isinstance(spec, NonTensor) and isinstance(spec.space, spaces.Space) and not shape:
        return spec.space

    if isinstance(spec, Binary | Encoded):
        if spec.ndim != 1 or getattr(spec, "by_shape", False):
            return spaces.MultiBinary(shape)
        return spaces.MultiBinary(shape[0])

    raise TypeError(f"no Gymnasium space holds the values of {spec!r}")


def _as_bound(bound: np.ndarray[Any, Any], dtype: torch.dtype, device: Device) -> Any:
    """Return a bound as a tensor; a scalar if all entries are equal, to be expanded."""
    same = bound.size > 0 and bool((bound == bound.flat[0]).all())
    kept = bound.flat[0] if same else bound
    return torch.as_tensor(np.array(kept), dtype=dtype, device=device)


def make_composite_from_td(
    data: TensorDictBase, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False
) -> Composite:
    """Return the Composite of a tensordict's shapes, dtypes and devices, with any values.

    Args:
        data: the tensordict.
        unsqueeze_null_shapes: tensors without dims count as ``[1]``.
        dynamic_shape: the last dim of each tensor, if it is not a batch dim, takes any length.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> make_composite_from_td(TensorDict({"a": torch.zeros(4, 3)}, [4]))["a"]
    UnboundedContinuous(shape=(4, 3), dtype=torch.float32)
    """
    check_type("data", data, TensorDictBase, "a tensordict")
    check_flags(unsqueeze_null_shapes=unsqueeze_null_shapes, dynamic_shape=dynamic_shape)

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
            shape = tuple(value.shape)
            if not shape and unsqueeze_null_shapes:
                shape = (1,)
            if dynamic_shape and value.ndim > data.ndim:
                shape = (*shape[:-1], -1)
            specs[key] = Unbounded(shape, value.device, value.dtype)

    return Composite(specs, shape=data.shape)
