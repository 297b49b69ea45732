"""Plans of passes over texts: which texts share a row, which share their prompt, and what a plan costs."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

#: Rows of several texts are at most this long where attention costs the square of a row's length.
ROW_LENGTHS = (128, 256)
#: Rows of one batch differ in length by at most this factor.
TOLERANCE = 1.25
#: Entries of the masks of one batch: kernels copy a mask as floats.
MASK_ENTRIES = 2**25
#: Prompts are run once for at most so many answers in one row, besides for all of them.
ANSWERS = (16, 8, 4, 2)
#: What a configuration of a model has, at least one of them.
CONFIGURED = (
    "get_text_config",
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
    "layer_types",
    "_attn_implementation",
)


class Texts(NamedTuple):
    """Texts as stretches of one column of tokens: a prompt, which several may share, and what follows it.

    Args:
        tokens: int64 ``[M]``.
        head: int64 ``[K]``, where the prompt begins in ``tokens``.
        shared: int64 ``[K]``, tokens of the prompt.
        start: int64 ``[K]``, where the tokens behind the prompt begin.
    """

    tokens: Tensor
    head: Tensor
    shared: Tensor
    start: Tensor


class Wanted(NamedTuple):
    """Texts on the host: where they are, and what a pass has to give. Lists ``[K]``.

    Args:
        head: where the prompt begins in the tokens.
        shared: tokens of the prompt.
        start: where the tokens behind it begin.
        first: the fewest tokens after which an output is wanted.
        length: the most tokens after which one is; a pass reads as many.
    """

    head: list[int]
    shared: list[int]
    start: list[int]
    first: list[int]
    length: list[int]


class Unit(NamedTuple):
    """Texts that are run together: one text, or a prompt of ``prompt`` tokens and several texts that begin with it."""

    size: int
    prompt: int
    texts: list[int]


class Batch(NamedTuple):
    """Rows of one call of the model, each of one unit or of several, padded on the right to ``width``."""

    rows: list[list[Unit]]
    width: int

    @property
    def plain(self) -> bool:
        """Whether each row is one text."""
        return all(len(row) == 1 and len(row[0].texts) == 1 for row in self.rows)

    @property
    def trees(self) -> bool:
        """Whether some texts share their prompt."""
        return any(len(unit.texts) > 1 for row in self.rows for unit in row)


class Layout(NamedTuple):
    """Where the tokens of a batch's texts are.

    Args:
        text: the texts of the batch ``[k]``.
        row: row of each.
        head: column where its prompt begins, or the text where it has the prompt for itself.
        own: column where what is behind a shared prompt begins.
        shared: tokens of the shared prompt; 0 where the text has it for itself.
        kept: bool ``[R, width]``, where outputs are wanted; in rows of one text, the same columns in each.
    """

    text: list[int]
    row: list[int]
    head: list[int]
    own: list[int]
    shared: list[int]
    kept: NDArray[np.bool_]


class Costs(NamedTuple):
    """What a pass costs, in multiplications of one layer, measured on a CPU.

    Args:
        token: of a token, without attention.
        pair: of a token that looks at one other.
        output: of an output at one position.
        call: of calling the model.
    """

    token: float
    pair: float
    output: float
    call: float

    @classmethod
    def of(cls, model: Any, outputs: int, keeps: bool) -> "Costs":
        """Costs of a model by its configuration.

        Args:
            model: of transformers, or a wrapper of one.
            outputs: numbers that it gives at a position, F.
            keeps: whether it can leave out positions of its output.
        """
        config = configuration(model)
        hidden = size_of(config, "hidden_size", 512)
        layers = size_of(config, "num_hidden_layers", 2)

        token = 12.0 * hidden**2 + 600.0 * hidden
        output = outputs * (hidden + 100.0) / layers
        if not keeps:
            token += output
            output = 0.0
        return cls(token, 1.1 * hidden, output, 7e6)

    def of_batch(self, batch: Batch, wanted: Wanted) -> float:
        """Cost of one batch."""
        rows = len(batch.rows)
        positions = rows * batch.width
        pairs = positions * batch.width
        if batch.plain and all(row[0].size == batch.width for row in batch.rows):
            pairs //= 2  # causal attention without a mask

        outputs = int(lay_out(batch, wanted).kept.sum())
        return positions * self.token + pairs * self.pair + outputs * self.output + self.call

    def of_tree(self, prompt: int, own: Sequence[int]) -> float:
        """Cost of a prompt and several texts behind it as one row."""
        size = prompt + sum(own)
        if len(own) == 1:
            return size * self.token + size**2 / 2 * self.pair
        return size * self.token + size**2 * self.pair


def plan(
    wanted: Wanted, costs: Costs, *, trees: bool, packs: bool, row_length: int | None = None
) -> list[Batch]:
    """Lay texts into batches so that a pass costs least.

    Args:
        wanted: the texts.
        costs: of the model.
        trees: whether prompts may be run once.
        packs: whether texts may share a row.
        row_length: tokens up to which texts share a row; 0 for a row for each text, with its prompt. Default: what
            costs least.
    """
    if row_length == 0:
        trees = False
        packs = False
    units = [Unit(length, 0, [text]) for text, length in enumerate(wanted.length)]
    alike = min(wanted.length) * TOLERANCE >= max(wanted.length)
    if trees:
        units = share_prompts(wanted, costs)

    if row_length is not None:
        if any(len(unit.texts) > 1 for unit in units):
            row_length = min(row_length, isqrt(MASK_ENTRIES))
        return into_batches(into_rows(units, row_length if packs else 0), TOLERANCE)

    padded = pad(units)
    if alike and len(units) == len(wanted.length):
        return padded

    rows = [into_rows(units, length) for length in (0, *ROW_LENGTHS) if packs or not length]
    candidates = [padded, *(into_batches(some, TOLERANCE) for some in rows)]
    return min(candidates, key=lambda batches: sum(costs.of_batch(batch, wanted) for batch in batches))


def share_prompts(wanted: Wanted, costs: Costs) -> list[Unit]:
    """Units in which the prompt of several texts is run once, wherever that costs less."""
    units = []
    order = sorted(range(len(wanted.length)), key=lambda text: (wanted.head[text], wanted.length[text]))
    for _, group in groupby(order, key=lambda text: wanted.head[text]):
        texts = list(group)
        prompt = min(wanted.shared[texts[0]], wanted.length[texts[-1]])
        own = [max(wanted.length[text] - prompt, 0) for text in texts]

        best = 1
        if prompt and len(texts) > 1:
            sizes = [len(texts), *(size for size in ANSWERS if size < len(texts))]
            widest = isqrt(MASK_ENTRIES)
            narrow = [
                size
                for size in sizes
                if all(prompt + sum(own[part]) <= widest for part in _parts(len(own), size))
            ]
            best = min(
                [*narrow, 1],
                key=lambda size: sum(costs.of_tree(prompt, own[part]) for part in _parts(len(own), size)),
            )

        for part in _parts(len(texts), best):
            some = texts[part]
            if len(some) == 1:
                units.append(Unit(wanted.length[some[0]], 0, some))
            else:
                units.append(Unit(prompt + sum(own[part]), prompt, some))
    return units


def pad(units: list[Unit]) -> list[Batch]:
    """Put units into one batch of a row for each, or into several where their masks would be too large."""
    whole = Batch([[unit] for unit in units], max(unit.size for unit in units))
    if whole.plain:
        return [whole]

    rows = sorted(whole.rows, key=lambda row: -row[0].size)
    most = max(MASK_ENTRIES // whole.width**2, 1)
    parts = [rows[first : first + most] for first in range(0, len(rows), most)]
    return [Batch(part, part[0][0].size) for part in parts]


def into_rows(units: list[Unit], row_length: int) -> list[list[Unit]]:
    """Put units into rows of at most ``row_length`` tokens, or of one unit where that is longer."""
    rows: list[list[Unit]] = []
    free: list[tuple[int, int]] = []  # sorted: tokens that still fit into a row, and the row
    for unit in sorted(units, key=lambda unit: -unit.size):
        best = bisect_left(free, (unit.size, -1))
        if best < len(free):
            left, row = free.pop(best)
            rows[row].append(unit)
        else:
            left = row_length
            row = len(rows)
            rows.append([unit])
        if left > unit.size:
            insort(free, (left - unit.size, row))
    return rows


def into_batches(rows: list[list[Unit]], tolerance: float) -> list[Batch]:
    """Put rows of about the same length into one batch; rows of one text apart from those that need a mask."""
    batches = []
    for plain in (True, False):
        kind = [row for row in rows if (len(row) == 1 and len(row[0].texts) == 1) == plain]
        widths = sorted(((sum(unit.size for unit in row), row) for row in kind), key=lambda pair: -pair[0])
        some: list[list[Unit]] = []
        widest = 0
        for width, row in widths:
            full = not plain and (len(some) + 1) * widest**2 > MASK_ENTRIES
            if some and (full or width * tolerance < widest):
                batches.append(Batch(some, widest))
                some = []
            if not some:
                widest = width
            some.append(row)
        if some:
            batches.append(Batch(some, widest))
    return batches


def lay_out(batch: Batch, wanted: Wanted) -> Layout:
    """Find the columns of a batch's texts."""
    kept = np.zeros((len(batch.rows), batch.width), dtype=np.bool_)
    layout = Layout([], [], [], [], [], kept)
    for row, units in enumerate(batch.rows):
        column = 0
        for unit in units:
            own = column + unit.prompt
            for text in unit.texts:
                layout.text.append(text)
                layout.row.append(row)
                layout.head.append(column)
                layout.own.append(own)
                layout.shared.append(unit.prompt)

                # An output after n tokens is that of token n - 1.
                token = wanted.first[text] - 1
                length = wanted.length[text]
                behind = max(length - unit.prompt, 0)
                kept[row, column + token : column + min(unit.prompt, length)] = True
                kept[row, own + max(token - unit.prompt, 0) : own + behind] = True
                own += behind
            column += unit.size

    if batch.plain:
        kept[:, min(wanted.first[text] for text in layout.text) - 1 :] = True
    return layout


class Columns(NamedTuple):
    """What fills the rows of a batch, int64 ``[R, W]`` each.

    Args:
        token: place in the column of all tokens; 0 at padding.
        position: position in the text; 0 at padding, which makes each a text of its own.
        segment: number of the stretch within the row, from 1; 0 at padding.
        before: number of the stretch with the prompt; its own number where the text is alone.
    """

    token: NDArray[np.int64]
    position: NDArray[np.int64]
    segment: NDArray[np.int64]
    before: NDArray[np.int64]


def fill(batch: Batch, wanted: Wanted) -> Columns:
    """Columns of a batch."""
    shape = (len(batch.rows), batch.width)
    columns = Columns(*(np.zeros(shape, dtype=np.int64) for _ in Columns._fields))
    counting = np.arange(batch.width)
    for row, units in enumerate(batch.rows):
        column = 0
        segment = 0
        for unit in units:
            prompt = segment + 1
            for place, count, position, number in _stretches(unit, wanted):
                segment = prompt + number
                stretch = (row, slice(column, column + count))
                columns.token[stretch] = counting[:count] + place
                columns.position[stretch] = counting[:count] + position
                columns.segment[stretch] = segment
                columns.before[stretch] = prompt
                column += count
    return columns


def _stretches(unit: Unit, wanted: Wanted) -> Iterator[tuple[int, int, int, int]]:
    """Stretches of a unit: place in the tokens, how many, the first one's position, and number of the segment."""
    alone = len(unit.texts) == 1
    first = unit.texts[0]
    prompt = unit.prompt
    if alone:
        prompt = min(wanted.shared[first], wanted.length[first])

    yield wanted.head[first], prompt, 0, 0
    for number, text in enumerate(unit.texts):
        segment = 0 if alone else number + 1
        yield wanted.start[text], max(wanted.length[text] - prompt, 0), prompt, segment


def _parts(count: int, most: int) -> list[slice]:
    """Cut ``count`` things into parts of at most ``most``, as equal as can be."""
    parts = -(-count // most)
    bounds = [count * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def configuration(model: Any) -> Any:
    """What configures a model's reading of texts, also where a wrapper has the model; None if nothing does."""
    modules: Iterable[Any] = [model]
    if isinstance(model, nn.Module):
        modules = model.modules()
    for module in modules:
        config = getattr(module, "config", None)
        if any(hasattr(config, name) for name in CONFIGURED):
            return _of_texts(config)
    return None


def _of_texts(config: Any) -> Any:
    """The part of a configuration that is about texts: one of texts and images has it nested."""
    find = getattr(config, "get_text_config", None)
    if find is None:
        return config
    try:
        return find()
    except ValueError:  # of several parts none is the one
        return config


def size_of(config: Any, name: str, default: int) -> int:
    """A number of a configuration, or ``default`` where it has none."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else default
