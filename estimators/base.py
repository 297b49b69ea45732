"""What every value estimator does around its recursion: read the batch, evaluate it, write the result."""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.chunks import Chunks
from flatroll.estimators.keyed import VALID, renamed, under_next
from flatroll.estimators.reductions import both, spread_over, standardized
from flatroll.estimators.values import Boundaries, StateValues
from flatroll.layout import run_ends
from flatroll.layout.keys import IS_INIT, MASK, NEXT_KNOWN, TRAJ_IDS, NestedKey, marker, next_key, require
from flatroll.modules import set_recurrent_mode

BootstrapMissing = Literal["error", "current", "mask"]


class ValueEstimator(TensorDictModuleBase):
    """Base of the estimators: a subclass gives :meth:`estimate`, the recursion over values and rewards.

    Args:
        value_network: tensordict module that reads observations and writes ``value_key`` ``[*B, T, 1]``.
        differentiable: let gradients through the values. Default: False.
        shifted: one call of the network over the extended stream (N + K rows, K the runs that do not end
            terminated) instead of two calls on 2 N rows; the same numbers. Inside a run ``("next", obs)`` of
            a row must be the observation of the row behind it, so no n-step rewards. Default: False. A
            recurrent network, and a batch without next observations, always take this path: no other is
            right.
        value_chunk_size: rows that go through the network at a time. Default: all.
        num_chunks: number of chunks instead. Chunks never cut a run of a recurrent network.
        num_chunk: the same as ``num_chunks``.
        bootstrap_missing: what to do where a run ends, not terminated, at a row whose next observation the
            env hid (``("collector", "next_known")`` is False): ``"error"``; ``"current"``, the row's own
            observation stands in; ``"mask"``, the row is left out: the row before bootstraps from it, its own
            advantage is 0, and ``"shifted_valid"``, which the losses heed, is False there. Default:
            ``"error"``.
        standardize: bring the advantage to zero mean and unit deviation over the real rows.
        keys: other names than the default ones, see :meth:`set_keys`.

    Raises:
        TypeError: ``value_network`` is no tensordict module.
        ValueError: both chunk arguments, or an unknown ``bootstrap_missing``.
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        "advantage": "advantage",
        "value_target": "value_target",
        "value": "state_value",
        "reward": "reward",
        "done": "done",
        "terminated": "terminated",
        "is_init": IS_INIT,
        "traj_ids": TRAJ_IDS,
        "mask": MASK,
        "valid": VALID,
    }

    def __init__(
        self,
        value_network: TensorDictModuleBase,
        *,
        differentiable: bool = False,
        shifted: bool = False,
        value_chunk_size: int | None = None,
        num_chunks: int | None = None,
        num_chunk: int | None = None,
        bootstrap_missing: BootstrapMissing = "error",
        standardize: bool = False,
        keys: Mapping[str, NestedKey | None] | None = None,
    ) -> None:
        super().__init__()
        if not hasattr(value_network, "in_keys"):
            raise TypeError(
                "value_network must be a tensordict module, e.g. TensorDictModule(net, "
                f"in_keys=['observation'], out_keys=['state_value']), got {type(value_network).__name__}"
            )
        if bootstrap_missing not in ("error", "current", "mask"):
            raise ValueError(
                f"bootstrap_missing must be 'error', 'current' or 'mask', got {bootstrap_missing!r}"
            )
        if num_chunk is not None and num_chunks not in (None, num_chunk):
            raise ValueError(f"num_chunk is another name of num_chunks, got {num_chunk} and {num_chunks}")
        self.value_network = value_network
        self.differentiable, self.shifted = differentiable, shifted
        self.chunks = Chunks(value_chunk_size, num_chunks if num_chunk is None else num_chunk)
        self.bootstrap_missing, self.standardize = bootstrap_missing, standardize
        self._warned = False
        self.tensor_keys: dict[str, NestedKey] = dict(self.default_keys)
        self.set_keys(**(keys or {}))

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Rename entries.

        Args:
            keys: ``advantage``, ``value_target`` and ``value`` are written, the value under ``"next"``, too;
                ``reward``, ``done`` and ``terminated`` are read under ``"next"``; the others are ``is_init``,
                ``traj_ids``, ``mask`` and ``valid``. None leaves a name as it is.

        Raises:
            ValueError: there is no such key.
        """
        self.tensor_keys = renamed(self.tensor_keys, keys)
        names = self.tensor_keys
        read: list[Any] = [under_next(names[name]) for name in ("reward", "done", "terminated")]
        written: list[Any] = [names["advantage"], names["value_target"], names["value"]]
        read[:0] = self.value_network.in_keys
        written.append(next_key(names["value"]))
        self.in_keys, self.out_keys = read, written

    def estimate(
        self,
        value: Tensor,
        next_value: Tensor,
        reward: Tensor,
        terminated: Tensor,
        ends: Tensor,
        time_dim: int,
    ) -> tuple[Tensor, Tensor]:
        """Advantage and value target from columns ``[*B, T, *F]``; flags have 1 for each feature dim."""
        raise NotImplementedError(f"{type(self).__name__} must define estimate")

    def forward(self, tensordict: TensorDictBase, *, final: TensorDictBase | None = None) -> TensorDictBase:
        """Write advantage, value target and values into a batch ``[N]`` or ``[*B, T]`` and return it.

        Args:
            tensordict: the batch. Only its data are read, never what an estimator wrote before.
            final: the next observations that no row of a compact batch holds, as it came with the batch
                (``collector.final``). Without it, and without ``("next", obs)``, the row's own observation
                stands in at the ends of runs that are not terminated, and a warning says so once.

        Raises:
            KeyError: an entry is missing; the text names what writes it.
            TypeError: the reward is not floating, or a flag not bool.
            ValueError: shapes that do not match, hidden final observations, a ``final`` of another batch.
        """
        grad = self.differentiable and torch.is_grad_enabled()
        with torch.set_grad_enabled(grad), set_recurrent_mode(True):
            self._write(tensordict, final)
        return tensordict

    def _write(self, batch: TensorDictBase, final: TensorDictBase | None) -> None:
        names = self.tensor_keys
        reward = self._reward(batch)
        at = self._boundaries(batch)
        values = StateValues(
            self.value_network,
            value_key=names["value"],
            is_init_key=names["is_init"],
            shifted=self.shifted,
            chunks=self.chunks,
            warn=self._warn_once,
        )
        value, next_value = values(batch, at, final)
        if value.shape != reward.shape:
            raise ValueError(
                f"value_network must write values of the reward's shape {tuple(reward.shape)}, "
                f"got {tuple(value.shape)}"
            )
        left_out = at.unknown if self.bootstrap_missing == "mask" else None
        ends = at.ends
        if (
            left_out is not None
        ):  # the row before stops there: what follows it is known, what follows that not
            ends = ends.clone()
            ends[..., :-1] |= left_out[..., 1:]
        spread = [*ends.shape, *[1] * (reward.ndim - ends.ndim)]
        flags = at.terminated.reshape(spread), ends.reshape(spread)
        advantage, target = self.estimate(value, next_value, reward, *flags, time_dim=batch.batch_dims - 1)
        valid = None if left_out is None else ~left_out
        if self.standardize:
            mask = None if batch.get(names["mask"], None) is None else marker(batch, names["mask"])
            advantage = standardized(advantage, spread_over(both(mask, valid), advantage))
        if valid is not None:
            advantage = advantage.masked_fill(~valid.reshape(spread), 0.0)
            target = torch.where(valid.reshape(spread), target, value)
        batch.set(names["advantage"], advantage)
        batch.set(names["value_target"], target)
        batch.set(names["value"], value)
        batch.set(next_key(names["value"]), next_value)
        if valid is not None or batch.get(names["valid"], None) is not None:  # never leave an old one behind
            batch.set(names["valid"], torch.ones_like(ends) if valid is None else valid)

    def _reward(self, batch: TensorDictBase) -> Tensor:
        key = under_next(self.tensor_keys["reward"])
        reward = require(batch, key)
        if not reward.is_floating_point():
            raise TypeError(f"batch[{key!r}] must be floating, got {reward.dtype}: cast it with .float()")
        return reward.unsqueeze(-1) if reward.shape == batch.batch_size else reward

    def _boundaries(self, batch: TensorDictBase) -> Boundaries:
        names = self.tensor_keys
        ends = run_ends(
            batch,
            is_init_key=names["is_init"],
            done_key=under_next(names["done"]),
            traj_key=names["traj_ids"],
            mask_key=names["mask"],
        )
        terminated = marker(batch, under_next(names["terminated"]))
        if batch.get(NEXT_KNOWN, None) is None:
            return Boundaries(ends, terminated, None)
        unknown = ~marker(batch, NEXT_KNOWN) & ends & ~terminated
        if self.bootstrap_missing == "error" and bool(unknown.any()):
            rows = unknown.reshape(-1).nonzero().squeeze(-1)
            raise ValueError(
                f"the env hid the final observation of {rows.shape[0]} truncated rows (the first is row "
                f"{int(rows[0])}), so their next value is unknown: choose bootstrap_missing='current' (the "
                "value of the row's own observation) or 'mask' (leave the rows out), or collect from an env "
                "that reports final observations"
            )
        return Boundaries(ends, terminated, unknown)

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, UserWarning, stacklevel=9)  # the caller of the module
