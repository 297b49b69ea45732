"""Causal attention over the runs of a flat batch: runs of similar length go together, with little padding.

Runs are sorted by length and cut into parts whose runs are within a quarter of one another. Within a part each run is
padded behind its last row, so a causal call needs no mask. Where only the last ``context`` rows are visible, long runs
are cut into blocks of that many rows: a row sees its block and the one before. So work grows with rows times the
smaller of run length and ``context``. Slices of one length need no other place than they have.
"""

import functools
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from flatroll.kernels.attention import step_loop
from flatroll.kernels.scan import is_tracing, machine_code
from flatroll.layout.boundaries import steps_into_run
from flatroll.layout.transfers import upload

#: Runs of a part are at least this share of its longest one, or shorter by this many rows at most.
NEAREST = 0.8
FEW_ROWS = 3
#: Blocks have at least this many rows: smaller ones cost more calls than they save.
LEAST_BLOCK = 32
#: Tiles of several runs have this many rows at most: a call with a mask touches every pair of rows in a tile.
LARGEST_TILE = 128


class Attention(Protocol):
    """What the layers of a network attend with."""

    def attend(self, layer: int, heads: Tensor, bias: Tensor | None) -> Tensor:
        """Return what each of N rows gathers from the rows that it sees, ``[N, heads * size]``.

        Args:
            layer: number of the layer.
            heads: queries, keys and values of each row, ``[N, 3, heads, size]``.
            bias: added to the scores, ``[heads, context]``, by the number of rows between query and key; or None.
        """
        ...


class Places(NamedTuple):
    """Where the rows of a flat batch are in a padded one, int64."""

    source: Tensor  # the row at each of M places; 0 at padding
    place: Tensor  # the place of each of N rows
    padding: Tensor  # the places without a row


class Window(NamedTuple):
    """Which keys a query sees."""

    visible: Tensor  # bool [queries, keys], or [B, 1, queries, keys]
    distance: Tensor  # int64 [queries, keys]: rows between query and key where it is visible, else any number


class Part(NamedTuple):
    """Runs, or blocks of runs, that one call attends over."""

    pieces: int
    length: int
    window: Window | None  # None: a row sees all rows before it
    of_blocks: bool  # whether a row sees the piece before its own, too


class GroupedRuns:
    """Attention over the runs of one flat batch; made once for all layers.

    Args:
        starts: bool ``[N]`` on the CPU, True at first rows.
        context: number of rows that a row sees, itself included; None for all of its run.
        device: of the rows.
        biased: whether `attend` gets a bias.
    """

    def __init__(
        self, starts: Tensor, context: int | None, device: torch.device, *, biased: bool = False
    ) -> None:
        rows = starts.numel()
        first = starts.nonzero().squeeze(1)
        lengths, by_rank = first.diff(append=first.new_tensor([rows])).sort(descending=True, stable=True)

        if context is None:
            block = rows
            context = rows
        else:
            block = max(context, LEAST_BLOCK)

        self.parts: list[Part] = []
        #: None: the rows lie at their places.
        self.places: Places | None = None
        tile = _find_tile(starts, lengths)
        if tile is not None and tile <= 2 * block:
            window = None
            if int(lengths[-1]) < tile:
                window = _window_of_tiles(starts, tile, context, device)
            elif tile > context or biased:
                window = _window(tile, tile, context, device)
            self.parts.append(Part(rows // tile, tile, window, of_blocks=False))
            return

        blocks = (lengths + block - 1) // block
        long = int((lengths > 2 * block).sum())

        # the rows that each run takes up: whole blocks, or as many as the longest run of its part
        widths = blocks * block
        if long:
            firsts = torch.zeros(int(blocks[:long].sum()), dtype=torch.bool)
            firsts[blocks[:long].cumsum(0) - blocks[:long]] = True
            window = _window_of_blocks(firsts, block, context, device)
            self.parts.append(Part(len(firsts), block, window, of_blocks=True))

        at = long
        for runs, longest in _similar(lengths[long:]):
            window = None
            if longest > context or biased:
                window = _window(longest, longest, context, device)
            self.parts.append(Part(runs, longest, window, of_blocks=False))
            widths[at : at + runs] = longest
            at += runs

        begins = widths.cumsum(0) - widths
        begins = torch.empty_like(begins).index_copy_(0, by_rank, begins)  # in the order of the batch
        self.places = _lay_out(starts, begins - first, int(widths.sum()), device)

    def attend(self, layer: int, heads: Tensor, bias: Tensor | None) -> Tensor:
        """See `Attention`."""
        gathered: list[Tensor] = []
        for part, rows in zip(self.parts, self._by_part(heads.flatten(1)), strict=True):
            # [pieces * length, 3 * heads * size] -> each [pieces, heads, length, size]
            rows = rows.view(part.pieces, part.length, *heads.shape[1:])
            query, key, value = rows.transpose(1, 3).unbind(2)
            if part.length == 1:
                gathered.append(value.flatten(1))
                continue

            if part.of_blocks:
                key = _with_block_before(key)
                value = _with_block_before(value)
            out = attend_within(query, key, value, part.window, bias)
            gathered.append(out.transpose(1, 2).flatten(2).flatten(0, 1))

        if self.places is None:
            return gathered[0]
        out = _Unpad.apply(torch.cat(gathered), *self.places)  # type: ignore[no-untyped-call]  # torch leaves it so
        return cast(Tensor, out)

    def _by_part(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows ``[N, F]`` of each part at their places."""
        if self.places is None:
            return (rows,)
        padded: Tensor = _Pad.apply(rows, *self.places)  # type: ignore[no-untyped-call]  # torch leaves it so
        return torch.split(padded, [part.pieces * part.length for part in self.parts])


class ContinuedRuns:
    """The same where some runs go on from caches: rows of a cache are context in front of their run.

    Args:
        starts: bool ``[N]`` on the CPU, True at first rows.
        context: see `GroupedRuns`.
        runs: int64 ``[K]`` on the CPU, the runs that go on, in ascending order.
        cache: ``[K, layers, 2, heads, P, size]``, on the rows' device.
        steps: int64 ``[K]`` on the CPU, rows of the episode before the run.
        biased: see `GroupedRuns`.
    """

    def __init__(
        self, starts: Tensor, context: int | None, runs: Tensor, cache: Tensor, steps: Tensor, *, biased: bool
    ) -> None:
        device = cache.device
        slots = cache.shape[4]
        first = starts.nonzero().squeeze(1)
        lengths = first.diff(append=first.new_tensor([len(starts)]))
        #: Rows of the episode at the end of each run, and how many of them are known; int64 ``[R]`` on the CPU.
        self.total = lengths.index_add(0, runs, steps)
        held = steps.clamp(max=slots)
        self.known = lengths.index_add(0, runs, held)

        # with the rows of caches in front of their runs
        self.ends = self.known.cumsum(0)
        begins = self.ends - self.known
        rows = int(self.ends[-1])
        longer = torch.zeros(rows, dtype=torch.bool).index_fill_(0, begins, True)
        self.runs = GroupedRuns(longer, context, device, biased=biased)

        # the j-th of the rows that a cache holds is row `steps - held + j` of its episode
        which = torch.repeat_interleave(held)
        j = torch.arange(len(which)) - (held.cumsum(0) - held)[which]
        cached = begins[runs][which] + j
        slot = (steps - held)[which].add(j) % slots
        own = torch.ones(rows, dtype=torch.bool).index_fill_(0, cached, False).nonzero().squeeze(1)
        # the first row of a longer run is the first one that its cache still holds
        lost = (self.total - self.known)[longer.cumsum(0) - 1]
        #: Position of each row in its episode, int64 ``[N]`` on the rows' device.
        self.position = upload((steps_into_run(longer) + lost)[own], device)
        self.which, self.slot, self.cached, self.own = (
            upload(index, device) for index in (which, slot, cached, own)
        )
        self.cache = cache
        self._heads: list[Tensor] = []  # of each layer, with the rows of caches

    def attend(self, layer: int, heads: Tensor, bias: Tensor | None) -> Tensor:
        """See `Attention`."""
        held = self.cache[self.which, layer, :, :, self.slot].to(
            heads.dtype
        )  # [rows of caches, 2, heads, size]
        longer = heads.new_zeros(len(held) + len(heads), *heads.shape[1:])
        longer[self.cached, 1:] = held
        longer = longer.index_copy(0, self.own, heads)
        self._heads.append(longer.detach())
        return self.runs.attend(layer, longer, bias).index_select(0, self.own)

    def cache_after(self, runs: Tensor, slots: int) -> Tensor:
        """Return the cache after the last rows of runs (int64 ``[M]``), ``[M, layers, 2, heads, slots, size]``."""
        total = self.total[runs, None]
        # how many rows before the end of the run the row of each slot is
        before_end = (total - 1 - torch.arange(slots)) % slots + 1
        row = self.ends[runs, None] - before_end
        empty = upload(before_end > self.known[runs, None], self.cache.device)
        row = upload(row.clamp_(min=0), self.cache.device)

        layers = []
        for heads in self._heads:
            kept = heads[:, 1:][row]  # [M, slots, 2, heads, size]
            kept = kept.masked_fill(empty[:, :, None, None, None], 0)
            layers.append(kept.permute(0, 2, 3, 1, 4))
        return torch.stack(layers, 1).to(self.cache.dtype)


class MaskedRuns:
    """The same with one mask ``[N, N]``: no shape depends on where runs begin, as ``torch.compile`` wants it.

    Args:
        starts: bool ``[N]`` on the rows' device.
        context: see `GroupedRuns`.
    """

    def __init__(self, starts: Tensor, context: int | None) -> None:
        run = starts.cumsum(0)
        at = torch.arange(len(starts), device=starts.device)
        distance = at[:, None] - at
        visible = (run[:, None] == run) & (distance >= 0)
        if context is not None:
            visible &= distance < context
        self.window = Window(visible, distance)

    def attend(self, layer: int, heads: Tensor, bias: Tensor | None) -> Tensor:
        """See `Attention`."""
        query, key, value = heads.transpose(0, 2).unsqueeze(0).unbind(2)  # each [1, heads, N, size]
        out = attend_within(query, key, value, self.window, bias)
        return out.squeeze(0).transpose(0, 1).flatten(1)


def attention_over_runs(
    starts: Tensor, context: int | None, device: torch.device, *, biased: bool
) -> Attention:
    """Return how the rows of a flat batch attend; ``starts`` on a device are waited for, except under compilation."""
    if torch.compiler.is_compiling() or is_tracing():
        return MaskedRuns(starts.to(device), context)
    return GroupedRuns(starts.cpu(), context, device, biased=biased)


def attend_within(
    query: Tensor, key: Tensor, value: Tensor, window: Window | None, bias: Tensor | None
) -> Tensor:
    """Attend with queries ``[B, heads, T, size]`` to keys and values ``[B, heads, K, size]`` in the window."""
    if window is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    if bias is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=window.visible)

    # a distance outside of the window is any number, and is not used
    known = bias[:, window.distance.clamp(0, bias.shape[-1] - 1)].to(query.dtype)
    scores = torch.where(window.visible, known, -torch.inf)
    return scaled_dot_product_attention(query, key, value, attn_mask=scores)


def _lay_out(starts: Tensor, moves: Tensor, size: int, device: torch.device) -> Places:
    """Return the places of rows among ``size``; those of a run are ``moves`` (int64 ``[runs]``) behind its rows."""
    at = torch.arange(len(starts))
    place = at + moves[starts.cumsum(0) - 1]
    source = torch.zeros(size, dtype=torch.int64).index_copy_(0, place, at)
    padding = torch.ones(size, dtype=torch.bool).index_fill_(0, place, False).nonzero().squeeze(1)
    return Places(*(upload(index, device) for index in (source, place, padding)))


def _find_tile(starts: Tensor, lengths: Tensor) -> int | None:
    """Return a length of tiles that no run crosses, of one run each or of few rows; None if there is none.

    Such are slices of one length, whose rows need no other place.

    >>> starts = torch.tensor([1, 0, 1, 0, 1, 0, 0, 0]).bool()
    >>> _find_tile(starts, torch.tensor([4, 2, 2]))
    4
    """
    rows = len(starts)
    longest = int(lengths[0])
    if int(lengths[-1]) == longest:
        return longest
    for tile in range(longest, min(2 * longest, LARGEST_TILE) + 1):
        if rows % tile == 0 and bool(starts[::tile].all()):
            return tile
    return None


def _similar(lengths: Tensor) -> list[tuple[int, int]]:
    """Divide runs, by descending length, into parts of similar ones: the runs in each and its longest length.

    >>> _similar(torch.tensor([20, 17, 16, 15, 3, 2]))
    [(3, 20), (1, 15), (2, 3)]
    """
    parts: list[tuple[int, int]] = []
    values, counts = lengths.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]  # torch leaves it so
    longest = 0
    least = 0.0
    for length, runs in zip(values.tolist(), counts.tolist(), strict=True):
        if parts and length >= least:
            parts[-1] = (parts[-1][0] + runs, longest)
            continue
        longest = length
        least = min(longest * NEAREST, longest - FEW_ROWS)
        parts.append((runs, longest))
    return parts


def _window(queries: int, keys: int, context: int, device: torch.device) -> Window:
    """Return the window of queries that are the last of the keys' rows."""
    at = torch.arange(keys, device=device)
    distance = at[keys - queries :, None] - at
    return Window((distance >= 0) & (distance < context), distance)


def _window_of_tiles(starts: Tensor, tile: int, context: int, device: torch.device) -> Window:
    """Return the windows of tiles of rows, each of one or several runs."""
    window = _window(tile, tile, context, device)
    run = upload(starts.cumsum(0), device).view(-1, tile)
    same = run[:, :, None] == run[:, None]
    return Window((window.visible & same).unsqueeze(1), window.distance)


def _window_of_blocks(firsts: Tensor, block: int, context: int, device: torch.device) -> Window:
    """Return the windows of blocks with the keys of the block before; ``firsts`` marks blocks that have none."""
    window = _window(block, 2 * block, context, device)
    own = torch.arange(2 * block, device=device) >= block
    known = own | ~upload(firsts, device)[:, None, None, None]
    return Window(window.visible & known, window.distance)


def _with_block_before(rows: Tensor) -> Tensor:
    """Put the rows of the piece before in front of those of each piece: ``[B, heads, T, size]`` -> 2 T rows."""
    before = pad(rows[:-1], (0, 0, 0, 0, 0, 0, 1, 0))
    return torch.cat([before, rows], 2)


class _Pad(torch.autograd.Function):
    """Lays rows ``[N, F]`` out at their places ``[M, F]``, with zeros elsewhere.

    It and `_Unpad` are the gradient of each other, and both copy whole rows: autograd would add them up one by one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, source: Tensor, place: Tensor, padding: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Lay the rows out."""
        return rows.index_select(0, source).index_fill_(0, padding, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the places."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Take the rows back."""
        taken = _Unpad.apply(grads[0], *ctx.saved_tensors)  # type: ignore[no-untyped-call]  # torch leaves it so
        return taken, None, None, None


class _Unpad(torch.autograd.Function):
    """Takes rows ``[N, F]`` from their places ``[M, F]``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(padded: Tensor, source: Tensor, place: Tensor, padding: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the rows."""
        return padded.index_select(0, place)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the places."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Lay them out again."""
        laid_out = _Pad.apply(grads[0], *ctx.saved_tensors)  # type: ignore[no-untyped-call]  # torch leaves it so
        return laid_out, None, None, None


class CachedSteps:
    """Attention of one step of E envs to the keys and values of their episodes' last steps.

    A step's row is written to the slot of its number in the episode, modulo the number of slots P. Slots of the
    episode before are hidden until they are written.

    Args:
        cache: ``[E, layers, 2, heads, P, size]``, keys and values, written in place where no gradient is wanted and
            nothing is exported.
        steps: int64 ``[E]``, rows of the episode before this one.
    """

    def __init__(self, cache: Tensor, steps: Tensor) -> None:
        self._cache = cache
        self._steps = steps
        self._layers: list[Tensor] | None = None  # where nothing is written in place: the slots of each layer

    @property
    def cache(self) -> Tensor:
        """The cache with this step's rows."""
        if self._layers is not None:
            return torch.stack(self._layers, 1)
        return self._cache

    def attend(self, layer: int, heads: Tensor, bias: Tensor | None) -> Tensor:
        """See `Attention`."""
        if self._fits_loop(heads, bias):
            return self._attend_by_loop(layer, heads, bias)

        heads_of_row = heads.to(self._cache.dtype)
        slots = self._with_row(layer, heads_of_row[:, 1:].unsqueeze(3))
        visible, distance = self._window
        # Slots of the episode before may hold NaN, which a weight of 0 would let through.
        slots = torch.where(visible.unsqueeze(-1), slots, 0.0)
        key, value = slots.unbind(1)
        if bias is None:
            scores = visible
        else:
            # [heads, E, 1, P] -> [E, heads, 1, P]
            known = bias[:, distance].transpose(0, 1).to(key.dtype)
            scores = torch.where(visible, known, -torch.inf)
        query = heads_of_row[:, 0].unsqueeze(2)
        out = scaled_dot_product_attention(query, key, value, attn_mask=scores)
        return out.flatten(1)

    @functools.cached_property
    def _window(self) -> Window:
        steps = self._steps[:, None]
        slots = self._cache.shape[-2]
        at = torch.arange(slots, device=steps.device)
        return Window((at <= steps)[:, None, None], ((steps - at) % slots)[:, None])

    def _with_row(self, layer: int, row: Tensor) -> Tensor:
        """Return the slots of a layer ``[E, 2, heads, P, size]`` with the step's row ``[E, 2, heads, 1, size]``."""
        slots = self._cache[:, layer]
        slot = self._steps % slots.shape[3]
        slot = slot[:, None, None, None, None].expand_as(row)
        wants_gradient = torch.is_grad_enabled() and (row.requires_grad or slots.requires_grad)
        # a traced graph leaves its inputs alone
        if not wants_gradient and not is_tracing():
            return slots.scatter_(3, slot, row)

        if self._layers is None:
            self._layers = list(self._cache.unbind(1))
        self._layers[layer] = slots.scatter(3, slot, row)
        return self._layers[layer]

    def _fits_loop(self, heads: Tensor, bias: Tensor | None) -> bool:
        """Whether the loop can read the values, and no gradient is wanted."""
        if torch.is_grad_enabled() or is_tracing() or self._cache.dtype not in (torch.float32, torch.float64):
            return False
        tensors = [self._cache, heads]
        if bias is not None:
            tensors.append(bias)
        return all(x.is_cpu and x.dtype is heads.dtype and x.is_contiguous() for x in tensors)

    def _attend_by_loop(self, layer: int, heads: Tensor, bias: Tensor | None) -> Tensor:
        """Attend with the loop of `flatroll.kernels.attention`."""
        envs, _, count, size = heads.shape
        if bias is None:
            bias = heads.new_empty(count, 0)
        rows, cache, known = (x.detach().numpy() for x in (heads, self._cache, bias))
        out = heads.new_empty(envs, count, size)

        step = machine_code(step_loop, sums_in_any_order=True)
        step(rows, self._steps.numpy(), known, layer, cache, out.numpy())
        return out.flatten(1)
