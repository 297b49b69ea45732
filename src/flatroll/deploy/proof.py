"""Compares a policy's file with the policy: both play the same rows, step by step, and carry their own states."""

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution, TensorDictModuleBase
from torch import Tensor

from flatroll.deploy.graph import Entries, act
from flatroll.deploy.graph_files import Step
from flatroll.deploy.interface import Interface, choosers_of, samplers_of
from flatroll.layout.boundaries import run_starts
from flatroll.layout.checks import check_dense_tensor, check_rows
from flatroll.layout.keys import IS_INIT, MASK, NestedKey, as_tuple, marker, require
from flatroll.layout.tensordict_seam import get_entry
from flatroll.modules.transformer import TransformerModule

#: Largest difference between the file and the policy: absolute below 1, relative above.
TOLERANCE = 1e-5
#: Rows that are computed at once without a memory.
_ROWS = 1024
#: Most lanes in which runs are played side by side.
_LANES = 256


class Rows(NamedTuple):
    """The rows of a batch on which file and policy are compared.

    Attributes:
        columns: what the policy reads, ``[N, ...]`` by input; of states only those that the batch holds.
        numbers: int64 ``[N]``, of the rows in the caller's batch.
        starts: bool ``[N]``, where runs begin.
        resets: bool ``[N]``, where the states are reset.
    """

    columns: Entries
    numbers: Tensor
    starts: Tensor
    resets: Tensor


class Comparison(NamedTuple):
    """How much outputs of the file differ from the policy's.

    Attributes:
        rows: number of rows.
        episodes: number of rows at which states were reset.
        differences: of each output and row, ``[N]`` by name.
        numbers: of the rows in the caller's batch.
    """

    rows: int
    episodes: int
    differences: Entries
    numbers: Tensor

    @property
    def largest(self) -> float:
        """The largest difference of all outputs."""
        return max(float(column.max()) for column in self.differences.values())

    def check(self) -> None:
        """Raise ValueError, naming the first row, if a difference is larger than `TOLERANCE`."""
        stacked = torch.stack([*self.differences.values()])
        wrong = (stacked > TOLERANCE).any(0)
        if not bool(wrong.any()):
            return

        row = int(wrong.nonzero()[0])
        name = [*self.differences][int(stacked[:, row].argmax())]
        raise ValueError(
            f"the file does not do what the policy does: row {int(self.numbers[row])} of batch is the first of "
            f"{int(wrong.sum())} rows that differ, {name!r} by {float(stacked[:, row].max()):.2g}, allowed is "
            f"{TOLERANCE:g}. No file was written"
        )


def read_rows(batch: TensorDictBase, interface: Interface) -> Rows:
    """Return what a policy reads of a batch on the host.

    Raises:
        KeyError: an entry is missing.
        ValueError: for a policy with memory there is no first row of an episode, or there are no two rows of one.
    """
    columns: Entries = {}
    for name, key in interface.inputs.items():
        if name in interface.states and get_entry(batch, key) is None:
            continue
        columns[name] = read_column(batch, key).detach().contiguous()

    resets = torch.zeros(len(batch), dtype=torch.bool)
    starts = ~resets
    if interface.states:
        reset_key: NestedKey = interface.inputs.get(interface.is_init or IS_INIT, IS_INIT)
        starts = run_starts(batch, is_init_key=reset_key)
        if interface.is_init is not None:
            resets = marker(batch, reset_key)
            if not bool(resets.any()):
                raise ValueError(
                    f"batch must hold a first row of an episode ({interface.is_init!r} True), so that the reset of "
                    f"{', '.join(interface.states)} is compared, got {len(batch)} rows without one: pass the rows of "
                    "whole episodes"
                )
        if bool(starts.all()):
            raise ValueError(
                f"batch must hold two adjacent rows of an episode, so that {', '.join(interface.states)} are carried, "
                f"got {len(batch)} rows that each begin a run: pass rows as a collector yields them"
            )
    return Rows(columns, torch.arange(len(batch)), starts, resets)


def read_column(batch: TensorDictBase, key: NestedKey) -> Tensor:
    """Return a column of a batch; KeyError if it is missing, TypeError if it is no tensor of numbers."""
    return check_dense_tensor(f"batch[{key!r}]", require(batch, key))


def flat_rows(batch: TensorDictBase) -> tuple[TensorDictBase, Tensor]:
    """Return the real rows of a batch on the host, and their numbers in it.

    Raises:
        TypeError: ``batch`` is no tensordict.
        ValueError: it is not flat, or has no rows.
    """
    check_rows(batch, values=True)
    if batch.batch_dims != 1:
        raise ValueError(
            f"batch must be flat rows [N], got batch size {list(batch.batch_size)}: flatten it with batch.reshape(-1)"
        )

    rows: TensorDictBase = batch.detach().cpu()
    numbers = torch.arange(len(rows))
    if rows.get(MASK, None) is not None:
        numbers = numbers[marker(rows, MASK)]
        rows = rows[numbers]
    if not len(rows):
        raise ValueError("batch must have at least one row, got none: collect some")
    return rows, numbers


def prove(policy: TensorDictModuleBase, step: Step, rows: Rows, interface: Interface) -> Comparison:
    """Compare a file with the policy on the rows, and where a ring of a cache would not turn, on a longer run of them.

    Raises:
        ValueError: they differ, or an output of the policy is not finite; the error names the first row.
    """
    compared = compare(policy, step, rows, interface)
    compared.check()

    slots = max(
        (part.context or 0 for part in policy.modules() if isinstance(part, TransformerModule)), default=0
    )
    runs = rows.starts.cumsum(0)
    if not slots or int(runs.bincount().max()) > slots:
        return compared

    longer = compare(policy, step, _one_run(rows, interface, slots + 2), interface)
    longer.check()
    differences = {
        name: torch.cat([column, longer.differences[name]]) for name, column in compared.differences.items()
    }
    numbers = torch.cat([compared.numbers, longer.numbers])
    return Comparison(compared.rows, compared.episodes, differences, numbers)


def _one_run(rows: Rows, interface: Interface, count: int) -> Rows:
    """Return the rows as one run of ``count`` steps, repeated from the first one where they end."""
    at = torch.arange(count)
    # one row further in the steps that write to a slot again, so that they never write what is there
    at = (at + (at >= count - 2).int()) % len(rows.starts)

    begins = torch.zeros(count, dtype=torch.bool)
    begins[0] = True
    columns = {name: column[at] for name, column in rows.columns.items()}
    if interface.is_init is not None:
        columns[interface.is_init] = begins.view_as(columns[interface.is_init])
    return Rows(columns, rows.numbers[at], begins, begins)


def compare(policy: TensorDictModuleBase, step: Step, rows: Rows, interface: Interface) -> Comparison:
    """Play the rows through the policy and through a file, and compare all outputs.

    Runs are played one after the other in lanes, as envs play episodes. So an episode begins with what the one before
    it left in the states, and the first one with noise: a reset that does nothing is seen. Policy and file each carry
    their own states.

    Raises:
        ValueError: an output of the policy is not finite; the error names the first row.
    """
    judge = _Judge(policy, interface)
    count = len(rows.starts)
    differences = {name: torch.zeros(count) for name in judge.keys}
    strange = {name: torch.zeros(count, dtype=torch.bool) for name in judge.keys}

    own: Entries = {}
    others: Entries = {}
    for at in _steps(rows, interface):
        given = {name: column[at] for name, column in rows.columns.items() if name not in interface.states}
        first = _states_at(rows, interface, at)
        stays = rows.resets[at] | ~rows.starts[at]
        own = _carry(own, first, stays)
        others = _carry(others, first, stays)

        acted = judge.act(given | own, len(at))
        found = step({name: (given | others)[name] for name in interface.inputs})
        for name, far in judge.differences(acted, found).items():
            differences[name][at] = torch.maximum(differences[name][at], far)
        for name, wrong in judge.strange(acted).items():
            strange[name][at] |= wrong

        for state in interface.states:
            after = interface.next_of(state)
            own[state] = get_entry(acted, interface.outputs[after])
            others[state] = found[after]

    _check_finite(strange, rows.numbers)
    return Comparison(count, int(rows.resets.sum()), differences, rows.numbers)


def _check_finite(strange: Entries, numbers: Tensor) -> None:
    """Raise ValueError, naming the first row, if the policy gives a strange number anywhere, ``[N]`` by name."""
    stacked = torch.stack([*strange.values()])
    wrong = stacked.any(0)
    if not bool(wrong.any()):
        return

    row = int(wrong.nonzero()[0])
    name = [*strange][int(stacked[:, row].int().argmax())]
    raise ValueError(
        f"policy must return finite numbers, got NaN or infinity in {name!r} at row {int(numbers[row])} of batch, the "
        f"first of {int(wrong.sum())} rows: look for NaN in its weights and in these rows. No file was written"
    )


def _steps(rows: Rows, interface: Interface) -> Iterator[Tensor]:
    """Yield the numbers of the rows that are computed at once: first one row alone, then many."""
    count = len(rows.starts)
    yield torch.zeros(1, dtype=torch.int64)
    if not interface.states:
        yield from torch.split(torch.arange(count), _ROWS)
        return

    lanes = _fill_lanes(rows.starts)
    loads = torch.tensor([len(lane) for lane in lanes])
    table = torch.nn.utils.rnn.pad_sequence(lanes)  # [steps, lanes]
    for number, row in enumerate(table):
        yield row[loads > number]


def _fill_lanes(starts: Tensor) -> list[Tensor]:
    """Return the rows of each lane, int64, longest first: at least two runs in each if there are two.

    >>> _fill_lanes(torch.tensor([1, 0, 0, 1, 1, 0, 1]).bool())
    [tensor([0, 1, 2, 6]), tensor([4, 5, 3])]
    """
    runs = torch.arange(len(starts)).tensor_split(starts.nonzero().flatten()[1:])
    count = min(_LANES, max(1, len(runs) // 2))

    # the longest run goes first, each to the lane with the fewest rows
    loads = [(0, lane) for lane in range(count)]
    lanes: list[list[Tensor]] = [[] for _ in range(count)]
    for run in sorted(runs, key=len, reverse=True):
        load, lane = heapq.heappop(loads)
        lanes[lane].append(run)
        heapq.heappush(loads, (load + len(run), lane))
    return sorted((torch.cat(lane) for lane in lanes), key=len, reverse=True)


def _states_at(rows: Rows, interface: Interface, at: Tensor) -> Entries:
    """Return what runs that begin at these rows start from: what the rows hold, else the first states."""
    states = {name: value.expand(len(at), *value.shape) for name, value in interface.states.items()}
    for name in states:
        if name in rows.columns:
            states[name] = rows.columns[name][at]
    return states


def _carry(before: Entries, first: Entries, stays: Tensor) -> Entries:
    """Return the states of a step: those that the step before left, with ``first`` where a run begins without reset.

    Args:
        before: from the step before, at least as many rows; else there was none, and noise is in its place.
        first: ``[E, ...]``, what runs start from.
        stays: bool ``[E]``, rows that do not begin a run, or that reset the states themselves.
    """
    generator = torch.Generator().manual_seed(0)
    states: Entries = {}
    for name, value in first.items():
        left = before.get(name)
        if left is None or len(left) < len(value):
            left = torch.rand(value.shape, generator=generator).mul(4).to(value.dtype)
        keeps = stays.view(-1, *[1] * (value.ndim - 1))
        states[name] = torch.where(keeps, left[: len(value)], value)
    return states


class _Judge:
    """Runs a policy and says how far other outputs are from its own.

    Args:
        policy: in eval mode, on the host.
        interface: what it reads and writes.
    """

    def __init__(self, policy: TensorDictModuleBase, interface: Interface) -> None:
        #: What is compared.
        self.keys: dict[str, NestedKey] = interface.outputs | interface.scores
        self._policy = policy
        self._inputs = interface.inputs
        self._scores = interface.scores
        self._samplers = samplers_of(policy)
        self._choosers = choosers_of(policy)

    def act(self, entries: Entries, rows: int) -> TensorDictBase:
        """Return a batch of these entries on which the policy has acted."""
        columns = {key: entries[name].clone() for name, key in self._inputs.items()}
        with torch.no_grad():
            return act(self._policy, columns, rows)

    def differences(self, acted: TensorDictBase, found: Entries) -> Entries:
        """Return the difference of each output and row, float32 ``[E]`` by name."""
        return {name: self._difference(acted, key, found[name]) for name, key in self.keys.items()}

    def strange(self, acted: TensorDictBase) -> Entries:
        """Return the rows whose numbers are not finite, bool ``[E]`` by name; a score may be that of no option."""
        found: Entries = {}
        for name, key in self.keys.items():
            own: Tensor = get_entry(acted, key)
            wrong = ~own.isfinite()
            if name in self._scores:
                wrong &= ~own.isneginf()
            found[name] = wrong.reshape(len(own), -1).any(1)
        return found

    def _difference(self, acted: TensorDictBase, key: NestedKey, other: Tensor) -> Tensor:
        own: Tensor = get_entry(acted, key)
        if own.shape != other.shape or own.dtype != other.dtype:
            return torch.full((len(own),), torch.inf)
        if own.is_floating_point():
            return _scaled(own, other)

        unequal = (own != other).reshape(len(own), -1).any(1)
        far = torch.where(unequal, torch.inf, 0.0)
        if bool(unequal.any()):
            loss = self._loss(acted, key, other)
            if loss is not None:
                far = torch.where(unequal, loss, far)
        return far

    def _loss(self, acted: TensorDictBase, key: NestedKey, other: Tensor) -> Tensor | None:
        """Return how much worse other choices score than the policy's, ``[E]``: about 0 for a tie; None if unknown."""
        for chooser in self._choosers:
            if as_tuple(chooser.out_keys[0]) == as_tuple(key):
                values: Tensor = get_entry(acted, chooser.in_keys[0])
                both = torch.stack([get_entry(acted, key), other], -1)
                return _scaled(*values.gather(-1, both).unbind(-1))

        for sampler in self._samplers:
            for place, action in enumerate(sampler.dist_sample_keys):
                if as_tuple(action) == as_tuple(key):
                    dist: Any = sampler.get_dist(acted)
                    if isinstance(dist, CompositeDistribution):
                        dist = [*dist.dists.values()][place]
                    return _scaled(dist.log_prob(get_entry(acted, key)), dist.log_prob(other))
        return None


def _scaled(own: Tensor, other: Tensor) -> Tensor:
    """Return the largest difference in each row, ``[E]``: relative to own numbers above 1, infinite beside NaN."""
    equal = (own == other) | (own.isnan() & other.isnan())
    far = torch.where(equal, 0.0, (own - other).abs() / own.abs().clamp(min=1.0))
    return far.nan_to_num(nan=torch.inf).reshape(len(own), -1).amax(1).float()
