"""What every loss does with a batch: entry names, the rows that count, networks that stand still."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from flatroll.estimators.masked import Reduction, both, kept, one_of
from flatroll.estimators.values.batch_inputs import WarnOnce, on_host
from flatroll.layout import run_starts
from flatroll.layout.boundaries import steps_into_run
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import (
    ACTION,
    IS_INIT,
    MASK,
    TRAJ_IDS,
    VALID,
    NestedKey,
    flat_column,
    marker,
    renamed,
    require,
    under_next,
)

N = TypeVar("N", bound=nn.Module)

#: Names of a loss's entries that stand under ``"next"``.
_UNDER_NEXT = ("reward", "done", "terminated")


@dataclass(frozen=True)
class Rows:
    """A batch on its way through a loss.

    Attributes:
        batch: the batch as it came.
        work: a shallow copy, into which the networks write (a critic may read what the actor wrote).
        mask: bool ``[*B]``, the rows that count, or None if all do.
    """

    batch: TensorDictBase
    work: TensorDictBase
    mask: Tensor | None


class LossModule(TensorDictModuleBase):
    """Base of the losses.

    Args:
        reduction: ``"mean"`` over the real rows, ``"sum"``, or ``"none"``, 0 in rows that are not real.
        burn_in: rows at the beginning of each run that only warm a memory up: they count nowhere in the loss, and no
            gradient flows through them.

    Raises:
        ValueError: unknown ``reduction``, or ``burn_in`` below 0.
    """

    default_keys: ClassVar[Mapping[str, NestedKey]] = {
        "action": ACTION,
        "reward": "reward",
        "done": "done",
        "terminated": "terminated",
        "is_init": IS_INIT,
        "traj_ids": TRAJ_IDS,
        "mask": MASK,
        "valid": VALID,
    }

    def __init__(self, *, reduction: Reduction = "mean", burn_in: int = 0) -> None:
        super().__init__()
        one_of("reduction", reduction, ("mean", "sum", "none"))
        self.reduction: Reduction = reduction
        self.burn_in = whole_number("burn_in", burn_in, 0)
        self._warn_once = WarnOnce()
        self.tensor_keys: dict[str, NestedKey] = dict(self.default_keys)

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Rename entries.

        Args:
            keys: the names in ``tensor_keys``; None leaves a name as it is. ``reward``, ``done`` and
                ``terminated`` are read under ``"next"``.

        Raises:
            ValueError: there is no such key.
        """
        self.tensor_keys = renamed(self.tensor_keys, keys)

    def rows(self, batch: TensorDictBase) -> Rows:
        """The batch and the rows of it that count: the mask, what an estimator left valid, no burn-in.

        Raises:
            ValueError: there are no rows at all.
        """
        if batch.batch_size.numel() == 0:  # TensorDict.numel() is at least 1
            raise ValueError(f"{type(self).__name__} needs at least one row, got a batch {list(batch.shape)}")
        mask = None
        for name in ("mask", "valid"):
            key = self.tensor_keys[name]
            mask = both(mask, None if batch.get(key, None) is None else marker(batch, key))
        if self.burn_in:
            real = steps_into_run(run_starts(batch, **self.boundary_keys)) >= self.burn_in
            mask = both(mask, real)
            if on_host(real) and not bool(real.any()):
                self._warn_once(
                    f"no run of the batch has more than burn_in={self.burn_in} rows, so no row counts and the loss "
                    "is 0: draw longer slices or burn in fewer rows"
                )
        return Rows(batch, batch.copy(), mask)

    @property
    def boundary_keys(self) -> dict[str, NestedKey]:
        """Where :func:`flatroll.layout.run_ends` is to look."""
        names = {"is_init_key": "is_init", "done_key": "done", "traj_key": "traj_ids", "mask_key": "mask"}
        return {argument: self.key(name) for argument, name in names.items()}

    def key(self, name: str) -> NestedKey:
        """Where the entry called ``name`` in :meth:`set_keys` stands."""
        return under_next(self.tensor_keys[name]) if name in _UNDER_NEXT else self.tensor_keys[name]

    def entry(self, rows: Rows, name: str) -> Tensor:
        """The batch's entry called ``name`` in :meth:`set_keys`, as it is.

        Raises:
            KeyError: it is missing; the text names what writes it.
        """
        default = self.default_keys[name]
        return require(rows.batch, self.key(name), under_next(default) if name in _UNDER_NEXT else default)

    def column(self, rows: Rows, name: str) -> Tensor:
        """The same in the batch's shape ``[*B]``, 0 in rows that do not count."""
        return kept(flat_column(self.entry(rows, name), rows.batch, self.key(name)), rows.mask)

    def delayed_networks(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        """Each network that has a delayed copy, and the copy: ``target_<name>`` follows ``<name>``."""
        children = dict(self.named_children())
        return {name: (children[name], t) for name in children if (t := children.get(f"target_{name}"))}


def delayed(network: N) -> N:
    """A copy of the network that does not learn."""
    return deepcopy(network).requires_grad_(False)


def held(network: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and buffers of a network, each once, in order."""
    modules = list(network.modules())  # Module.parameters() walks, too, but makes names on the way
    kinds = [m._parameters for m in modules], [m._buffers for m in modules]
    parameters, buffers = (
        list({id(x): x for own in kind for x in own.values() if x is not None}.values()) for kind in kinds
    )
    return parameters, buffers


@contextmanager
def frozen(parameters: Iterable[Tensor]) -> Iterator[None]:
    """No gradient reaches these parameters through what is computed in the block."""
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def shared(network: nn.Module, other: nn.Module) -> list[nn.Parameter]:
    """The parameters that are in both networks."""
    others = set(other.parameters())
    return [parameter for parameter in network.parameters() if parameter in others]
