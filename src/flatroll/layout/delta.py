"""Stores the next observation as its difference to the observation, and restores it in samples."""

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.layout.checks import as_text, check_flags, check_floating_dtype, check_key_names, check_tensors
from flatroll.layout.keys import DELTA, STEPS_TO_NEXT_OBS, NestedKey, as_tuple, next_key, require

#: Unsigned dtypes without arithmetic in torch, and the signed dtypes of the same width.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def signed(column: Tensor) -> Tensor:
    """View ``column`` as the signed integer dtype of equal width if it is uint16, uint32 or uint64.

    torch has no arithmetic and no indexed writing for these three; the signed view shares their memory and has
    the same bits modulo 2**n.

    >>> signed(torch.tensor([65535], dtype=torch.uint16))
    tensor([-1], dtype=torch.int16)
    """
    other = _SIGNED.get(column.dtype)
    if other is None:
        return column
    return column.view(other)


def encode_delta(obs: Tensor, next_obs: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return the difference to store, ``next_obs - obs``, cast to ``dtype``; integers stay exact.

    Floating observations: ``(next_obs - obs)``, subtracted in their own dtype and cast once to ``dtype``.
    The result may overflow; this is not checked here (it would sync with the device), so call `check_delta` once per
    batch. Integer and bool observations: the exact difference modulo 2**bits, in their own dtype; ``dtype`` is not
    used.

    Args:
        obs: observation at t, any shape.
        next_obs: observation at t + 1, same shape and dtype.
        dtype: floating dtype of the stored difference. float16 keeps 11 bits of the difference (a relative
            error of 2**-11 in it) and rounds differences below 3e-8 to 0.

    Raises:
        TypeError: the two dtypes differ, or are complex.
        ValueError: ``dtype`` is not floating, or the two shapes or devices differ.

    >>> encode_delta(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0]))
    tensor([ 0.5000, -1.0000], dtype=torch.float16)
    >>> encode_delta(torch.tensor([250], dtype=torch.uint8), torch.tensor([4], dtype=torch.uint8))
    tensor([10], dtype=torch.uint8)
    """
    check_floating_dtype("dtype", dtype)
    _check_pair("next_obs", obs, next_obs)
    if obs.dtype != next_obs.dtype or obs.is_complex():
        raise TypeError(
            f"obs and next_obs must have the same real dtype, got {obs.dtype} and {next_obs.dtype}"
        )

    if obs.is_floating_point():
        return (next_obs - obs).to(dtype)
    if obs.dtype is torch.bool:
        return next_obs ^ obs
    # wraps around modulo 2**bits, as does the inverse sum
    return (signed(next_obs) - signed(obs)).view(obs.dtype)


def decode_delta(obs: Tensor, delta: Tensor) -> Tensor:
    """Return the next observation in the dtype of ``obs``: the inverse of `encode_delta`.

    Exact for integers and bool. For floats the sum is taken in the wider of the two dtypes and rounded once.
    A NaN or infinite ``obs`` gives NaN or infinity.

    Args:
        obs: observation at t.
        delta: result of `encode_delta`, same shape.

    Raises:
        TypeError: an integer or bool observation with a delta of another dtype, or a complex one.
        ValueError: the two shapes or devices differ.

    >>> decode_delta(torch.tensor([250], dtype=torch.uint8), torch.tensor([10], dtype=torch.uint8))
    tensor([4], dtype=torch.uint8)
    """
    _check_pair("delta", obs, delta)

    if obs.is_floating_point():
        wide = torch.promote_types(obs.dtype, delta.dtype)
        return (obs.to(wide) + delta.to(wide)).to(obs.dtype)

    if delta.dtype != obs.dtype:
        raise TypeError(
            f"delta must have the dtype of obs, {obs.dtype} (as encode_delta writes it), got {delta.dtype}"
        )
    if obs.dtype is torch.bool:
        return obs ^ delta
    return (signed(obs) + signed(delta)).view(obs.dtype)


def _check_pair(name: str, obs: Tensor, other: Tensor) -> None:
    """Raise unless ``other``, an argument of that name, is a tensor as large as ``obs`` on the same device."""
    check_tensors(**{"obs": obs, name: other})
    if obs.shape != other.shape or obs.device != other.device or obs.layout != other.layout:
        raise ValueError(
            f"{name} must have the shape, device and layout of obs, got {as_text(other)} for {as_text(obs)}"
        )


def check_delta(delta: Tensor, obs: Tensor, next_obs: Tensor, key: NestedKey) -> None:
    """Raise an error if a delta cannot restore the next observation (overflow). Syncs once per batch.

    Args:
        delta: ``encode_delta(obs, next_obs)``.
        obs: observation at t.
        next_obs: observation at t + 1.
        key: the observation's name, for the message.

    Raises:
        OverflowError: a difference of finite observations is infinite in the dtype of ``delta``.
        ValueError: a next observation would become NaN, because it follows a NaN or infinite observation. (A NaN next
            observation stays NaN, an infinite one after a finite one is exact.)
    """
    if not delta.is_floating_point() or bool(delta.isfinite().all()):
        return
    # infinite although both sides are finite: the dtype of the delta is too narrow
    overflown = delta.isinf() & obs.isfinite() & next_obs.isfinite()
    if bool(overflown.any()):
        largest = (next_obs[overflown].double() - obs[overflown].double()).abs().max().item()
        raise OverflowError(
            f"the delta of {key!r} does not fit {delta.dtype}: the largest difference is {largest:.6g}, the "
            f"maximum of the dtype is {torch.finfo(delta.dtype).max:.6g}. Use delta_dtype=torch.bfloat16 or "
            "float32, scale the observation, or leave the key out with in_keys"
        )

    # inf - inf and NaN: a number would be decoded as NaN
    lost = decode_delta(obs, delta).isnan() & ~next_obs.isnan()
    if bool(lost.any()):
        raise ValueError(
            f"the delta of {key!r} loses {int(lost.sum())} values: a next observation cannot be restored from a "
            "difference to NaN or infinity. Leave the key out with in_keys, or use compact_obs=True"
        )


class RestoreNextObservation:
    """Buffer-side transform: restores ``("next", <obs>)`` in samples from ``("next", "delta", <obs>)``.

    The decoding is elementwise, so it does not depend on how rows were sampled: ended and cut rows get their own next
    observation like all others. Floats are restored up to the rounding of the delta's dtype, integers exactly. With a
    `MultiStepTransform`, which restores them itself, it does nothing. `flatroll.wrappers.NextObservationDelta` writes
    the deltas.

    Args:
        in_keys: observation keys to restore. Default: every one that has a delta.
        delta_dtype: floating dtype of the deltas, default ``torch.float16``. Used by the wrapper of the same name;
            here deltas of any dtype are read.
        restore_dtype: floating dtype of restored floating observations. Default (``"root"`` or None): that
            of the root observation.
        drop_delta: whether to remove the used deltas from the sample. Default True.

    Raises:
        ValueError: ``restore_dtype`` or ``delta_dtype`` is not floating.
        TypeError: ``in_keys`` is a single string or an env.

    >>> from tensordict import TensorDict
    >>> obs = torch.tensor([[0], [250]], dtype=torch.uint8)
    >>> delta = torch.tensor([[250], [10]], dtype=torch.uint8)
    >>> sample = TensorDict({"pixels": obs, "next": {"delta": {"pixels": delta}}}, [2])
    >>> NextObservationDelta()(sample)["next", "pixels"].squeeze(-1)
    tensor([250,   4], dtype=torch.uint8)
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        *,
        delta_dtype: torch.dtype = torch.float16,
        restore_dtype: torch.dtype | Literal["root"] | None = "root",
        drop_delta: bool = True,
    ) -> None:
        dtype = restore_dtype
        if isinstance(restore_dtype, str) and restore_dtype == "root":
            dtype = None
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"restore_dtype must be a floating dtype, 'root' or None, got {as_text(restore_dtype)}"
            )

        check_flags(drop_delta=drop_delta)
        if hasattr(in_keys, "reset") and hasattr(in_keys, "step"):
            raise TypeError(
                "flatroll.buffers.NextObservationDelta restores next observations in samples and takes no env, got "
                f"{type(in_keys).__name__}: wrap the env in flatroll.wrappers.NextObservationDelta"
            )

        self.in_keys: list[tuple[str, ...]] | None = None
        if in_keys is not None:
            self.in_keys = [as_tuple(key) for key in check_key_names("in_keys", in_keys)]
        self.delta_dtype = check_floating_dtype("delta_dtype", delta_dtype)
        self.restore_dtype = dtype
        self.drop_delta = drop_delta

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Return a tensordict with the next observations restored; ``td`` stays unchanged.

        Raises:
            KeyError: a key of ``in_keys``, or with ``in_keys=None`` every key, has no delta; or a delta has
                no root observation.
        """
        deltas = td.get(DELTA, None)
        present = []
        if deltas is not None:
            present = [as_tuple(key) for key in deltas.keys(True, True)]
        used = self.in_keys
        if used is None:
            used = present
        missing = [key for key in used if key not in present]

        if not present and td.get(STEPS_TO_NEXT_OBS, None) is not None:
            return td  # a MultiStepTransform has restored the observations
        if missing or not present:
            wanted = ("next", "delta", *missing[0]) if missing else DELTA
            raise KeyError(
                f"sample has no entry {wanted!r}: wrap the env in flatroll.wrappers.NextObservationDelta, or "
                f"remove this transform. Deltas present: {', '.join(map(repr, present)) or 'none'}"
            )

        out = td.copy()
        for key in used:
            root = require(out, key)
            if self.restore_dtype is not None and root.is_floating_point():
                root = root.to(self.restore_dtype)
            out.set(next_key(key), decode_delta(root, require(out, (*DELTA, *key))))

        if not self.drop_delta:
            return out
        if len(used) == len(present):
            return out.exclude(DELTA)
        return out.exclude(*((*DELTA, *key) for key in used))

    __call__ = forward


#: The transform's public name, the same as its wrapper's, `flatroll.wrappers.NextObservationDelta`.
NextObservationDelta = RestoreNextObservation
