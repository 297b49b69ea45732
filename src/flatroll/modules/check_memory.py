"""`check_memory`: whether a module with memory computes step by step what it computes over whole runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.layout.boundaries import run_ends, run_starts
from flatroll.layout.checks import check_number, check_seed, check_type
from flatroll.layout.keys import IS_INIT, NestedKey, as_tuple, next_key, plain_key, require
from flatroll.modules.mode import set_recurrent_mode
from flatroll.modules.primer import TensorDictPrimer

#: Lengths of the episodes that are played; the last one takes the rest of the rows.
_LENGTHS = (5, 1, 3, 8, 2)
#: Rows of each episode that a slice leaves out.
_SKIPPED = 2
_FEWEST = 24


def check_memory(
    module: TensorDictModuleBase, inputs: TensorDictBase, *, atol: float = 1e-4, seed: int = 0
) -> None:
    """Check a module with memory of one's own, and raise AssertionError unless both of its modes compute the same.

    The rows are played as one env's episodes, row by row in sequential mode; then whole runs are computed in
    recurrent mode: of all episodes, of each one alone, and of slices that begin within episodes. It finds:

    * a state that is not reset where ``is_init`` is True, in sequential mode;
    * outputs over runs that are not those of single steps;
    * runs that do not start from the state stored at their first row, where ``is_init`` may be True;
    * a state or a gradient that crosses from one run to the next;
    * a next state that is not the one after the last row of its run;
    * a step that depends on the other rows of its batch.

    Args:
        module: a tensordict module with ``make_tensordict_primer()``, which reads each of its states and writes it
            under ``("next", state)``. It is checked in evaluation mode and is not changed.
        inputs: what the module reads besides states and ``is_init``: ``[N]`` rows of at least 24, whose values differ
            from row to row, on the module's device.
        atol: largest difference that counts as equal; default 1e-4, for float32.
        seed: of the states that slices begin with, default 0.

    Raises:
        AssertionError: the module breaks the contract; every problem is listed.
        TypeError: ``module`` is no tensordict module with a primer, or ``inputs`` no tensordict.
        ValueError: ``inputs`` are not at least 24 flat rows.

    >>> from tensordict import TensorDict
    >>> from flatroll.modules import GRUModule
    >>> gru = GRUModule(3, 8, num_layers=2, in_key="observation", out_key="features")
    >>> check_memory(gru, TensorDict({"observation": torch.randn(30, 3)}, [30]))
    """
    check_type("module", module, TensorDictModuleBase, "a tensordict module")
    check_type("inputs", inputs, TensorDictBase, "a tensordict of what the module reads")
    check_number("atol", atol, least=0)
    if inputs.batch_dims != 1 or len(inputs) < _FEWEST:
        raise ValueError(f"inputs must be at least {_FEWEST} flat rows [N], got {list(inputs.batch_size)}")
    generator = torch.Generator().manual_seed(check_seed("seed", seed))

    was_training = module.training
    module.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            problems = list(_problems(module, inputs, atol, generator))
    finally:
        module.train(was_training)
    if problems:
        raise AssertionError(
            "the memory breaks its contract:\n" + "\n".join(f"- {text}" for text in problems)
        )


class _Check(NamedTuple):
    """A module, the initial values of its states, and the entries of its outputs besides these."""

    module: TensorDictModuleBase
    first: Mapping[NestedKey, Tensor]
    outputs: Sequence[NestedKey]
    atol: float

    def run(self, rows: TensorDictBase, mode: str) -> TensorDictBase:
        """Return the rows as the module fills them in a mode."""
        with torch.no_grad(), set_recurrent_mode(mode == "recurrent"):
            result: TensorDictBase = self.module(rows.clone())
        return result

    def differs(self, found: TensorDictBase, expected: TensorDictBase, key: NestedKey) -> str | None:
        """Where an entry of two batches differs first, in words."""
        one = require(found, key)
        other = require(expected, key)
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{key!r} is {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"

        far = ~torch.isclose(one, other, rtol=self.atol, atol=self.atol, equal_nan=True)
        wrong = far.flatten(1).any(1).nonzero().flatten().tolist()
        if not wrong:
            return None
        largest = (one - other).abs().max().item()
        return f"{key!r} differs in {len(wrong)} of {len(one)} rows, first in row {wrong[0]}, by up to {largest:.2g}"


def _problems(
    module: TensorDictModuleBase, inputs: TensorDictBase, atol: float, generator: torch.Generator
) -> Iterator[str]:
    make: Any = getattr(module, "make_tensordict_primer", None)
    primer = make() if make is not None else None
    if not isinstance(primer, TensorDictPrimer):
        raise TypeError(
            "module must have make_tensordict_primer(), which returns a flatroll.modules.TensorDictPrimer with the "
            f"first value of each state, got {type(primer).__name__}"
        )

    first = primer.defaults
    carried = {as_tuple(next_key(key)) for key in first}
    out_keys = cast(Any, module.out_keys)
    written = {as_tuple(key) for key in out_keys}
    if lacking := [key for key in first if as_tuple(next_key(key)) not in written]:
        yield f"out_keys must have {[next_key(key) for key in lacking]}, the states that the next step starts from"
        return
    outputs = [plain_key(key) for key in out_keys if as_tuple(key) not in carried]
    check = _Check(module, first, outputs, atol)

    played = _play(check, inputs)
    if first:  # states that the module keeps to itself are reset by rows that it is to see in their order
        yield from _check_steps(check, played, generator)
        yield from _check_slices(check, played)
    yield from _check_runs(check, played)
    yield from _check_gradients(check, played)


def _starts(rows: int) -> Tensor:
    """Where episodes of `_LENGTHS`, and one of the remaining rows, begin: bool ``[N]``."""
    starts = torch.zeros(rows, dtype=torch.bool)
    starts[0] = True
    starts[torch.tensor(_LENGTHS).cumsum(0)] = True
    return starts


def _play(check: _Check, inputs: TensorDictBase) -> TensorDictBase:
    """Play the rows one by one; return them with outputs, the states before each row and those after it."""
    starts = _starts(len(inputs))
    states: dict[NestedKey, Tensor] = {}
    steps: list[TensorDictBase] = []
    for i, start in enumerate(starts.tolist()):
        row = cast(TensorDictBase, inputs[i : i + 1]).copy()
        if start:
            states = {key: value.unsqueeze(0) for key, value in check.first.items()}
        row.set(IS_INIT, starts[i : i + 1].unsqueeze(1).to(row.device or "cpu"))
        for key, state in states.items():
            row.set(key, state)

        step = check.run(row, "sequential")
        steps.append(step)
        states = {key: require(step, next_key(key)) for key in check.first}
    joined: Any = torch.cat(cast(Any, steps))
    return cast(TensorDictBase, joined)


def _bare(check: _Check, played: TensorDictBase) -> TensorDictBase:
    """Rows as a buffer returns them: without outputs and next states."""
    return played.exclude(*check.outputs, *(next_key(key) for key in check.first))


def _check_steps(check: _Check, played: TensorDictBase, generator: torch.Generator) -> Iterator[str]:
    """Whole batches of steps: each row for itself, and reset where is_init is True."""
    rows = _bare(check, played)
    at_once = check.run(rows, "sequential")
    for key in check.outputs:
        if text := check.differs(at_once, played, key):
            yield f"sequential mode: a step depends on the other rows of its batch: {text}"

    stale = rows.clone()
    for key in check.first:
        state = require(stale, key)
        noise = torch.randn(state.shape, generator=generator).to(state.device, state.dtype)
        starts = require(stale, IS_INIT).view(-1, *[1] * (state.ndim - 1))
        stale.set(key, torch.where(starts, noise, state))
    again = check.run(stale, "sequential")
    for key in (*check.outputs, *(next_key(key) for key in check.first)):
        if text := check.differs(again, at_once, key):
            yield f"sequential mode: a row with is_init does not begin with the primer's state: {text}"


def _check_runs(check: _Check, played: TensorDictBase) -> Iterator[str]:
    """All episodes in one pass, and each alone."""
    rows = _bare(check, played)
    together = check.run(rows, "recurrent")
    for key in check.outputs:
        if text := check.differs(together, played, key):
            yield f"recurrent mode: not what single steps compute: {text}"
    yield from _check_last_states(check, together, played, "recurrent mode")

    lengths = run_starts(rows).cpu().nonzero().flatten().diff(append=torch.tensor([len(rows)])).tolist()
    parts: Any = [check.run(part, "recurrent") for part in rows.split(lengths)]
    alone: Any = torch.cat(parts)
    for key in check.outputs:
        if text := check.differs(together, alone, key):
            yield f"recurrent mode: a run depends on other runs of its batch: {text}"


def _check_slices(check: _Check, played: TensorDictBase) -> Iterator[str]:
    """Slices of episodes, as samplers return them: is_init is True where a slice begins, its state is stored."""
    starts = _starts(len(played))
    since = torch.arange(len(starts)) - torch.where(starts, torch.arange(len(starts)), 0).cummax(0).values
    rows = since.ge(_SKIPPED).nonzero().flatten()
    kept = cast(TensorDictBase, played[rows.to(played.device or "cpu")])
    begins = since[since >= _SKIPPED].eq(_SKIPPED).unsqueeze(1)
    kept.set(IS_INIT, begins.to(kept.device or "cpu"))

    sliced = check.run(_bare(check, kept), "recurrent")
    for key in check.outputs:
        if text := check.differs(sliced, kept, key):
            yield f"recurrent mode: a run does not start from the state stored at its first row: {text}"
    yield from _check_last_states(check, sliced, kept, "recurrent mode, slices")


def _check_last_states(
    check: _Check, found: TensorDictBase, expected: TensorDictBase, where: str
) -> Iterator[str]:
    lasts = run_ends(found).nonzero().flatten()
    for key in check.first:
        if text := check.differs(found[lasts], expected[lasts], next_key(key)):
            yield f"{where}: the next state is not the one after the last row of a run: of these rows, {text}"


def _check_gradients(check: _Check, played: TensorDictBase) -> Iterator[str]:
    """The outputs of one episode have no gradient to the inputs of the others."""
    rows = _bare(check, played)
    in_keys = cast(Any, check.module.in_keys)
    read = [plain_key(key) for key in in_keys]
    given = [key for key in read if key not in check.first and rows.get(key, None) is not None]
    entries = [key for key in given if require(rows, key).is_floating_point()]
    columns = [require(rows, key).detach().clone().requires_grad_() for key in entries]
    for key, column in zip(entries, columns, strict=True):
        rows.set(key, column)

    first = sum(_LENGTHS[:3])
    stop = first + _LENGTHS[3]
    with torch.enable_grad(), set_recurrent_mode("recurrent"):
        result = check.module(rows)
    total: Any = sum(
        out[first:stop].sum() for key in check.outputs if (out := require(result, key)).requires_grad
    )
    if not isinstance(total, Tensor):
        return

    grads = torch.autograd.grad(total, columns, allow_unused=True)
    for key, grad in zip(entries, grads, strict=True):
        if grad is not None and bool(torch.cat([grad[:first], grad[stop:]]).any()):
            yield f"recurrent mode: the outputs of a run have a gradient to {key!r} of other runs"
