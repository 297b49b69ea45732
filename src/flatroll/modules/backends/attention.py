"""Causal attention over the runs of a flat batch: runs of similar length go together, with little padding.

Runs are sorted by length and cut into parts whose runs are within a quarter of one another. Within a part each run is
padded behind its last row, so a causal call needs no mask. Where only the last ``context`` rows are visible, long runs
are cut into blocks of that many rows: a row sees its block and the one before. So work grows with rows times the
smaller of run length and ``context``. Slices of one length need no other place than they have.
"""

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from flatroll.kernels.scan import is_tracing
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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Return what each of N rows gathers from the rows that it sees, ``[N, heads * size]``.

        Args:
            layer: number of the layer.
            query, key, value: of each row, ``[N, heads, size]``.
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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """See `Attention`."""
        heads = value.shape[1:]
        inputs = [self._by_part(rows.flatten(1)) for rows in (query, key, value)]

        gathered: list[Tensor] = []
        for part, *rows in zip(self.parts, *inputs, strict=True):
            if part.length == 1:
                gathered.append(rows[2])
                continue

            # [pieces * length, heads * size] -> [pieces, heads, length, size]
            shape = (part.pieces, part.length, *heads)
            query, key, value = (one.view(shape).transpose(1, 2) for one in rows)
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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """See `Attention`."""
        # [N, heads, size] -> [1, heads, N, size]
        query, key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
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
        slots = cache.shape[-2]
        at = torch.arange(slots, device=cache.device)
        slot = steps[:, None] % slots
        self.window = Window(
            (at <= steps[:, None])[:, None, None],
            ((slot - at) % slots)[:, None],
        )
        self._slot = slot[:, :, None, None, None].expand(-1, 2, cache.shape[3], 1, cache.shape[-1])
        self._cache = cache
        self._layers = list(cache.unbind(1))
        self._is_new = False

    @property
    def cache(self) -> Tensor:
        """The cache with this step's rows."""
        if self._is_new:
            return torch.stack(self._layers, 1)
        return self._cache

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """See `Attention`."""
        slots = self._layers[layer]
        query = query.unsqueeze(2)
        row = torch.stack([key, value.to(key.dtype)], 1).unsqueeze(3)  # [E, 2, heads, 1, size]
        row = row.to(slots.dtype)

        wants_gradient = torch.is_grad_enabled() and (row.requires_grad or slots.requires_grad)
        # an exported graph leaves its inputs alone
        if wants_gradient or torch.compiler.is_exporting():
            slots = slots.scatter(3, self._slot, row)
            self._layers[layer] = slots
            self._is_new = True
        else:
            slots.scatter_(3, self._slot, row)

        key, value = slots.unbind(1)
        visible, distance = self.window
        if bias is None:
            scores = visible
        else:
            # [heads, E, 1, P] -> [E, heads, 1, P]
            known = bias[:, distance].transpose(0, 1).to(query.dtype)
            scores = torch.where(visible, known, -torch.inf)
        out = scaled_dot_product_attention(query, key, value, attn_mask=scores)
        return out.flatten(1)
