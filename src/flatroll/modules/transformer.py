"""TransformerModule: cached single steps in rollouts, attention over whole runs of a flat batch in training."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal, TypeAlias, Unpack

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.kernels.scan import is_tracing
from flatroll.layout.boundaries import steps_into_run
from flatroll.layout.checks import check_choice, check_number, check_whole_number
from flatroll.layout.column_actor import Columns
from flatroll.layout.keys import MASK, STEP_COUNT, is_hidden, marker, next_key, require
from flatroll.layout.transfers import upload
from flatroll.modules.backends.attention import CachedSteps, ContinuedRuns, attention_over_runs
from flatroll.modules.memory import MemoryModule, MemoryOptions
from flatroll.modules.mode import burn_in_rows
from flatroll.modules.networks import check_sizes
from flatroll.modules.primer import TensorDictPrimer
from flatroll.modules.transformer_network import TransformerNetwork

#: How the rows that a layer sees are told apart.
Position: TypeAlias = Literal["rotary", "learned"] | None

#: Slots of a cache without a limit at the start; their number doubles as an episode needs more.
_FIRST_SLOTS = 32


class TransformerModule(MemoryModule):
    """A causal transformer on tensordict rows: cached steps in rollouts, whole runs in training, with equal results.

    :class:`set_recurrent_mode`, or else ``default_recurrent_mode``, selects one of two modes.

    * sequential: each of the rows ``[*B]`` is one step. Keys and values of the last ``context`` rows of each env's
      episode are in a cache, which `is_init` empties and the step writes in place.
    * recurrent: the rows ``[N]`` (or ``[*B, T]``, time last) are runs of consecutive steps, which begin at the rows of
      :func:`flatroll.layout.run_starts`. A row sees the rows of its run before it. There is no padding to the longest
      run: work grows with the sum of ``length * min(length, context)``.

    The cache has ``2 * num_layers * context * embed_size`` numbers per env, so it is no column of a batch: whoever
    steps carries it, from ``("next", "_cache")`` to ``"_cache"`` (names with ``_`` in front are never stored).
    Collectors, `rollout` and `evaluate` do. In a batch each run therefore begins with an empty context. Where it begins
    inside an episode (the window of a collector, a slice), its first rows see less than they did in the rollout, and
    the module warns once. With ``set_recurrent_mode(True, burn_in=k)``, or ``burn_in=k`` of a loss, the first ``k``
    rows of each run are context only: they get no gradient, and with ``k >= num_layers * (context - 1)`` all others see
    what they saw in the rollout.

    Args:
        input_size: features per row.
        embed_size: features of the output and between layers; divisible by ``num_heads``.
        num_layers: default 1.
        num_heads: default 4.
        context: rows that one layer sees, the present one included. Default None: the whole run; its cache grows with
            the longest episode, and on a device each step waits for its length.
        position: ``"rotary"`` turns queries and keys by their position (an even head size); ``"learned"`` adds a
            learned number for each head and distance to the scores (needs ``context``); None tells rows apart by
            their content only. All depend only on distances, so it does not matter where in an episode a run begins.
        gate: ``"gtrxl"`` lets each branch in by the gate of a GRU, which steadies the first updates; None adds it.
        mlp_ratio: width of a layer's MLP, in ``embed_size``; default 4.
        dropout: of each branch, in training mode; default 0.
        in_key: input key; the keys of the cache are then ``"_cache"`` and ``"_cache_steps"``.
        in_keys: ``[input, cache, steps]`` or these and is_init, where the names of cache and steps begin with ``_``;
            exactly one of in_key and in_keys.
        out_key: output key.
        out_keys: ``[output, ("next", cache), ("next", steps)]``; exactly one of out_key and out_keys.
        default_recurrent_mode, done_key, traj_key: see :class:`GRUModule`.
        device, dtype: of the weights.

    Shapes: input ``[*B, input_size]``, cache ``[*B, num_layers, 2, num_heads, slots, embed_size / num_heads]``, steps
    int64 ``[*B]``, is_init bool ``[*B]`` or ``[*B, 1]``, output ``[*B, embed_size]``.

    Raises:
        TypeError: an unknown argument; when called, an input or a cache of another dtype than the weights.
        ValueError: a size below 1, heads that do not divide ``embed_size``, an odd head size with rotary positions, a
            ``context`` below 1, learned positions without ``context``, contradicting keys, a key of the cache without
            ``_`` in front; when called, a wrong shape, a cache on another device or for another number of envs.
        KeyError: when called, the input is missing, or the cache in rows that are not all first rows.

    References:
        A. Vaswani et al., Attention is all you need, 2017, https://arxiv.org/abs/1706.03762, with norms in front; E.
        Parisotto et al., Stabilizing transformers for reinforcement learning (GTrXL), 2019,
        https://arxiv.org/abs/1910.06764; J. Su et al., RoFormer (rotary positions), 2021,
        https://arxiv.org/abs/2104.09864.

    >>> from tensordict import TensorDict
    >>> from flatroll.modules import set_recurrent_mode
    >>> net = TransformerModule(3, 8, num_layers=2, context=16, in_key="observation", out_key="features")
    >>> is_init = torch.tensor([True, False, False, True, False])
    >>> batch = TensorDict({"observation": torch.randn(5, 3), "is_init": is_init}, [5])
    >>> with set_recurrent_mode("recurrent"):
    ...     whole = net(batch.copy())["features"]
    >>> step = net.make_tensordict_primer().expand(1)
    >>> out = []
    >>> for row in batch.split(1):
    ...     step = net(step.update(row))
    ...     out.append(step["features"])
    ...     for key in ("_cache", "_cache_steps"):
    ...         step[key] = step["next", key]
    >>> torch.allclose(torch.cat(out), whole, atol=1e-5), step["_cache"].shape
    (True, torch.Size([1, 2, 2, 4, 16, 2]))
    """

    state_keys: ClassVar[tuple[str, ...]] = ("_cache", "_cache_steps")

    def __init__(
        self,
        input_size: int,
        embed_size: int,
        num_layers: int = 1,
        num_heads: int = 4,
        *,
        context: int | None = None,
        position: Position = "rotary",
        gate: Literal["gtrxl"] | None = None,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[MemoryOptions],
    ) -> None:
        check_whole_number("embed_size", embed_size)
        check_sizes(input_size, embed_size, num_layers, device=device, dtype=dtype)
        check_whole_number("num_heads", num_heads)
        if context is not None:
            check_whole_number("context", context, hint="rows that a layer sees, the present one included")
        check_choice("position", position, ("rotary", "learned", None))
        check_choice("gate", gate, ("gtrxl", None))
        check_number("mlp_ratio", mlp_ratio, above=0)
        check_number("dropout", dropout, least=0, below=1)
        if embed_size % num_heads:
            raise ValueError(
                f"embed_size must be divisible by num_heads, got embed_size={embed_size} and num_heads={num_heads}"
            )
        if position == "rotary" and (embed_size // num_heads) % 2:
            raise ValueError(
                "position='rotary' turns pairs of features, so embed_size / num_heads must be even, got "
                f"embed_size={embed_size} and num_heads={num_heads}"
            )
        if position == "learned" and context is None:
            raise ValueError(
                "position='learned' has one number for each distance, so it needs context=, got None"
            )

        super().__init__(**options)
        for key in self._state_in:
            if not is_hidden(key):
                raise ValueError(
                    f"in_keys[1:3], the keys of the cache, must begin with '_', got {key!r}: an entry of another name "
                    "would be stored in every row"
                )

        self.input_size = input_size
        self.embed_size = embed_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.context = context
        self.position = position
        self.network = TransformerNetwork(
            input_size,
            embed_size,
            num_layers,
            num_heads,
            context=context,
            position=position,
            gate=gate,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            device=device,
            dtype=dtype,
        )
        self._between_windows: tuple[Columns | None, Columns] | None = None  # within `begin_from`
        self._warned = False  # whether it has warned of runs that begin inside an episode

    @property
    @override
    def weight(self) -> Tensor:
        return self.network.embed.weight

    @override
    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the cache of one env and its number of rows, 0.

        Raises:
            RuntimeError: an out key is not ``("next", in_key)``, so the cache cannot be carried.
        """
        self._check_carried()
        cache, steps = self._empty_cache(1)
        cache_key, steps_key = self._state_in
        return TensorDictPrimer({cache_key: cache[0], steps_key: steps[0]})

    @override
    def on_columns(self, columns: Columns) -> None:
        cache_key, steps_key = self._state_in
        is_init = columns[self._init_key].reshape(-1)
        rows = columns[self._input_key]
        cache = columns[cache_key]
        steps = columns[steps_key]
        self._check_cache(cache, steps, rows.shape[0])

        out, after = self._step(rows, cache, steps, is_init)
        columns[self._output_key] = out
        columns.update(zip(self._state_out, after, strict=True))

    @override
    def _forward_steps(self, batch: TensorDictBase) -> tuple[Tensor, Columns]:
        is_init = marker(batch, self._init_key).reshape(-1)
        rows = self._input_rows(batch)
        cache, steps = self._cache_before(batch, is_init)
        out, after = self._step(rows, cache, steps, is_init)
        shaped = [value.reshape(*batch.batch_size, *value.shape[1:]) for value in after]
        return out, dict(zip(self._state_out, shaped, strict=True))

    def _step(
        self, rows: Tensor, cache: Tensor, steps: Tensor, is_init: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the outputs of E rows, the cache with them, and the rows of each episode so far."""
        steps = steps.masked_fill(is_init, 0)
        if self.context is None:
            if torch.compiler.is_exporting():
                raise ValueError(
                    f"{type(self).__name__} must have context= to be exported, got None: its cache would grow "
                    "with each step"
                )
            longest = int(steps.max()) if len(steps) else 0
            cache = _with_room(cache, longest + 1)

        attention = CachedSteps(cache, steps)
        out = self.network(rows, steps, attention)
        return out, (attention.cache, steps + 1)

    def _cache_before(self, batch: TensorDictBase, is_init: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cache ``[E, ...]`` before the step and the number of rows in each env's episode, int64 ``[E]``."""
        cache_key, steps_key = self._state_in
        cache = batch.get(cache_key, None)
        steps = batch.get(steps_key, None)
        if cache is not None and steps is not None:
            cache = cache.reshape(-1, *cache.shape[batch.batch_dims :])
            steps = steps.reshape(-1)
            self._check_cache(cache, steps, is_init.shape[0])
            return cache, steps

        # checked only where it needs no host sync
        if is_init.is_cpu and not bool(is_init.all()):
            raise KeyError(
                f"batch has no entries {cache_key!r} and {steps_key!r}, and some rows are not is_init rows: carry "
                f"{next_key(cache_key)!r} and {next_key(steps_key)!r} of each step to the root of the next one "
                "(Collector does it), or begin with "
                "batch.update(module.make_tensordict_primer().expand(batch.batch_size))"
            )
        return self._empty_cache(is_init.shape[0])

    def _empty_cache(self, envs: int) -> tuple[Tensor, Tensor]:
        """Return a new cache ``[E, layers, 2, heads, slots, size]`` and the number of rows in it, int64 ``[E]``."""
        slots = self.context
        if slots is None:
            slots = _FIRST_SLOTS
        cache = self.weight.detach().new_zeros(envs, *self._cache_shape(slots))
        return cache, torch.zeros(envs, dtype=torch.int64, device=cache.device)

    def _cache_shape(self, slots: int) -> tuple[int, ...]:
        return self.num_layers, 2, self.num_heads, slots, self.embed_size // self.num_heads

    def _check_cache(self, cache: Tensor, steps: Tensor, envs: int) -> None:
        """Refuse a cache and steps of another shape, dtype or device than those of ``envs`` envs."""
        slots = self.context
        if slots is None and cache.ndim == 6:
            slots = cache.shape[4]
        expected = (envs, *self._cache_shape(slots or _FIRST_SLOTS))
        key = self._state_in[0]
        way_out = "begin with module.make_tensordict_primer().expand(number of envs)"
        if cache.shape != expected:
            raise ValueError(
                f"the cache {key!r} must have shape {expected}, [envs, num_layers, 2, num_heads, slots, head size], "
                f"got {tuple(cache.shape)}: {way_out}"
            )
        if cache.device != self.weight.device:
            raise ValueError(
                f"the cache {key!r} is on {cache.device}, the weights are on {self.weight.device}: {way_out} after "
                "moving the module"
            )
        if cache.dtype != self.weight.dtype:
            raise TypeError(
                f"the cache {key!r} must be {self.weight.dtype} like the weights, got {cache.dtype}: {way_out}"
            )
        if steps.shape != (envs,) or steps.dtype is not torch.int64 or steps.device != cache.device:
            raise ValueError(
                f"the steps {self._state_in[1]!r} of the cache must be int64 [{envs}] on {cache.device}, got "
                f"{steps.dtype} {list(steps.shape)} on {steps.device}: {way_out}"
            )

    @override
    def _forward_runs(self, batch: TensorDictBase) -> tuple[Tensor, Columns]:
        starts = self._run_starts(batch)
        rows = self._input_rows(batch)
        self._check_order(batch, starts)

        first = starts.flatten()
        burn_in = burn_in_rows()
        without_gradient = None
        if burn_in and torch.is_grad_enabled():
            without_gradient = steps_into_run(first).to(rows.device) < burn_in

        biased = self.position == "learned"
        if self._between_windows is None:
            self.warn_of_cut_runs(batch, starts)
            position = steps_into_run(first).to(rows.device)
            attention = attention_over_runs(first, self.context, rows.device, biased=biased)
            return self.network(rows, position, attention, without_gradient), {}

        before, after = self._between_windows
        runs, cache, steps = self._caches_of_runs(batch, starts, before)
        continued = ContinuedRuns(first.cpu(), self.context, runs, cache, steps, biased=biased)
        out = self.network(rows, continued.position, continued, without_gradient)
        if batch.get(self._done_key, None) is not None:
            after.update(self._caches_at_cuts(batch, starts, continued))
        return out, {}

    @contextmanager
    def begin_from(self, caches: Columns | None) -> Iterator[Columns]:
        """Within it, runs of a flat pass that begin inside an episode go on from caches: windows in a row as one pass.

        Whoever trains on the batches of a collector in their order carries the caches from each to the next. Nothing
        is stored in a row. Outputs are those of one pass over all windows, as long as the weights are the same;
        gradients end where a window begins.

        Args:
            caches: what a window begins with, for each of its K runs that begin inside an episode (at rows that are
                not is_init rows), in the order of the batch: ``"_cache"``, ``[K, num_layers, 2, num_heads, slots,
                embed_size / num_heads]``, and ``"_cache_steps"``, int64 ``[K]``. None: nothing, and these runs begin
                with an empty context.

        Yields:
            a dict that each pass over rows with done fills with the same entries after the runs that end inside an
            episode, and their trajectory ids, which are compared: the caches of the window that follows.

        Raises:
            ValueError: in a pass: another number of runs begins inside an episode than there are caches, or runs of
                other trajectories do, or the pass is compiled.
            KeyError: an entry of the caches is missing.

        >>> from tensordict import TensorDict
        >>> from flatroll.modules import set_recurrent_mode
        >>> net = TransformerModule(3, 8, context=4, in_key="observation", out_key="features")
        >>> is_init = torch.tensor([True, False, False, False, True, False])
        >>> done = torch.tensor([False, False, False, True, False, False])
        >>> rows = {"observation": torch.randn(6, 3), "is_init": is_init, "next": {"done": done}}
        >>> batch = TensorDict(rows, [6])
        >>> parts, caches = [], None
        >>> with set_recurrent_mode("recurrent"):
        ...     whole = net(batch.copy())["features"]
        ...     for window in batch.split(2):
        ...         with net.begin_from(caches) as after:
        ...             parts.append(net(window)["features"])
        ...         caches = after
        >>> torch.allclose(torch.cat(parts), whole, atol=1e-5)
        True
        """
        outer = self._between_windows
        after: Columns = {}
        self._between_windows = (caches, after)
        try:
            yield after
        finally:
            self._between_windows = outer

    def _caches_of_runs(
        self, batch: TensorDictBase, starts: Tensor, caches: Columns | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the runs that go on, their caches, and rows of their episodes before; int64 ``[K]`` on the CPU."""
        if is_tracing():
            raise ValueError("begin_from cannot be compiled: call the module outside of torch.compile")
        if caches is None:
            cache, steps = self._empty_cache(0)
            return steps.cpu(), cache, steps.cpu()

        cache_key, steps_key = self._state_in
        for key in (cache_key, steps_key):
            if key not in caches:
                raise KeyError(
                    f"caches have no entry {key!r}, got {list(caches)}: pass on what begin_from yielded for the window "
                    "before, whose pass must be over rows with done; or None"
                )
        cut = _without_padding(batch, starts.cpu() & ~marker(batch, self._init_key).cpu())
        runs = cut.flatten()[starts.flatten().cpu()].nonzero().squeeze(1)
        cache = caches[cache_key]
        way_out = "windows must come in the order in which they were collected, with the caches of the window before"
        if len(cache) != len(runs):
            raise ValueError(
                f"{len(runs)} runs of the batch begin inside an episode, got caches for {len(cache)}: {way_out}. "
                "Nor may a loss or an estimator be called within begin_from that runs the module on other rows, such "
                "as next observations or a minibatch"
            )
        self._check_cache(cache, caches[steps_key], len(runs))

        known = caches.get(self._traj_key)
        if known is not None and batch.get(self._traj_key, None) is not None:
            ids = require(batch, self._traj_key).flatten().cpu()[cut.flatten()]
            if not torch.equal(ids, known):
                raise ValueError(
                    f"the runs that begin inside an episode are of trajectories {ids.tolist()}, got caches for "
                    f"{known.tolist()}: {way_out}"
                )
        return runs, cache, caches[steps_key].cpu()

    def _caches_at_cuts(self, batch: TensorDictBase, starts: Tensor, continued: ContinuedRuns) -> Columns:
        """Return the caches after the runs that end inside an episode."""
        done = marker(batch, self._done_key).flatten().cpu()
        first = starts.flatten().cpu()
        last = torch.cat([first[1:], torch.ones_like(first[:1])])
        ends = _without_padding(batch, (last & ~done).view(starts.shape)).flatten()
        runs = ends[last].nonzero().squeeze(1)

        steps = continued.total[runs]
        slots = self.context
        if slots is None:
            slots = _slots_for(_FIRST_SLOTS, int(continued.total.max()))
        cache_key, steps_key = self._state_in
        cache = continued.cache_after(runs, slots)
        caches = {cache_key: cache, steps_key: upload(steps, cache.device)}
        if batch.get(self._traj_key, None) is not None:
            caches[self._traj_key] = require(batch, self._traj_key).flatten().cpu()[ends]
        return caches

    def warn_of_cut_runs(self, batch: TensorDictBase, starts: Tensor) -> None:
        """Warn once of runs that begin inside an episode, without burn-in; skipped where it would sync with the host.

        Args:
            batch: ``[*B]``; its ``"step_count"``, or else is_init, says where episodes begin.
            starts: bool ``[*B]``, first rows of runs.
        """
        if self._warned or burn_in_rows() or not starts.is_cpu or is_tracing():
            return

        steps = batch.get(STEP_COUNT, None)
        if steps is not None and steps.numel() == starts.numel():
            cut = starts & (steps.reshape(starts.shape) > 0).cpu()
        elif batch.get(self._init_key, None) is not None:
            cut = starts & ~marker(batch, self._init_key).cpu()
        else:
            return
        cut = _without_padding(batch, cut)

        count = int(cut.sum())
        if not count:
            return
        self._warned = True
        needed = "all rows of the episode before them"
        if self.context is not None:
            needed = f"burn_in={self.num_layers * (self.context - 1)}"
        warnings.warn(
            f"{count} of {int(starts.sum())} runs begin inside an episode, and a batch does not hold what "
            f"{type(self).__name__} saw before them: their first rows see less than in the rollout. Let the first rows "
            f"of each run be context only, by burn_in= of a loss or set_recurrent_mode(True, burn_in=...) ({needed} "
            "makes all others exact), or collect whole episodes (said once)",
            stacklevel=2,
        )


def _without_padding(batch: TensorDictBase, flags: Tensor) -> Tensor:
    """Return flags on the CPU, False in padding, which is runs of its own."""
    if batch.get(MASK, None) is None:
        return flags
    return flags & marker(batch, MASK).cpu()


def _with_room(cache: Tensor, rows: int) -> Tensor:
    """Return a cache with slots for as many rows: itself, or one of twice the slots or more."""
    slots = cache.shape[-2]
    if rows <= slots:
        return cache

    wider = cache.new_zeros(*cache.shape[:-2], _slots_for(slots, rows), cache.shape[-1])
    wider[..., :slots, :] = cache
    return wider


def _slots_for(slots: int, rows: int) -> int:
    """Double a number of slots until there are as many as rows."""
    while slots < rows:
        slots *= 2
    return slots
