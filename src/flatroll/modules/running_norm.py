"""`RunningNorm`: a layer that normalises observations by their running mean and variance."""

import copy
import math
import warnings
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from flatroll.layout.boundaries import run_ends, starts_from
from flatroll.layout.checks import check_flags, check_keys, check_number, check_sizes, check_type
from flatroll.layout.column_actor import Columns
from flatroll.layout.delta import decode_delta
from flatroll.layout.final import check_final, read_final
from flatroll.layout.keys import (
    DELTA,
    IS_INIT,
    MASK,
    NEXT,
    NEXT_KNOWN,
    NestedKey,
    as_tuple,
    next_key,
    optional_marker,
    plain_key,
    require,
)
from flatroll.layout.moments import Moments
from flatroll.layout.tensordict_seam import get_entry, set_entry


class RunningNorm(TensorDictModuleBase):
    """Normalises an entry by its running mean and deviation inside the network; stored rows stay raw.

    ``out = clip((x - mean) / sqrt(var + epsilon))``. Put the same module in front of the actor, the critic and
    recurrent modules. The statistics are buffers: they are saved with the policy's ``state_dict``, are sent to
    workers with its weights, and the rows of a replay buffer are always normalised by the current ones. Collectors do
    not store its output.

    Only :meth:`update` changes the statistics. Call it in the process that learns, once for each collected batch, and
    update the collector's weights afterwards, as after a step of the optimizer: with ``track_policy_version=True`` a
    row's version also identifies the statistics. Before the first update only ``clip`` has an effect; after 10,000
    calls of losses without one, it warns.

    Integer and bool entries, such as uint8 images, are passed through (except with ``integers``). A frame stack is
    treated like any observation: each position in the stack has its own statistics. A Dict observation needs one module
    per entry; `update_norms` updates them all.

    Args:
        in_key: the entry, such as ``"observation"``, ``[*B, *shape]``.
        shape: shape of one observation, such as ``env.single_observation_space.shape``.
        out_key: output key; the dtype is that of the entry. Default: ``in_key`` with the suffix ``"_norm"``.
        clip: limit of the absolute output. Default: 10. None: no limit.
        epsilon: added to the variance. Default: 1e-8.
        integers: normalise integer entries as well; the output is floating. Default: they are passed through.
        device: device of the statistics. Default: torch's.

    Attributes:
        statistics: ``count`` (float64 ``[1]``), ``mean`` and ``var`` (float64 ``[*shape]``, ``[1]`` for numbers).

    Raises:
        ValueError: ``clip`` or ``epsilon`` is not above 0; when called: the entry has another shape.

    >>> from tensordict import TensorDict
    >>> norm = RunningNorm("observation", shape=(1,))
    >>> rows = TensorDict({"observation": torch.tensor([[1.0], [2.0], [3.0]])}, [3])
    >>> norm.update(rows)
    >>> norm(rows)["observation_norm"].squeeze(-1)
    tensor([-1.2247,  0.0000,  1.2247])
    >>> norm(observation=torch.tensor([[1000.0]]))
    tensor([[10.]])
    """

    def __init__(
        self,
        in_key: NestedKey,
        *,
        shape: tuple[int, ...],
        out_key: NestedKey | None = None,
        clip: float | None = 10.0,
        epsilon: float = 1e-8,
        integers: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_flags(integers=integers)
        self.integers = integers
        check_keys(in_key=in_key)
        check_keys(optional=True, out_key=out_key)

        *folders, name = as_tuple(in_key)
        if out_key is None:
            out_key = plain_key((*folders, f"{name}_norm"))
        self.in_key: NestedKey = plain_key(as_tuple(in_key))
        self.out_key: NestedKey = out_key
        self.in_keys: list[Any] = [self.in_key]
        self.out_keys: list[Any] = [self.out_key]

        self.shape = torch.Size(check_sizes("shape", shape))
        if clip is None:
            self.clip = None
        else:
            self.clip = float(check_number("clip", clip, above=0))
        self.epsilon = float(check_number("epsilon", epsilon, above=0, below=math.inf))
        self.statistics = Moments(self.shape, device)

    @property
    def recomputed_keys(self) -> list[NestedKey]:
        """Outputs that collectors do not store, because they are recomputed from the rows."""
        return [self.out_key]

    # accepts a tensordict, or the entry as a keyword argument
    @dispatch  # type: ignore[untyped-decorator]  # an untyped class, which makes forward an attribute
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Write the normalised entry into the batch ``[*B]``; return it."""
        x = get_entry(tensordict, self.in_key)
        if x is None:
            x = require(tensordict, self.in_key)
        set_entry(tensordict, self.out_key, self._normalized(x))
        return tensordict

    def takes_columns(self) -> bool:
        """Return True: see `flatroll.layout.column_actor`."""
        return True

    def on_columns(self, columns: Columns) -> None:
        """Do what :meth:`forward` does, with columns by key."""
        columns[plain_key(as_tuple(self.out_key))] = self._normalized(columns[self.in_key])

    def _normalized(self, x: Tensor) -> Tensor:
        self._check_shape(self.in_key, x)
        if not x.is_floating_point():
            if not self.integers:
                return x
            x = x.to(torch.get_default_dtype())

        moments = self.statistics
        if moments.unlearned and not torch.compiler.is_compiling():
            self._warn_of_none(moments)
        return moments.normalized(x, self.epsilon, self.clip)

    def update(self, batch: TensorDictBase, *, final: TensorDictBase | None = None) -> None:
        """Update the statistics with a collected batch, each observation once; does nothing after ``eval()``.

        An observation that is both a row's next observation and the next row's observation is counted once, and so
        are the last observations of episodes and of batches: if all batches of a collector are counted, so is each
        observation of its env exactly once, in any autoreset mode. Padding and hidden observations are left out.
        Samples of a replay buffer would count rows again: update with each collected batch.

        Args:
            batch: rows ``[*B]``, time last, as a collector yields them, with ``("next", key)``, the differences of
                `NextObservationDelta` in its place, or ``final``. Without any ``"next"`` all rows count: so a data set
                of observations can be counted.
            final: the next observations that no row of a compact batch holds (``collector.final``).

        Raises:
            KeyError: the entry, or all markers of boundaries, are missing.
            ValueError: another shape; a compact batch without ``final``, or the ``final`` of another batch; NaN or
                infinite numbers. Then the statistics stay as they were. Numbers are looked at on the host only: on a
                device this would wait, and NaN there makes every output NaN.
        """
        key = self.in_key
        column = require(batch, key)
        self._check_shape(key, column, batch.batch_size)
        if not (self.training and (self.integers or column.is_floating_point())):
            return

        rows = column.reshape(batch.batch_size.numel(), *self.shape)
        markers = []
        for name in (MASK, NEXT_KNOWN, IS_INIT):
            flag = optional_marker(batch, name)
            if flag is not None:
                flag = flag.reshape(-1)
            markers.append(flag)
        real, known, is_init = markers

        if batch.get(NEXT, None) is None:
            self.statistics.add((f"batch[{key!r}]", rows, real))
            return

        ends = run_ends(batch)
        # Count every next observation, and the first observation of every episode. Per row: the observation
        # of each row, except the first of a run that continues an earlier window (it was that window's last
        # next observation), plus the next observation at the end of each run.
        counted = None
        if is_init is not None:
            counted = is_init | ~starts_from(ends).reshape(-1)

        following, follows = self._next_observations(batch, rows, ends.reshape(-1), final)
        if real is not None:
            counted = real if counted is None else counted & real
            if follows is not None:
                follows = follows & real

        if known is not None and follows is not None:
            follows = follows & known

        if follows is not None and follows.is_cpu and not torch.compiler.is_compiling():
            # only few; on a device their number is unknown
            following = following[follows]
            follows = None

        self.statistics.add(
            (f"batch[{key!r}]", rows, counted),
            (f"the next observations, {next_key(key)!r},", following, follows),
        )

    def merge(self, other: "RunningNorm") -> None:
        """Merge the statistics of another module, for example from another rank or part of a data set.

        Raises:
            ValueError: its shape differs.

        >>> norms = [RunningNorm("observation", shape=()) for _ in range(2)]
        >>> _ = [norm.statistics.add(("x", torch.tensor([x]), None)) for norm, x in zip(norms, (1.0, 3.0))]
        >>> norms[0].merge(norms[1])
        >>> norms[0].statistics.mean.item(), norms[0].statistics.var.item()
        (2.0, 1.0)
        """
        if other.shape != self.shape:
            raise ValueError(f"other must be for shape {tuple(self.shape)}, got {tuple(other.shape)}")
        self.statistics.merge(other.statistics)

    def _warn_of_none(self, moments: Moments) -> None:
        """Warn once if networks are trained but the statistics are never updated, except for the first batches."""
        if not (self.training and torch.is_grad_enabled()):
            return

        moments.unlearned -= 1
        if not moments.unlearned:
            if self.clip is None:
                acts = "passes its input on unchanged"
            else:
                acts = f"only clips to {self.clip:g}"
            warnings.warn(
                f"RunningNorm({self.in_key!r}) was used in many losses and has counted nothing, so it {acts}: "
                "call its update(batch) for each collected batch, or leave it out (norm=False). TorchRL's "
                "losses keep a copy, which is not updated",
                UserWarning,
                stacklevel=2,
            )

    def _next_observations(
        self, batch: TensorDictBase, rows: Tensor, ends: Tensor, final: TensorDictBase | None
    ) -> tuple[Tensor, Tensor | None]:
        """Next observations ``[K, *shape]``, and which of them follow a run's end, bool ``[K]``; None: all do."""
        key = self.in_key
        if final is not None:
            given = read_final(final, [key])
            if key in given.next:
                if rows.is_cpu and not torch.compiler.is_compiling():  # depends on row numbers
                    check_final(given, {key: rows}, len(rows))
                return given.next[key], None

        column: Tensor | None = batch.get(next_key(key), None)
        if column is None:
            delta: Tensor | None = batch.get((*DELTA, *as_tuple(key)), None)
            if delta is None:
                raise ValueError(
                    f"batch has no entry {next_key(key)!r}, so the last observations of its runs are missing: call "
                    "update(batch, final=collector.final), which came with a compact batch"
                )
            column = decode_delta(batch.get(key), delta)

        self._check_shape(next_key(key), column, batch.batch_size)
        return column.reshape(rows.shape), ends

    def _check_shape(self, key: NestedKey, column: Tensor, rows: torch.Size | None = None) -> None:
        """Refuse a column whose shape does not end with ``shape``, or if given, is not ``[*rows, *shape]``."""
        lead = max(column.ndim - len(self.shape), 0)
        if column.shape[lead:] != self.shape or rows not in (None, column.shape[:lead]):
            raise ValueError(
                f"batch[{key!r}] must have shape {(*(rows or '*'), *self.shape)}, the shape of "
                f"RunningNorm(shape={tuple(self.shape)}), got {tuple(column.shape)}: another shape needs "
                "another RunningNorm"
            )


def update_norms(network: nn.Module, batch: TensorDictBase, *, final: TensorDictBase | None = None) -> None:
    """Update each `RunningNorm` in a network with a collected batch, once.

    Pass the policy; `critic(env, actor=policy)` shares its norms. A loss holds policy and critic, so it
    covers the norms of both. Norms with the same statistics are updated once. Without a `RunningNorm` nothing happens.

    Args:
        network: a policy, a loss or any other module.
        batch: see `RunningNorm.update`.
        final: see `RunningNorm.update`.

    Raises:
        TypeError: ``network`` is not a module.
        KeyError, ValueError: see `RunningNorm.update`. Then all statistics stay as they were.

    >>> from tensordict import TensorDict
    >>> norms = nn.ModuleList([RunningNorm(key, shape=(1,)) for key in ("lidar", "goal")])
    >>> rows = TensorDict({"lidar": torch.tensor([[1.0], [3.0]]), "goal": torch.tensor([[4.0], [6.0]])}, [2])
    >>> update_norms(norms, rows)
    >>> [norm.statistics.mean.item() for norm in norms]
    [2.0, 5.0]
    """
    check_type("network", network, nn.Module, "a policy, a loss or another torch module")
    norms: dict[int, RunningNorm] = {}
    for part in network.modules():
        if isinstance(part, RunningNorm):
            norms.setdefault(id(part.statistics), part)

    before = [copy.deepcopy(norm.statistics.state_dict()) for norm in norms.values()]
    try:
        for norm in norms.values():
            norm.update(batch, final=final)
    except (KeyError, ValueError):
        for norm, state in zip(norms.values(), before, strict=True):
            norm.statistics.load_state_dict(state)
        raise
