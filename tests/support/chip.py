"""A strict emulated accelerator: ``device="chip"``, written in Python on torch's PrivateUse1 key.

`install` registers the device, once for a process. Its tensors are plain ``torch.Tensor`` objects whose storage has no
address; the bytes lie in a CPU storage that hangs on the storage object (``_host``), so views, in-place operations,
autograd and shallow copies share memory as on a real device. Operators that torch composes of others run torch's own
C++ code on chip tensors, with the device checks of CUDA; the rest is computed on the CPU bytes and wrapped again.

A copy to the CPU with ``non_blocking=True`` holds garbage until something waits for the device, or until `LATENCY`
more operators were called: who reads it too early gets wrong numbers, as on a GPU, but always.

What a device would wait for is recorded with the line of flatroll that causes it::

    with chip.watch() as seen:  # counts
        ...
    print(seen.table())
    with chip.watch("error"):  # raises, like torch.cuda.set_sync_debug_mode("error")
        ...

Kinds: "read" (item, bool, tolist), "size" (nonzero, masks, unique), "download" (a blocking copy to the CPU), "upload"
(a blocking copy from the CPU, for which CUDA synchronises the stream), "async" (other copies, never an error).

It cannot show streams, events, graphs, compiled code, Triton, cuDNN, rounding, kernels that CUDA lacks, or several
devices.
"""

import collections
import contextlib
import importlib.abc
import importlib.machinery
import sys
import threading
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch.utils import backend_registration

NAME = "chip"
WATCHED = "/flatroll/"
#: Frames of these belong to nobody: the caller is looked for outside of them.
_LIBRARIES = ("/torch/", "/tensordict/", "/torchrl/", "/numpy/", "/gymnasium/", __file__)
_STDLIB = (
    "contextlib.py",
    "functools.py",
    "threading.py",
    "copy.py",
    "<string>",
    "<frozen",
    "_collections_abc.py",
    "dataclasses.py",
)

_KEY = torch._C.DispatchKey
_META = torch._C.DispatchKeySet(_KEY.Meta)
_CPU = torch._C.DispatchKeySet(_KEY.CPU)
_aten = torch.ops.aten

# --- what is waited for ---------------------------------------------------------------------------------------


class Event(tuple):
    """(kind, operator, place): one wait."""

    kind = property(lambda self: self[0])
    op = property(lambda self: self[1])
    place = property(lambda self: self[2])


class Watch:
    """Waits and launches seen in a ``with watch()``."""

    def __init__(self, mode: str) -> None:
        self.mode, self.events, self.launches = mode, [], 0

    def waits(self, uploads: bool = True) -> list[Event]:
        return [e for e in self.events if e.kind != "async" and (uploads or e.kind != "upload")]

    def counts(self) -> collections.Counter:
        return collections.Counter(self.events)

    def table(self) -> str:
        return "\n".join(
            f"{count:5d}  {e.kind:9s} {e.op:28s} {e.place}"
            for e, count in sorted(self.counts().items(), key=lambda item: (-item[1], item[0]))
        )


_watches: list[Watch] = []
_main = threading.main_thread().ident
_quiet = threading.local()


def _frames(frame: Any) -> list[str]:
    """The callers, innermost first: ``file:line function``, until two lines of the watched package are found."""
    found, outside = [], []
    while frame is not None:
        name = frame.f_code.co_filename
        if (
            not any(part in name for part in _LIBRARIES)
            and not name.endswith(_STDLIB)
            and not name.startswith("<")
        ):
            if WATCHED in name:
                short = name.split(WATCHED)[-1]
                found.append(f"{short}:{frame.f_lineno} {frame.f_code.co_name}")
                if len(found) == 3:
                    break
            elif not found:
                outside.append(f"({name.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name})")
                if len(outside) > 1:
                    break
        frame = frame.f_back
    return outside[:1] + found


def _waits(kind: str, op: str) -> None:
    if not _watches or getattr(_quiet, "on", False):
        return
    places = _frames(sys._getframe(2))
    if (
        not places and threading.get_ident() != _main
    ):  # the autograd thread: its caller waits in the main thread
        places = ["backward", *_frames(sys._current_frames().get(_main))]
    event = Event((kind, op, " < ".join(places) or "?"))
    for watch in _watches:
        watch.events.append(event)
    refusing = {"upload": ("strict",), "async": ()}.get(kind, ("error", "strict"))
    if any(watch.mode in refusing for watch in _watches):
        raise RuntimeError(f"called a synchronizing chip operation: {op} ({kind}) at {event.place}")


@contextlib.contextmanager
def watch(mode: str = "count"):
    """Record waits. "error" raises at a wait, "strict" at blocking copies from the CPU, too, as CUDA's mode does."""
    seen = Watch(mode)
    _watches.append(seen)
    try:
        yield seen
    finally:
        _watches.remove(seen)


# --- memory ---------------------------------------------------------------------------------------------------


def host(x: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes as a chip tensor."""
    memory = getattr(x.untyped_storage(), "_host", None)
    if memory is None:
        raise RuntimeError("chip: a tensor without memory; it was not made by one of the emulator's kernels")
    low = torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.size(), x.stride())
    if x.is_conj():
        low = low.conj()
    return torch._neg_view(low) if x.is_neg() else low


def wrap(x: torch.Tensor) -> torch.Tensor:
    """A chip tensor over the bytes of a CPU tensor, which nobody else may keep."""
    x = x.resolve_conj().resolve_neg()
    memory = x.untyped_storage()
    made = torch._C._acc.create_empty_tensor(x.size(), x.dtype)
    made.untyped_storage()._host = memory
    if not x.is_contiguous() or x.storage_offset():
        made = _aten.as_strided.default.redispatch(_META, made, x.size(), x.stride(), x.storage_offset())
    return made


def is_chip(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == NAME


# --- generators -----------------------------------------------------------------------------------------------

_Generator = torch._C.Generator


class ChipGenerator(_Generator):
    """A generator of the chip: the CPU's numbers, refused by operators on other devices."""

    device = property(lambda self: torch.device(NAME, 0))

    known: ClassVar[set[int]] = set()  # the C++ generators: torch wraps them in new Python objects

    def __new__(cls):
        made = super().__new__(cls, "cpu")
        cls.known.add(made._cdata)
        return made

    def __del__(self):
        self.known.discard(self._cdata)

    def __reduce__(self):
        return _generator_of, (self.get_state(),)


def _generator_of(state):
    generator = ChipGenerator()
    generator.set_state(state)
    return generator


class _Kind(type):
    def __instancecheck__(cls, x):
        return isinstance(x, _Generator)

    def __call__(cls, device="cpu"):
        return ChipGenerator() if torch.device(device).type == NAME else _Generator(device)


class Generator(metaclass=_Kind):
    pass


# --- operators ------------------------------------------------------------------------------------------------

#: A CPU tensor without dims may be mixed with chip tensors in these (in CUDA, those of TensorIterator).
_SCALAR_NAMES = """
    add sub rsub mul div true_divide floor_divide remainder fmod pow float_power maximum minimum fmax fmin atan2
    hypot copysign eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ where clamp clamp_min clamp_max clip
    masked_fill addcmul addcdiv lerp xlogy nextafter index_put _index_put_impl fill copy heaviside logaddexp
    logaddexp2 isin lcm gcd index_fill threshold_backward mse_loss huber_loss smooth_l1_loss sigmoid_backward
    tanh_backward polygamma zeta ldexp _foreach_mul _foreach_add _foreach_div _foreach_sub
"""
_SCALARS = frozenset(_SCALAR_NAMES.split())
#: Their size depends on values, or their result is read by the CPU.
_SIZE_NAMES = """
    nonzero masked_select unique_dim _unique _unique2 unique_consecutive unique_dim_consecutive bincount
    repeat_interleave histc _histogramdd_from_bin_cts
"""
_SIZES = frozenset(_SIZE_NAMES.split())
_READS = {"_local_scalar_dense", "equal", "is_nonzero"}
#: torch has the same C++ code for the CPU and CUDA here: it runs on chip tensors, with its own waits.
_SHARED = {"multinomial"}
#: Integer products do not exist on CUDA.
_FLOATING = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"}


class _Plan:
    """What a schema says about an operator."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.op, self.name = op, schema.name.split("::")[1]
        self.base = self.name.rstrip("_") if not self.name.startswith("__") else self.name
        self.full = self.name + ("." + schema.overload_name if schema.overload_name else "")
        self.names = [a.name for a in schema.arguments]
        self.written = [
            (i, a.name)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        infos = [r.alias_info for r in schema.returns]
        self.view = any(info is not None and not info.is_write for info in infos)
        self.returns = []
        for info in infos:
            source = None
            if info is not None and info.is_write:
                for i, a in enumerate(schema.arguments):
                    if a.alias_info is not None and set(a.alias_info.before_set) & set(info.before_set):
                        source = (i, a.name)
            self.returns.append(source)
        #: Where torch gives Python numbers for tensors.
        self.tensors = [i for i, a in enumerate(schema.arguments) if isinstance(a.type, torch._C.TensorType)]
        self.scalars = self.base in _SCALARS or (
            schema.overload_name.endswith("out") and self.base not in _FLOATING
        )
        self.wait = "read" if self.name in _READS else "size" if self.base in _SIZES else None


_plans: dict[Any, _Plan] = {}
_special: dict[str, Any] = {}


def _special_for(*names: str):
    def register(call):
        for name in names:
            _special[name] = call
        return call

    return register


def _mixed(op: str, devices: Any) -> RuntimeError:
    listed = ", ".join(sorted(map(str, devices)))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {listed}! ({op})"
    )


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    plan = _plans.get(op)
    if plan is None:
        plan = _plans[op] = _Plan(op)
    for seen in _watches:
        seen.launches += 1
    if _pending:
        _clock[0] += 1
        if _clock[0] > LATENCY:
            _arrive()
    special = _special.get(plan.full) or _special.get(plan.name)
    if special is not None:
        for i in plan.tensors:
            if i < len(args) and isinstance(args[i], (int, float, complex)):
                args = (*args[:i], _number(args[i], args), *args[i + 1 :])
        return special(plan, *args, **kwargs)
    if plan.view:
        return op.redispatch(_META, *args, **kwargs)
    if plan.full in _SHARED and not (
        plan.name == "multinomial" and (args[2] if len(args) > 2 else kwargs.get("replacement"))
    ):
        return op.redispatch(_CPU, *args, **kwargs)
    return _compute(plan, args, kwargs)


def _compute(plan: _Plan, args: Any, kwargs: Any) -> Any:
    hosts: list[tuple[torch.Tensor, torch.Tensor]] = []
    foreign = []

    def lower(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.device.type == NAME:
                for chip_side, host_side in hosts:
                    if chip_side is x:
                        return host_side
                pair = (x, host(x))
                hosts.append(pair)
                return pair[1]
            foreign.append(x)
            return x
        if isinstance(x, (list, tuple)):
            return type(x)(map(lower, x)) if type(x) in (list, tuple) else [lower(y) for y in x]
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if isinstance(x, _Generator) and x._cdata not in ChipGenerator.known:
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{x.device.type}'")
        return x

    low_args = [lower(x) for x in args]
    for i in plan.tensors:
        if i < len(low_args) and isinstance(low_args[i], (int, float, complex, bool)):
            low_args[i] = _number(low_args[i], low_args)
    low_kwargs = {key: lower(x) for key, x in kwargs.items()}
    if foreign and hosts:
        wrong = [x for x in foreign if x.ndim or not plan.scalars]
        wrong += [  # what is written must lie on the chip as well
            x
            for i, name in plan.written
            for x in [args[i] if i < len(args) else kwargs.get(name)]
            if x is not None and not isinstance(x, (list, tuple)) and not is_chip(x)
        ]
        if wrong:
            raise _mixed(plan.full, {hosts[0][0].device, wrong[0].device})
    if plan.base in _FLOATING and hosts and not (hosts[0][0].is_floating_point() or hosts[0][0].is_complex()):
        raise RuntimeError(f"\"{plan.base}_cuda\" not implemented for '{hosts[0][0].dtype}'")
    if plan.wait and not (plan.base == "repeat_interleave" and kwargs.get("output_size") is not None):
        _waits(plan.wait, plan.full)
        _arrive()
    result = plan.op(*low_args, **low_kwargs)
    for i, name in plan.written:
        written = args[i] if i < len(args) else kwargs.get(name)
        below = low_args[i] if i < len(low_args) else low_kwargs.get(name)
        for x, low in zip(
            *((y if isinstance(y, (list, tuple)) else [y]) for y in (written, below)), strict=True
        ):
            if is_chip(x) and (x.shape != low.shape or x.stride() != low.stride()):
                _resized(x, low)

    def lift(x: Any, source: Any = None) -> Any:
        if source is not None:
            i, name = source
            return args[i] if i < len(args) else kwargs[name]
        if isinstance(x, torch.Tensor):
            memory = x.untyped_storage()._cdata
            for chip_side, host_side in hosts:
                if host_side.untyped_storage()._cdata == memory:
                    return _aten.as_strided.default.redispatch(
                        _META, chip_side, x.size(), x.stride(), x.storage_offset()
                    )
            return wrap(x)
        if isinstance(x, (list, tuple)):
            return type(x)(map(lift, x))
        return x

    if len(plan.returns) == 1:
        return lift(result, plan.returns[0])
    if isinstance(result, tuple):
        return tuple(lift(x, source) for x, source in zip(result, plan.returns, strict=True))
    return lift(result)


def _number(x: Any, others: Any) -> torch.Tensor:
    """A number among tensors, as torch computes with it."""
    dtype = (
        torch.bool
        if type(x) is bool
        else torch.int64
        if type(x) is int
        else torch.complex128
        if type(x) is complex
        else torch.float64
    )
    tensors = [y for y in others if isinstance(y, torch.Tensor)]
    if type(x) is float and tensors and not any(y.ndim for y in tensors):
        dtype = next((y.dtype for y in tensors if y.is_floating_point()), torch.get_default_dtype())
    return torch.tensor(x, dtype=dtype)


def _resized(x: torch.Tensor, low: torch.Tensor) -> None:
    if not hasattr(x.untyped_storage(), "_host"):
        x.untyped_storage()._host = low.untyped_storage()
    x.data = _aten.as_strided.default.redispatch(_META, x, low.size(), low.stride(), low.storage_offset())


@_special_for("empty.memory_format")
def _empty(plan, size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    if pin_memory:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    if layout not in (None, torch.strided):
        raise NotImplementedError("chip: only dense tensors")
    return wrap(
        torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format, device="cpu")
    )


@_special_for("empty_strided")
def _empty_strided(plan, size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    if pin_memory:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    return wrap(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


@_special_for("resize_")
def _resize(plan, x, size, *, memory_format=None):
    low = host(x).resize_(size, **({"memory_format": memory_format} if memory_format is not None else {}))
    _resized(x, low)
    return x


@_special_for("smooth_l1_loss.out")
def _smooth_l1(plan, x, y, reduction=1, beta=1.0, *, out):
    if not is_chip(x) or not is_chip(y):
        raise _mixed(plan.full, {x.device, y.device})
    host(out).copy_(_aten.smooth_l1_loss.default(host(x), host(y), reduction, beta))
    return out


@_special_for("as_strided_")
def _as_strided_(plan, x, size, stride, storage_offset=None):
    offset = x.storage_offset() if storage_offset is None else storage_offset
    x.data = _aten.as_strided.default.redispatch(_META, x, size, stride, offset)
    return x


@_special_for("convolution_overrideable")
def _convolution(plan, x, weight, bias, *options):
    return wrap(
        _aten.convolution.default(host(x), host(weight), None if bias is None else host(bias), *options)
    )


@_special_for("convolution_backward_overrideable")
def _convolution_backward(
    plan, grad, x, weight, stride, padding, dilation, transposed, output_padding, groups, mask
):
    sizes = [grad.size(1)] if mask[2] else None
    options = stride, padding, dilation, transposed, output_padding, groups, mask
    found = _aten.convolution_backward.default(host(grad), host(x), host(weight), sizes, *options)
    return tuple(None if y is None else wrap(y) for y in found)


@_special_for(
    "set_.source_Storage_storage_offset",
    "set_.source_Storage",
    "set_.source_Tensor",
    "set_",
    "set_.source_Tensor_storage_offset",
)
def _set(plan, x, *args, **kwargs):
    if plan.full == "set_":
        return x.set_(torch.empty(0, dtype=x.dtype, device=NAME))
    return plan.op.redispatch(_META, x, *args, **kwargs)


#: Copies to pinned memory that have not arrived: (CPU tensor with garbage, values). They arrive at the next wait, or
#: when LATENCY more operators have been called.
_pending: list[tuple[torch.Tensor, torch.Tensor]] = []
LATENCY = 200
_clock = [0]


def _late(to: torch.Tensor, values: torch.Tensor) -> None:
    _pending.append((to, values))
    _clock[0] = 0


def _arrive() -> None:
    for to, values in _pending:
        to.copy_(values)
    _pending.clear()


def synchronize(device: Any = None) -> None:
    """Wait for the chip; recorded if a copy was under way."""
    if _pending:
        _waits("download", "synchronize")
    _arrive()


def _garbage(x: torch.Tensor) -> torch.Tensor:
    """What memory holds before a copy arrives."""
    made = torch.empty_like(x)
    if made.dtype == torch.bool:
        return made.copy_(~x)
    return made.fill_(torch.nan if made.is_floating_point() or made.is_complex() else 85)


@_special_for("_to_copy")
def _to_copy(
    plan, x, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None
):
    options = {
        "dtype": dtype or x.dtype,
        "memory_format": memory_format or torch.preserve_format,
        "copy": True,
    }
    if not is_chip(x):
        _waits("async" if non_blocking else "upload", "from cpu")
        if not non_blocking:
            _arrive()
        return wrap(x.detach().to(**options))
    if device is None or torch.device(device).type == NAME:
        return wrap(host(x).to(**options))
    found = host(x).to(**options)
    if torch.device(device).type != "cpu":
        return found.to(device)
    if non_blocking:  # CUDA makes pinned memory here: the values arrive later
        _waits("async", "to cpu, pinned")
        made = _garbage(found)
        made.untyped_storage()._pinned = True
        _late(made, found)
        return made
    if found.numel():  # CUDA returns from a copy of nothing before it would wait
        _waits("download", "to cpu")
        _arrive()
    return found


@_special_for("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")
def _normal(plan, mean, std, *, generator=None):
    if isinstance(std, torch.Tensor):
        _waits("read", "normal (checks std)")
    return _compute(plan, (mean, std), {"generator": generator})


@_special_for("copy_", "_copy_from")
def _copy(plan, first, second, non_blocking=False):
    to, source = (first, second) if plan.name == "copy_" else (second, first)
    if is_chip(to) and is_chip(source):
        host(to).copy_(host(source))
    elif is_chip(source):
        _waits("async" if non_blocking else "download", "copy_ to cpu")
        if non_blocking and getattr(to.untyped_storage(), "_pinned", False):
            _late(to, host(source).clone())
        else:
            _arrive()
            to.copy_(host(source))
    elif source.device.type == "cpu":
        _waits("async" if non_blocking else "upload", "from cpu")
        if not non_blocking:
            _arrive()
        host(to).copy_(source)
    else:
        raise _mixed(plan.full, {to.device, source.device})
    return to


@_special_for("fill_.Tensor")
def _fill(plan, x, value):
    if value.ndim:
        raise RuntimeError("fill_ only supports 0-dimension value tensor")
    host(x).fill_(host(value) if is_chip(value) else value)
    return x


@_special_for("index.Tensor", "index.Tensor_out", "_unsafe_index.Tensor")
def _index(plan, x, indices, *, out=None):
    if not is_chip(x):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor ({x.device})"
        )
    # torch's own code has moved CPU indices and called nonzero() for masks before: both were counted
    low = [None if i is None else host(i) if is_chip(i) else i for i in indices]
    found = _aten.index.Tensor(host(x), low)
    if out is None:
        return wrap(found)
    if out.shape != found.shape:
        out.resize_(found.shape)
    host(out).copy_(found)
    return out


@_special_for("_index_put_impl_", "index_put_")
def _index_put(plan, x, indices, values, accumulate=False, unsafe=False):
    if not is_chip(x):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor ({x.device})"
        )
    if not is_chip(values) and values.ndim:
        raise _mixed(plan.full, {x.device, values.device})
    if threading.get_ident() != _main and values.numel() == 1:
        # the gradient of x[mask] = 1: CUDA has its zero on the CPU
        values.untyped_storage()._number = True
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    one_mask = len(masks) == 1 and all(i is None or i is masks[0] for i in indices)
    fills = one_mask and values.numel() == 1 and not accumulate
    for i in indices:
        if i is not None and not is_chip(i) and not fills:
            _waits("upload", plan.full)
    if fills and is_chip(values) and not getattr(values.untyped_storage(), "_number", False):
        _waits("read", plan.full + " by a mask")  # CUDA reads the value, to call masked_fill_
    elif not fills and any(is_chip(mask) for mask in masks):
        _waits("size", plan.full + " by a mask")
    low = [None if i is None else host(i) if is_chip(i) else i for i in indices]
    _aten._index_put_impl_.default(
        host(x), low, host(values) if is_chip(values) else values, accumulate, unsafe
    )
    return x


@_special_for("scalar_tensor")
def _scalar_tensor(plan, value, *, dtype=None, layout=None, device=None, pin_memory=None):
    made = wrap(torch.scalar_tensor(value, dtype=dtype))
    made.untyped_storage()._number = True  # Python numbers in x[i] = 1: CUDA keeps them on the CPU
    return made


@_special_for("record_stream")
def _record_stream(plan, *args, **kwargs):
    return None


@_special_for("_thnn_fused_gru_cell")
def _gru_cell(plan, inputs, hidden, h, input_bias=None, hidden_bias=None):
    i, g, h0 = host(inputs), host(hidden), host(h)
    if input_bias is not None:
        i, g = i + host(input_bias), g + host(hidden_bias)
    (ir, iz, inew), (hr, hz, hnew) = i.chunk(3, 1), g.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inew + r * hnew).tanh()
    return wrap((h0 - n) * z + n), wrap(torch.cat([r, z, n, h0, hnew], 1))


@_special_for("_thnn_fused_gru_cell_backward")
def _gru_cell_backward(plan, grad, workspace, has_bias):
    r, z, n, h0, hnew = host(workspace).chunk(5, 1)
    g = host(grad)
    dz = g * (h0 - n) * z * (1 - z)
    dn = g * (1 - z) * (1 - n * n)
    dr = dn * hnew * r * (1 - r)
    gi, gh = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    biases = (wrap(gi.sum(0)), wrap(gh.sum(0))) if has_bias else (None, None)
    return wrap(gi), wrap(gh), wrap(g * z), *biases


@_special_for("_thnn_fused_lstm_cell")
def _lstm_cell(plan, inputs, hidden, c, input_bias=None, hidden_bias=None):
    gates = host(inputs) + host(hidden)
    if input_bias is not None:
        gates = gates + host(input_bias) + host(hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * host(c) + i * g
    return wrap(o * new.tanh()), wrap(new), wrap(torch.cat([i, f, g, o], 1))


@_special_for("_thnn_fused_lstm_cell_backward_impl")
def _lstm_cell_backward(plan, grad_h, grad_c, cx, cy, workspace, has_bias):
    i, f, g, o = host(workspace).chunk(4, 1)
    before, after = host(cx), host(cy).tanh()
    gh = 0 if grad_h is None else host(grad_h)
    gc = 0 if grad_c is None else host(grad_c)
    do = gh * after * o * (1 - o)
    gc = gc + gh * o * (1 - after * after)
    gates = torch.cat([gc * g * i * (1 - i), gc * before * f * (1 - f), gc * i * (1 - g * g), do], 1)
    return wrap(gates), wrap(gc * f), wrap(gates.sum(0)) if has_bias else None


# --- registration ---------------------------------------------------------------------------------------------


class _Device(contextlib.ContextDecorator):
    def __init__(self, device=None):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class _Module:
    """``torch.chip``."""

    device = _Device
    is_available = is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    synchronize = staticmethod(lambda device=None: synchronize())
    empty_cache = set_device = _lazy_init = staticmethod(lambda *a, **k: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed = manual_seed_all = staticmethod(
        lambda seed: None
    )  # the chip draws from the CPU's global generator
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    get_rng_state_all = staticmethod(lambda: [torch.get_rng_state()])
    mem_get_info = staticmethod(lambda device=None: (1 << 34, 1 << 34))
    device_of = _Device
    manual_seed_device = None
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16, torch.float32])
    __file__ = __name__ = "torch.chip"


def _patch_storages() -> None:
    kind = torch.UntypedStorage
    real = {
        name: getattr(kind, name)
        for name in ("data_ptr", "clone", "cpu", "copy_", "resize_", "__new__", "nbytes", "size")
    }

    def on_chip(x):
        return x.device.type == NAME

    def data_ptr(self):
        # distinct, ordered as memory is, and not an address: reading it is a segmentation fault
        return self._host.data_ptr() | 1 << 62 if on_chip(self) else real["data_ptr"](self)

    def clone(self):
        if not on_chip(self):
            return real["clone"](self)
        return wrap(torch.empty(0, dtype=torch.uint8).set_(self._host).clone()).untyped_storage()

    def cpu(self):
        if not on_chip(self):
            return real["cpu"](self)
        _waits("download", "storage.cpu")
        return self._host.clone()

    def copy_(self, source, non_blocking=None):
        if not on_chip(self) and not on_chip(source):
            return real["copy_"](self, source, non_blocking or False)
        _waits("upload" if on_chip(self) else "download", "storage.copy_")
        to, given = (x._host if on_chip(x) else x for x in (self, source))
        real["copy_"](to, given)
        return self

    def nbytes(self):
        return self._host.nbytes() if on_chip(self) else real["nbytes"](self)

    def resize_(self, size):
        if not on_chip(self):
            return real["resize_"](self, size)
        self._host.resize_(size)
        return self

    def new(cls, *args, **kwargs):
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == NAME:
            return wrap(torch.empty(args[0] if args else 0, dtype=torch.uint8)).untyped_storage()
        return torch._C.StorageBase.__new__(cls, *args, **kwargs)

    kind.data_ptr, kind.clone, kind.cpu, kind.copy_, kind.resize_ = data_ptr, clone, cpu, copy_, resize_
    kind.nbytes = kind.size = nbytes
    kind.__new__ = staticmethod(new)
    real_pointer = torch.Tensor.data_ptr

    def pointer(self):
        if self.device.type != NAME:
            return real_pointer(self)
        return self.untyped_storage().data_ptr() + self.storage_offset() * self.element_size()

    torch.Tensor.data_ptr = pointer

    def no_dlpack(self, *args, **kwargs):
        if self.device.type == NAME:
            raise BufferError(f"chip: a tensor on {self.device} cannot be given to the CPU by DLPack")
        return real_dlpack(self, *args, **kwargs)

    real_dlpack = torch.Tensor.__dlpack__
    torch.Tensor.__dlpack__ = no_dlpack


def _patch_draws() -> None:
    """A CPU operator refuses a generator of the chip."""

    def strict(call):
        def checked(*args, **kwargs):
            result = call(*args, **kwargs)
            if (
                isinstance(kwargs.get("generator"), ChipGenerator)
                and isinstance(result, torch.Tensor)
                and not is_chip(result)
            ):
                raise RuntimeError(f"Expected a 'cpu' device type for generator but found '{NAME}'")
            return result

        return checked

    for name in ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal"):
        setattr(torch, name, strict(getattr(torch, name)))


def _autocast(op: Any):
    """What autocast does to a product."""

    def cast(*args, **kwargs):
        dtype = torch.get_autocast_dtype(NAME)
        low = [x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in args]
        with torch.autocast(NAME, enabled=False):
            return op(*low, **kwargs)

    return cast


def _patch_pins() -> None:
    real = torch.empty

    def empty(*args, pin_memory=False, **kwargs):
        made = real(*args, **kwargs)
        if pin_memory:
            if made.device.type != "cpu":
                raise RuntimeError("Only dense CPU tensors can be pinned")
            made.untyped_storage()._pinned = True
        return made

    def is_pinned(self, device=None):
        return bool(getattr(self.untyped_storage(), "_pinned", False))

    torch.empty = empty
    torch.Tensor.is_pinned = is_pinned


class _Translated(importlib.machinery.SourceFileLoader):
    """Reads a module with "chip" for "cuda": its branches for CUDA run as well. Nothing is written."""

    def get_data(self, path):
        data = super().get_data(path)
        if path.endswith(".py"):
            for old, new in (
                (b'"cuda"', b'"chip"'),
                (b"is_cuda", b"is_chip"),
                (b"torch.cuda", b"torch.chip"),
                (b"loss.cuda()", b"loss.chip()"),
            ):
                data = data.replace(old, new)
        return data

    def path_stats(self, path):
        raise OSError  # no bytecode of the original

    def _cache_bytecode(self, *args):
        pass

    def set_data(self, *args, **kwargs):
        pass


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name != self.package and not name.startswith(self.package + "."):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if type(spec.loader) is importlib.machinery.SourceFileLoader:
                    spec.loader = _Translated(spec.loader.name, spec.loader.path)
                return spec
        return None


def translate(package: str) -> None:
    """Import a package with its "cuda" replaced by "chip". Call it before the first import."""
    sys.meta_path.insert(0, _Finder(package))


def lacks() -> str | None:
    """Return what this version of torch lacks for the emulator, or None."""
    needed = {
        "torch._C._acc.create_empty_tensor": getattr(
            getattr(torch._C, "_acc", None), "create_empty_tensor", None
        ),
        "a Python backend for PrivateUse1": getattr(
            backend_registration, "_setup_privateuseone_for_python_backend", None
        ),
    }
    return next((name for name, found in needed.items() if found is None), None)


def installed() -> bool:
    """Return whether this process has the device."""
    return bool(_kept)


#: The libraries of operators; torch forgets those that nobody keeps.
_kept: list[torch.library.Library] = []


def install() -> None:
    """Register the device in this process, which cannot be undone."""
    if installed():
        return

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_fallback, "PrivateUse1")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")

    # torch composes these of others: the emulator's own come first
    own = torch.library.Library("aten", "IMPL")
    for op in (
        _aten.copy_.default,
        _aten._to_copy.default,
        _aten.index_put_.default,
        _aten.scalar_tensor.default,
        _aten.fill_.Tensor,
        _aten.as_strided_.default,
        _aten.convolution_overrideable.default,
        _aten.convolution_backward_overrideable.default,
    ):
        own.impl(op, lambda *args, _op=op, **kwargs: _fallback(_op, *args, **kwargs), "PrivateUse1")

    cast = torch.library.Library("aten", "IMPL")
    for product in (
        _aten.mm,
        _aten.bmm,
        _aten.linear,
        _aten.matmul,
        _aten.conv2d,
        _aten.addmm,
        _aten.baddbmm,
    ):
        cast.impl(product.default, _autocast(product.default), "AutocastPrivateUse1")
    _kept.extend((library, own, cast))

    TensorDictBase._sync_all = lambda self: synchronize()
    torch.Generator = Generator
    _patch_storages()
    _patch_draws()
    _patch_pins()
    _patch_modules()


def _patch_modules() -> None:
    """``module.to("cuda")`` changes parameters in place; between other devices torch needs to be told."""
    real_apply = torch.nn.Module._apply

    def apply(self, fn, recurse=True):
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return real_apply(self, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    torch.nn.Module._apply = apply
