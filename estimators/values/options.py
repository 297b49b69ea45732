"""Options that all value estimators share: how the value network is evaluated and what it reads."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypedDict

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.estimators.masked import one_of
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import NestedKey, next_key

BootstrapMissing = Literal["error", "current", "mask"]


class EstimatorOptions(TypedDict, total=False):
    """Keyword arguments shared by all estimators; :class:`ValueEstimator` documents them."""

    differentiable: bool
    shifted: bool
    shifted_budget: int | None
    single_call: bool | None
    value_chunk_size: int | None
    num_chunks: int | None
    num_chunk: int | None
    value_chunk_dim: int
    skip_existing: bool | None
    check_finite: bool
    bootstrap_missing: BootstrapMissing
    group_key: NestedKey | None
    time_dim: int | None
    advantage_key: NestedKey | None
    value_target_key: NestedKey | None
    value_key: NestedKey | None
    device: torch.device | str | None
    vectorized: bool | None
    deactivate_vmap: bool


@dataclass(frozen=True)
class Chunks:
    """Splits a batch into chunks for the value network, to limit the memory of its activations.

    Attributes:
        size: rows of a chunk along ``dim``.
        number: number of chunks, in place of ``size``.
        dim: the batch dim that is split.
        whole: whether everything goes through at once, as it does if neither ``size`` nor ``number`` is given.

    >>> list(Chunks(size=4).spans(10))
    [(0, 4), (4, 8), (8, 10)]
    """

    size: int | None = None
    number: int | None = None
    dim: int = 0
    whole: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.size is not None and self.number is not None:
            raise ValueError(
                "give value_chunk_size (rows per chunk) or num_chunks (number of chunks), not both: "
                f"got {self.size} and {self.number}"
            )
        for name, n in (("value_chunk_size", self.size), ("num_chunks", self.number)):
            if n is not None:
                whole_number(name, n)
        object.__setattr__(self, "whole", self.size is None and self.number in (None, 1))

    def along(self, batch_dims: int, turned: int | None = None) -> int:
        """The dim to split of a batch with so many dims, ``turned`` and last of which have changed places, if given."""
        if not -batch_dims <= self.dim < batch_dims:
            raise ValueError(f"value_chunk_dim must name one of {batch_dims} batch dims, got {self.dim}")
        # The dims turned and last have changed places, so the caller's number of either is now the other.
        dim, last = self.dim % batch_dims, batch_dims - 1
        return dim if turned is None else {turned: last, last: turned}.get(dim, dim)

    def spans(
        self, rows: int, stops: Tensor | None = None, *, each: int = 1, first: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Yield the first row and the exclusive end of each chunk.

        Args:
            rows: past-the-last row of all.
            stops: past-the-last rows of the runs, ascending int64: then a chunk holds whole runs, as many as
                fit, and one run alone where it is longer than a chunk. Default: runs may be cut.
            each: rows that count as one for ``size``, where several batch dims have become one.
            first: first row of all.
        """
        # Rows of a chunk: as many as asked for, or all rows over the number of chunks, rounded up; 1 at least.
        size = (self.size or 0) * each or -(-(rows - first) // (self.number or 1)) or 1
        if stops is None or size >= rows - first:
            for start in range(first, max(rows, first + 1), size):  # no rows at all are one chunk of none
                yield start, min(start + size, rows)
            return
        bounds, start, at = stops.tolist(), first, 0
        while start < rows:
            # Take runs on as long as the next one still fits; bounds[at] is the stop of the last one taken.
            while at + 1 < len(bounds) and bounds[at + 1] <= start + size:
                at += 1
            yield start, bounds[at]
            start, at = bounds[at], at + 1


@dataclass
class Evaluation:
    """How an estimator brings about the values of a batch; :class:`ValueEstimator` says what each option means."""

    differentiable: bool = False
    shifted: bool = False
    shifted_budget: int | None = None
    chunks: Chunks = field(default_factory=Chunks)
    skip_existing: bool = False
    check_finite: bool = False
    bootstrap_missing: BootstrapMissing = "error"


def evaluation_from(options: EstimatorOptions) -> Evaluation:
    """Convert an estimator's keyword options, with TorchRL's names and aliases, to an :class:`Evaluation`.

    >>> evaluation_from({"single_call": True, "num_chunk": 4}).chunks
    Chunks(size=None, number=4, dim=0)
    """
    missing = options.get("bootstrap_missing", "error")
    one_of("bootstrap_missing", missing, ("error", "current", "mask"))
    number, num_chunk = options.get("num_chunks"), options.get("num_chunk")
    if num_chunk is not None and number not in (None, num_chunk):
        raise ValueError(f"num_chunk is another name of num_chunks, got {num_chunk} and {number}")
    shifted, single_call = options.get("shifted", False), options.get("single_call")
    if not isinstance(shifted, bool):
        raise ValueError(f"shifted must be True or False, got {shifted!r}")
    if single_call is not None and shifted and not single_call:
        raise ValueError(f"single_call is another name of shifted, got {single_call} and {shifted}")
    shifted, budget = shifted or bool(single_call), options.get("shifted_budget")
    if budget is not None and whole_number("shifted_budget", budget) and not shifted:
        raise ValueError(
            f"shifted_budget={budget} says how long the one call of shifted=True is: give that, too"
        )
    return Evaluation(
        differentiable=options.get("differentiable", False),
        shifted=shifted,
        shifted_budget=budget,
        chunks=Chunks(
            options.get("value_chunk_size"),
            number if num_chunk is None else num_chunk,
            options.get("value_chunk_dim", 0),
        ),
        skip_existing=bool(options.get("skip_existing")),
        check_finite=options.get("check_finite", False),
        bootstrap_missing=missing,
    )


@dataclass(frozen=True)
class NetworkInputs:
    """What a value network reads from a batch: observations, next observations and recurrent states.

    Attributes:
        module: the network.
        is_init_key: entry that tells a memory where runs start.
        observed: keys of the observations.
        next_observed: keys of the next observations.
        states: recurrent states, of which only the one at a run's first row is read.
        recurrent: the network remembers, so the rows of a run must reach it together.
    """

    module: TensorDictModuleBase
    is_init_key: NestedKey
    observed: tuple[NestedKey, ...]
    next_observed: tuple[NestedKey, ...]
    states: tuple[NestedKey, ...]
    recurrent: bool

    @classmethod
    def of(cls, network: TensorDictModuleBase, is_init_key: NestedKey) -> "NetworkInputs":
        """Determine the inputs from the network's in_keys and out_keys, and from its recurrent modules."""
        read: list[NestedKey] = list(network.in_keys)  # pyright: ignore[reportAssignmentType]
        written = set(network.out_keys)
        # What it reads and writes one step later is a state, not an observation.
        states = tuple(key for key in read if next_key(key) in written)
        observed = tuple(key for key in read if key not in states and key != is_init_key)
        recurrent = bool(states) or is_init_key in read
        if not recurrent:
            recurrent = any(hasattr(type(x), "make_tensordict_primer") for x in network.modules())
        return cls(network, is_init_key, observed, tuple(map(next_key, observed)), states, recurrent)


@dataclass(frozen=True)
class Parameters:
    """Parameters to use instead of the network's own, for root and for next values (target networks)."""

    now: TensorDictBase | None = None
    following: TensorDictBase | None = None
