"""Passes of a language model over texts: packed where its attention keeps them apart, padded where not."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from math import isfinite
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatroll.text.packing import (
    Batch,
    Costs,
    Layout,
    Texts,
    Unit,
    Wanted,
    configuration,
    fill,
    lay_out,
    plan,
    size_of,
)

#: What a model may raise at inputs that it does not take.
REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError)

#: Kinds of layers that look at other tokens by attention alone.
ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
#: Logits beyond it are of tokens that a model never draws.
LARGEST_LOGIT = 1e4


class Form(NamedTuple):
    """How a model is told that texts share a row.

    Args:
        mask: how it learns what a token sees: by nothing but positions that begin anew, by a bool mask
            ``[R, 1, W, W]``, or by one of numbers that are added.
        exact: whether it computes outputs at wanted tokens alone.
    """

    mask: Literal["positions", "bool", "added"]
    exact: bool


class Passes:
    """Runs a model over texts, each token of them once.

    Texts share the rows of a pass, and answers to one prompt share the prompt. Whether the model keeps texts apart is
    found out at the first pass that needs it: outputs of packed rows are compared with those of each text alone. Where
    they differ, texts get rows of their own, padded on the right, and a warning names the model. Weights change, so the
    model is asked again whenever the number of passes has doubled.

    Args:
        model: a model of transformers.
        row_length: tokens up to which texts share a row; 0 for none, and for prompts that are run for each answer.
            Default: what costs least; one row for all where attention takes cumulative lengths.
    """

    def __init__(self, model: nn.Module, row_length: int | None = None) -> None:
        self.model = model
        self.row_length = row_length
        self._accepted = frozenset(signature(model.forward).parameters)
        self._config = configuration(model)
        self._most = size_of(self._config, "max_position_embeddings", 0)  # 0: it does not say
        self._outputs = size_of(self._config, "vocab_size", 1)
        # By form, and by whether rows are longer than the model's positions; None where a comparison could not tell.
        self._verdicts: dict[tuple[Form, bool], bool | None] = {}
        # The pass from which on each of them is asked for again.
        self._due: dict[tuple[Form, bool], int] = {}
        self._count = 0
        self._warned = False

    def outputs(
        self,
        texts: Texts,
        text: Tensor,
        length: Tensor,
        read: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """The model's outputs after some of the tokens of texts, ``[N, F]``.

        Args:
            texts: K texts.
            text: int64 ``[N]``, index of a text.
            length: int64 ``[N]``, how many of its tokens are read, at least one.
            read: called with outputs ``[n, F]`` and their indices among the N; its results ``[n, ...]`` are returned in
                place of outputs. Default: outputs are.

        Raises:
            ValueError: a text is longer than the model's positions, or ``row_length`` is set though its attention takes
                cumulative lengths.
        """
        if not len(text):
            return self._of_nothing(text, read)
        self._count += 1
        wanted = _wanted(texts, text, length)
        self._check_lengths(wanted)
        batches = self._plan(wanted, texts)
        layouts = [lay_out(batch, wanted) for batch in batches]
        shares = _shares(layouts, text, len(texts.head))

        parts = []
        index = torch.empty_like(text)  # of each row's result among those of all batches
        before = 0
        for batch, layout, share in zip(batches, layouts, shares, strict=True):
            output = self._run(batch, layout, self._form(batch, wanted, texts.tokens), wanted, texts.tokens)
            places = _places(layout, len(texts.head), text[share], length[share])
            if read is not None:
                output = read(output.index_select(0, places.to(output.device)), share)
                places = torch.arange(len(share), device=text.device)
            parts.append(output)
            index[share] = places + before
            before += len(output)

        if len(parts) == 1:
            result = parts[0]
        else:
            result = torch.cat(parts)
        return result.index_select(0, index.to(result.device))

    def _of_nothing(self, text: Tensor, read: Callable[[Tensor, Tensor], Tensor] | None) -> Tensor:
        """Outputs ``[0, F]``."""
        one = text.new_zeros(1, 1)
        output: Tensor = self.model(input_ids=one, attention_mask=torch.ones_like(one)).logits[0, :0]
        return output if read is None else read(output, text)

    def _plan(self, wanted: Wanted, texts: Texts) -> list[Batch]:
        """The batches that cost least of those that the model runs rightly."""
        row_length = self.row_length
        trees = not self._has_windows
        packs = True
        if self._takes_cumulative_lengths:
            trees = False  # its kernels take no mask of single tokens
            if row_length:
                raise ValueError(
                    f"row_length={row_length}, but the attention of {type(self.model).__name__} takes cumulative "
                    "lengths, which keeps texts apart in one row for all: leave row_length out, or pass 0"
                )
            if row_length is None:
                row_length = sum(wanted.length)

        costs = Costs.of(self.model, self._outputs, "logits_to_keep" in self._accepted)
        while True:
            batches = plan(wanted, costs, trees=trees, packs=packs, row_length=row_length)
            packed = [batch for batch in batches if not batch.plain]
            wrong = [batch for batch in packed if self._form(batch, wanted, texts.tokens) is None]
            if not wrong:
                return batches
            if any(batch.trees for batch in wrong):
                trees = False
            else:
                packs = False

    def _form(self, batch: Batch, wanted: Wanted, tokens: Tensor) -> Form | None:
        """The first form in which the model runs a batch rightly; None if there is none, or no need of one."""
        if batch.plain:
            return None

        others = sorted(self._kinds - ATTENTION)
        if others:
            self._warn(
                f"has layers that are no attention ({', '.join(others)}), which may mix the texts of a packed pass"
            )
            return None

        masks: list[Literal["positions", "bool", "added"]] = []
        if not batch.trees:
            masks.append("positions")
        if not self._has_windows and self._device.type == "cpu":
            masks.extend(("added", "bool"))  # each layer would make numbers of a bool mask
        elif not self._has_windows:
            masks.extend(("bool", "added"))  # a quarter of the memory
        exact = [True, False] if "logits_to_keep" in self._accepted else [False]

        wide = 0 < self._most < batch.width
        for form in (Form(mask, keeps) for mask in masks for keeps in exact):
            verdict = self._verdict(form, wide, batch, wanted, tokens)
            if verdict:
                return form
            if verdict is None:
                # To be asked again at a later pass, when the model may have learned to look back.
                return None

        self._warn(
            "does not keep the texts of a packed pass apart: its outputs differ from those of each text alone, or it "
            "takes no position_ids and attention masks [R, 1, W, W]"
        )
        return None

    def _verdict(self, form: Form, wide: bool, batch: Batch, wanted: Wanted, tokens: Tensor) -> bool | None:
        """Whether the model runs batches in a form rightly; None if it cannot be told yet."""
        key = form, wide
        verdict = self._verdicts.get(key)
        if verdict is False or self._count < self._due.get(key, 0):
            return verdict

        self._due[key] = 2 * self._count
        if verdict is None:
            verdict = self._compare(form, wide, tokens)
        if verdict:
            verdict = self._confirm(form, batch, wanted, tokens)
        self._verdicts[key] = verdict
        return verdict

    def _warn(self, fault: str) -> None:
        """Say once why texts are padded."""
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{type(self.model).__name__} {fault}. Its texts are padded, and prompts are run once for each answer",
            stacklevel=2,
        )

    def _compare(self, form: Form, wide: bool, tokens: Tensor) -> bool | None:
        """Whether packed texts have the outputs of each text alone; None if texts before them would change little."""
        most = self._most
        if 0 < most < 7:
            return False
        known = size_of(self._config, "vocab_size", int(tokens.max()) + 1)
        # A prompt of 4 tokens with answers of 3 and 2; texts of 7, 4 and 6 tokens, the last like the third but for
        # its beginning.
        head = [0, 0, 9, 16, 20]
        shared = [4, 4, 0, 0, 0]
        start = [4, 7, 9, 16, 20]
        length = [7, 6, 7, 4, 7]
        count = 27
        if wide:
            # A stretch that makes the row longer than the model's positions.
            head.append(count)
            shared.append(0)
            start.append(count)
            length.append(most)
            count += most
        drawn = torch.randint(known, (count,), generator=torch.Generator().manual_seed(0))
        drawn[23:27] = drawn[12:16]
        drawn = drawn.to(tokens.device)
        wanted = Wanted(head, shared, start, [1] * len(length), length)

        def alone(text: int) -> Unit:
            return Unit(length[text], 0, [text])

        row = [alone(1), alone(2)]
        if form.mask != "positions":
            row = [Unit(sum(length[:2]) - 4, 4, [0, 1]), alone(2)]
        if wide:
            row.insert(0, alone(5))
        rows = [row, [alone(3), alone(4)]]
        if self._takes_cumulative_lengths:
            rows = [rows[0] + rows[1]]
        packed = Batch(rows, max(sum(unit.size for unit in some) for some in rows))
        texts = [text for some in rows for unit in some for text in unit.texts if text < 5]

        with torch.no_grad(), evaluating(self.model):
            own = [self._alone(text, wanted, drawn) for text in range(5)]
            found = self._packed(packed, texts, form, wanted, drawn)
            if found is None:
                return False
            expected = [own[text] for text in texts]
            rounding = self._rounding(expected, texts, wanted, drawn)
        return agree(torch.cat(found), torch.cat(expected), own[4][-1] - own[2][-1], rounding)

    def _confirm(self, form: Form, batch: Batch, wanted: Wanted, tokens: Tensor) -> bool:
        """Whether some texts of a batch have the outputs that each has in a pass of its own."""
        rows, texts = _some(batch, wanted)
        packed = Batch(rows, max(sum(unit.size for unit in row) for row in rows))
        with torch.no_grad(), evaluating(self.model):
            found = self._packed(packed, texts, form, wanted, tokens)
            if found is None:
                return False
            expected = [self._alone(text, wanted, tokens) for text in texts]
            rounding = self._rounding(expected, texts, wanted, tokens)
        return all(is_close(*pair, rounding) for pair in zip(found, expected, strict=True))

    def _packed(
        self, batch: Batch, texts: list[int], form: Form, wanted: Wanted, tokens: Tensor
    ) -> list[Tensor] | None:
        """Wanted outputs of some texts of a batch, ``[n, F]`` each; None if the model refuses the form."""
        try:
            return self._outputs_of(batch, texts, form, wanted, tokens)
        except torch.OutOfMemoryError:
            raise
        except REFUSALS:
            return None

    def _outputs_of(
        self, batch: Batch, texts: list[int], form: Form | None, wanted: Wanted, tokens: Tensor
    ) -> list[Tensor]:
        """Wanted outputs of some texts of a batch, ``[n, F]`` each."""
        layout = lay_out(batch, wanted)
        output = self._run(batch, layout, form, wanted, tokens)
        found = []
        for text in texts:
            length = torch.arange(wanted.first[text], wanted.length[text] + 1)
            index = _places(layout, len(wanted.head), torch.full_like(length, text), length)
            found.append(output[index.to(output.device)])
        return found

    def _alone(self, text: int, wanted: Wanted, tokens: Tensor) -> Tensor:
        """Wanted outputs ``[n, F]`` of a text in a pass of its own."""
        batch = Batch([[Unit(wanted.length[text], 0, [text])]], wanted.length[text])
        return self._run(batch, lay_out(batch, wanted), None, wanted, tokens)

    def _rounding(self, expected: list[Tensor], texts: list[int], wanted: Wanted, tokens: Tensor) -> float:
        """How far outputs of texts may be off by rounding, which deep models with large weights make larger.

        A padded batch of the texts, which keeps them apart, shows how much this model does. It is wider than they are,
        as without padding it could run as a pass of each text does.
        """
        longest = max(wanted.length[text] for text in texts)
        width = min(longest + longest // 8 + 1, max(self._most, longest))
        rows = [[Unit(wanted.length[text], 0, [text])] for text in texts]
        padded = Batch(rows, width)
        found = self._outputs_of(padded, texts, None, wanted, tokens)
        shown = max(_apart(*pair) for pair in zip(found, expected, strict=True))
        least = max(rounding_of(output, self._unit(output)) for output in expected)
        if not isfinite(shown):
            return least
        return max(least, min(8 * shown, 100 * least))

    def _unit(self, outputs: Tensor) -> float:
        """Relative size of a rounding error in the coarsest numbers that the model computes with."""
        dtypes = {some.dtype for some in self.model.parameters() if some.is_floating_point()}
        dtypes.add(outputs.dtype)
        device = self._device.type
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
        products = torch.get_float32_matmul_precision()
        if products == "high":
            dtypes.add(torch.float16)  # as many digits as TF32
        elif products == "medium":
            dtypes.add(torch.bfloat16)
        # Numbers of 8 bits are stored alone, not computed with.
        return max(torch.finfo(dtype).eps for dtype in dtypes if dtype.itemsize > 1)

    def _run(self, batch: Batch, layout: Layout, form: Form | None, wanted: Wanted, tokens: Tensor) -> Tensor:
        """Outputs ``[n, F]`` at the kept columns of a batch, row after row."""
        device = self._device
        columns = [torch.from_numpy(column) for column in fill(batch, wanted)]
        place, position, segment, before = (column.to(device, non_blocking=True) for column in columns)
        kept = torch.from_numpy(layout.kept)

        real = segment > 0
        ids = tokens[place.to(tokens.device)].to(device).masked_fill(~real, 0)
        inputs: dict[str, Any] = {"input_ids": ids}
        options: dict[str, Any] = {}
        if "use_cache" in self._accepted:
            options["use_cache"] = False

        count = int(kept[0].sum())  # of rows of one text each
        if form is None:
            inputs["attention_mask"] = real.to(torch.int64)
            if "logits_to_keep" in self._accepted:
                options["logits_to_keep"] = count
        else:
            inputs["position_ids"] = position
            if form.mask != "positions":
                inputs["attention_mask"] = self._mask(segment, before, form.mask == "bool")
            if form.exact:
                options["logits_to_keep"] = kept.to(device)

        with noted("In the model (model, ref_model) that reads the texts of a batch"):
            logits: Tensor = self.model(**inputs, **options).logits
        self._outputs = logits.shape[-1]
        if form is None:
            return logits[:, -count:].flatten(0, 1)
        if form.exact:
            return logits
        return logits.flatten(0, 1)[kept.flatten().to(device)]

    def _mask(self, segment: Tensor, before: Tensor, as_bool: bool) -> Tensor:
        """What each token sees, ``[R, 1, W, W]``: its own stretch, and the prompt before it, up to itself."""
        own = segment.unsqueeze(2) == segment.unsqueeze(1)
        prompt = before.unsqueeze(2) == segment.unsqueeze(1)
        seen = (own | prompt).tril_().unsqueeze(1)
        if as_bool:
            return seen
        dtype = next(
            (some.dtype for some in self.model.parameters() if some.is_floating_point()), torch.float32
        )
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)

    @property
    def _device(self) -> torch.device:
        return next((some.device for some in self.model.parameters()), torch.device("cpu"))

    @property
    def _takes_cumulative_lengths(self) -> bool:
        """Whether attention runs by kernels that find texts in one row by their positions."""
        return "flash" in str(getattr(self._config, "_attn_implementation", ""))

    @property
    def _kinds(self) -> set[str]:
        """Kinds of the model's layers, as far as its configuration tells."""
        kinds: set[str] = set()
        for name in ("layer_types", "layers_block_type"):
            kinds.update(getattr(self._config, name, None) or ())
        return kinds

    @property
    def _has_windows(self) -> bool:
        """Whether some layer may see a part of the text alone, which a mask for all layers would not say."""
        if self._config is None:
            return True
        kinds = getattr(self._config, "layer_types", None)
        if kinds is not None:
            return any(kind != "full_attention" for kind in kinds)
        return any(
            getattr(self._config, name, None) is not None
            for name in ("sliding_window", "attention_chunk_size", "window_size", "attention_layers")
        )

    def _check_lengths(self, wanted: Wanted) -> None:
        longest = max(wanted.length)
        if 0 < self._most < longest:
            raise ValueError(
                f"a text of {longest} tokens is longer than {type(self.model).__name__} reads: its configuration has "
                f"max_position_embeddings={self._most}. Cut the prompts, or take fewer new tokens"
            )


def agree(found: Tensor, expected: Tensor, reach: Tensor, rounding: float | None = None) -> bool | None:
    """Whether outputs are the expected ones to rounding.

    Args:
        found: outputs ``[*B, F]``.
        expected: of the same shape.
        reach: how far outputs are apart if other tokens come before the same ones, of any shape.
        rounding: how far they may be off by rounding. Default: by the outputs' type and size.

    Returns:
        None if the reach is too little to tell a wrong pass from rounding.
    """
    if rounding is None:
        rounding = rounding_of(expected)
    usual = reach[reach.abs() <= 2 * LARGEST_LOGIT]
    if expected.shape[-1] == 1:
        usual = reach
    if not usual.numel() or float(usual.abs().max()) <= 2 * rounding:
        return None
    return is_close(found, expected, rounding)


def is_close(found: Tensor, expected: Tensor, rounding: float) -> bool:
    """Whether outputs ``[*B, F]`` differ by rounding alone, logits of tokens that are never drawn left out."""
    return _apart(found, expected) <= rounding


def rounding_of(outputs: Tensor, unit: float | None = None) -> float:
    """How far outputs ``[*B, F]`` may be off by rounding, of relative size ``unit`` or that of their type."""
    some = outputs[_usual(outputs)]
    if not some.numel():
        return 0.0
    if unit is None:
        unit = torch.finfo(outputs.dtype).eps
    # Sums are kept in floats of 32 bits; with shorter numbers, few steps round in those.
    steps = 32 if unit < 1e-4 else 8
    return steps * unit * float(some.abs().max())


def _apart(found: Tensor, expected: Tensor) -> float:
    """How far outputs ``[*B, F]`` are apart at most, logits of tokens that are never drawn left out."""
    usual = _usual(expected)
    if not bool(usual.any()):
        return 0.0
    return float((found.to(expected.device) - expected)[usual].abs().max())


def _usual(outputs: Tensor) -> Tensor:
    """Where outputs ``[*B, F]`` are finite and, if they are logits, none of a token that is never drawn."""
    if outputs.shape[-1] == 1:
        return outputs.isfinite()
    return outputs.abs() <= LARGEST_LOGIT


def most_positions(model: object) -> int | None:
    """How many tokens a model reads, by its configuration; None if that says nothing."""
    return size_of(configuration(model), "max_position_embeddings", 0) or None


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to what a user's model raises."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Turn dropout off in all models, and back on where it was."""
    modules = [module for model in models if isinstance(model, nn.Module) for module in model.modules()]
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _wanted(texts: Texts, text: Tensor, length: Tensor) -> Wanted:
    """What rows want of their texts, on the host."""
    first = length.new_full((len(texts.head),), 2**62)
    most = length.new_zeros(len(texts.head))
    first.scatter_reduce_(0, text, length, "amin")
    most.scatter_reduce_(0, text, length, "amax")
    places = (place.to(length.device) for place in (texts.head, texts.shared, texts.start))
    return Wanted(*torch.stack([*places, first, most]).tolist())


def _some(batch: Batch, wanted: Wanted) -> tuple[list[list[Unit]], list[int]]:
    """One or two rows of several texts, and of them the longest text and those with most before them."""
    shared = [row for row in batch.rows if len(row) > 1 or len(row[0].texts) > 1]
    texts_of = [[text for unit in row for text in unit.texts] for row in shared]
    with_longest = max(range(len(shared)), key=lambda row: max(wanted.length[text] for text in texts_of[row]))
    with_most = max(range(len(shared)), key=lambda row: len(texts_of[row]))

    rows = list(dict.fromkeys((with_longest, with_most)))
    longest = max(texts_of[with_longest], key=lambda text: wanted.length[text])
    last = [texts_of[row][-1] for row in rows]
    return [shared[row] for row in rows], list(dict.fromkeys((longest, *last)))


def _shares(layouts: list[Layout], text: Tensor, count: int) -> list[Tensor]:
    """Indices of the rows whose texts are in each batch, of ``count`` texts in all."""
    if len(layouts) == 1:
        return [torch.arange(len(text), device=text.device)]
    batch = text.new_empty(count)
    for number, layout in enumerate(layouts):
        batch[text.new_tensor(layout.text)] = number
    batch_of_row = batch[text]
    counts = batch_of_row.bincount(minlength=len(layouts)).tolist()
    return list(torch.split(batch_of_row.argsort(stable=True), counts))


def _places(layout: Layout, count: int, text: Tensor, length: Tensor) -> Tensor:
    """Places of rows' outputs among the kept ones of their batch, int64 ``[n]``, of ``count`` texts in all."""
    kept = torch.from_numpy(layout.kept)
    columns = torch.tensor([layout.row, layout.head, layout.own, layout.shared])
    by_text = columns.new_zeros(4, count)
    by_text[:, torch.tensor(layout.text)] = columns
    row, head, own, shared = by_text.to(text.device)[:, text]

    token = length - 1
    column = torch.where(token < shared, head + token, own + token - shared)
    rank = (kept.flatten().cumsum(0) - 1).to(text.device)
    return rank[row * kept.shape[1] + column]
