"""Base class of all losses: the keys it reads, the mask of valid rows, and target networks."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from flatroll.estimators.masked import (
    Reduction,
    WarnOnce,
    mask_and,
    on_host,
    one_of,
    without_rubbish,
    zero_masked,
)
from flatroll.layout.boundaries import run_starts, steps_into_run
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
    missing_marker,
    renamed,
    under_next,
)

N = TypeVar("N", bound=nn.Module)

#: Names of a loss's entries that stand under ``"next"``.
_UNDER_NEXT = ("reward", "done", "terminated")


@dataclass(frozen=True)
class LossInputs:
    """A batch prepared for a loss: the batch, a working copy, and the masks of its rows.

    Attributes:
        batch: the batch as it came, ``[*B]``.
        work: a shallow copy, into which the networks write (a critic may read what the actor wrote). What they read in
            padding is 0 there, whatever the batch holds.
        mask: bool ``[*B]``, the rows that count; None means all True.
        unknown: bool ``[*B]``, the rows whose next observation nobody knows; None means all False.
    """

    batch: TensorDictBase
    work: TensorDictBase
    mask: Tensor | None
    unknown: Tensor | None = None


class LossModule(TensorDictModuleBase):
    """Base of all losses: configurable keys, the mask of valid rows, and the reduction.

    A subclass defines ``forward(batch)``, which returns a tensordict of losses, and calls :meth:`inputs_of` in it.

    Args:
        reduction: ``"mean"`` over the rows that count, ``"sum"`` of them, or ``"none"``: one number per row ``[*B]``,
            0 in rows that do not count. Default: ``"mean"``.
        burn_in: rows at the beginning of each run (slice) that only warm up the memory of recurrent networks. They
            count nowhere in the loss, and no gradient flows through them. Default: 0.

    Raises:
        ValueError: unknown ``reduction``, or ``burn_in`` below 0.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> class RewardLoss(LossModule):
        ...     def forward(self, batch):
        ...         inputs = self.inputs_of(batch)
        ...         return TensorDict({"loss": self.column(inputs, "reward")[inputs.mask].mean()})
        >>> mask = torch.tensor([True, True, False])
        >>> reward = torch.tensor([[1.0], [3.0], [100.0]])
        >>> RewardLoss()(TensorDict({"next": {"reward": reward}, "collector": {"mask": mask}}, [3]))["loss"]
        tensor(2.)
    """

    #: Each name that :meth:`set_keys` takes, and the entry that it stands for until then.
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
        self.in_keys: list[Any] = []  # a subclass may name what it reads and writes
        self.out_keys: list[Any] = []
        self.tensor_keys: dict[str, NestedKey] = dict(self.default_keys)

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Change the keys of entries that the loss reads or writes.

        Args:
            keys: the names in ``tensor_keys``; None leaves a name as it is. ``reward``, ``done`` and
                ``terminated`` are read under ``"next"``.

        Raises:
            ValueError: there is no such key.
        """
        self.tensor_keys = renamed(self.tensor_keys, keys)

    def inputs_of(self, batch: TensorDictBase) -> LossInputs:
        """Return ``batch`` ``[*B]`` with the mask of its valid rows: not padding, not burn-in.

        A row counts if ``("collector", "mask")`` and ``"shifted_valid"`` (what an estimator left valid) are True there,
        as far as the batch has them, and if ``burn_in`` rows of its run stand before it.

        Raises:
            ValueError: there are no rows at all.
        """
        if batch.batch_size.numel() == 0:  # TensorDict.numel() is at least 1
            raise ValueError(f"{type(self).__name__} needs at least one row, got a batch {list(batch.shape)}")
        mask = self.real_rows(batch)
        if self.burn_in:
            # from the row number burn_in of each run on (the first one has number 0)
            warm = steps_into_run(run_starts(batch, **self.boundary_keys)) >= self.burn_in
            mask = mask_and(mask, warm)
            if on_host(warm) and not bool(warm.any()):
                self._warn_once(
                    f"no run of the batch has more than burn_in={self.burn_in} rows, so no row counts and the loss "
                    "is 0: draw longer slices or burn in fewer rows"
                )
        padded = batch.get(self.tensor_keys["mask"], None) is not None
        work = without_rubbish(batch, self.tensor_keys["mask"], self.in_keys) if padded else batch.copy()
        return LossInputs(batch, work, mask)

    def real_rows(self, batch: TensorDictBase) -> Tensor | None:
        """Return the rows that neither padding nor an estimator left out, bool ``[*B]``; None means all of them."""
        mask = None
        for name in ("mask", "valid"):
            key = self.tensor_keys[name]
            if batch.get(key, None) is not None:
                mask = mask_and(mask, marker(batch, key))
        return mask

    @property
    def boundary_keys(self) -> dict[str, NestedKey]:
        """The keyword arguments of :func:`flatroll.layout.run_ends` that match this loss's keys."""
        names = {"is_init_key": "is_init", "done_key": "done", "traj_key": "traj_ids", "mask_key": "mask"}
        return {argument: self.key(name) for argument, name in names.items()}

    def key(self, name: str) -> NestedKey:
        """Return the key set for ``name`` in :meth:`set_keys`, or its default."""
        return under_next(self.tensor_keys[name]) if name in _UNDER_NEXT else self.tensor_keys[name]

    def entry(self, inputs: LossInputs, name: str) -> Tensor:
        """Return the batch's entry for ``name`` (a name of :meth:`set_keys`) unchanged.

        Raises:
            KeyError: it is missing; the text names what writes it.
        """
        value: Tensor | None = inputs.batch.get(self.key(name), None)
        if value is None:
            default = self.default_keys.get(name, name)
            default = under_next(default) if name in _UNDER_NEXT else default
            raise missing_marker(self.key(name), inputs.batch.keys(True, True), default)
        return value

    def column(self, inputs: LossInputs, name: str) -> Tensor:
        """Return the entry for ``name``, ``[*B]`` or ``[*B, 1]``, as ``[*B]``, 0 where the mask is False."""
        column = flat_column(self.entry(inputs, name), inputs.batch, self.key(name))
        return column if inputs.mask is None else zero_masked(column, inputs.mask)

    def delayed_networks(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        """Pairs (network, target copy) by name: the attributes ``<name>`` and ``target_<name>``."""
        children = dict(self.named_children())
        return {name: (children[name], t) for name in children if (t := children.get(f"target_{name}"))}


def target_copy(network: N) -> N:
    """Return a target network: a deep copy of ``network`` without gradients.

    Keep it in a loss as ``self.target_<name>`` beside ``self.<name>``, and
    :class:`~flatroll.estimators.SoftUpdate` and :class:`~flatroll.estimators.HardUpdate` move it.

    >>> target_copy(nn.Linear(2, 1)).weight.requires_grad
    False
    """
    return deepcopy(network).requires_grad_(False)


def parameters_and_buffers(network: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """List the parameters and buffers of a network, each once."""
    modules = list(network.modules())  # Module.parameters() walks, too, but makes names on the way
    kinds = [m._parameters for m in modules], [m._buffers for m in modules]
    # by id: a tensor that two modules share is listed once, where it comes first
    parameters, buffers = (
        list({id(x): x for own in kind for x in own.values() if x is not None}.values()) for kind in kinds
    )
    return parameters, buffers


@contextmanager
def frozen(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Context manager: compute no gradients for these parameters, but let gradients through to the inputs.

    Gradients still flow through the network to its inputs, e.g. through a critic into the actor's action.

    >>> import torch
    >>> layer, action = nn.Linear(1, 1), torch.ones(1, requires_grad=True)
    >>> with frozen(layer.parameters()):
    ...     layer(action).sum().backward()
    >>> layer.weight.grad is None, action.grad is None
    (True, False)
    """
    # what was frozen before stays so afterwards
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def shared_parameters(network: nn.Module, other: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that both networks share."""
    others = set(other.parameters())
    return [parameter for parameter in network.parameters() if parameter in others]
