"""Base class of all losses: the keys it reads, the mask of valid rows; target networks and their updaters."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection, unravel_key_list
from tensordict.nn import TensorDictModuleBase, TensorDictParams, dispatch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from flatroll.estimators.masked import (
    Reduction,
    WarnOnce,
    mask_and,
    masked_mean,
    on_host,
    zero_masked,
    zero_padding,
)
from flatroll.layout import checks
from flatroll.layout.boundaries import run_starts, steps_into_run
from flatroll.layout.keys import (
    ACTION,
    IS_INIT,
    MASK,
    NEXT_KNOWN,
    TRAJ_IDS,
    VALID,
    KeyNames,
    NestedKey,
    as_tuple,
    flat_column,
    marker,
    missing_marker,
    renamed,
    under_next,
)
from flatroll.layout.moments import Moments
from flatroll.layout.sampling import base_sample_key
from flatroll.layout.tensordict_seam import get_entry, shallow_copy

N = TypeVar("N", bound=nn.Module)

#: Names of a loss's entries under ``"next"``.
_UNDER_NEXT = ("reward", "done", "terminated")


@dataclass(eq=False)
class LossInputs:
    """A batch prepared for a loss: the batch, the entries that networks read, and the masks of its rows.

    Attributes:
        batch: the original batch, ``[*B]``.
        readable: the networks' input: the batch, or, if it has padding, a shallow copy with zeros there.
        mask: bool ``[*B]``, the rows that count; None means all True.
        unknown: bool ``[*B]``, rows whose next observation is unknown; None means all False.
        real: bool ``[*B]``, rows that are neither padding nor excluded by an estimator; None means all True.
        finite: next observations without NaN, by the key of their root entry.
    """

    batch: TensorDictBase
    readable: TensorDictBase
    mask: Tensor | None
    unknown: Tensor | None = None
    real: Tensor | None = None
    finite: tuple[NestedKey, ...] = ()

    @cached_property
    def work(self) -> TensorDictBase:
        """A shallow copy of :attr:`readable` for networks to write into: a critic may read the actor's outputs."""
        return shallow_copy(self.readable)


class NetworkParameters:
    """Attribute ``<name>_params`` of a loss: the parameters and buffers of its network ``<name>``, by their names.

    A new :class:`~tensordict.nn.TensorDictParams` of the same tensors at each access, so that an optimizer of
    ``loss.critic_network_params.parameters()`` trains the network. ``target_<name>_params`` are those of the target
    copy or, without one, the network's own without gradients. None if there is no such network.

    With ``separate_losses=True`` only the actor trains shared parameters: the critic's entries for them are detached.
    Critics of a :func:`~flatroll.estimators.critic_ensemble` are indexed by number.

    >>> class NetworkLoss(LossModule):
    ...     network_params = NetworkParameters()
    >>> loss = NetworkLoss()
    >>> loss.network = nn.Linear(2, 1)
    >>> sorted(loss.network_params.keys()), loss.network_params["weight"] is loss.network.weight
    (['bias', 'weight'], True)
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.network_name = name.removesuffix("_params")

    def __get__(self, loss: "LossModule | None", owner: type | None = None) -> Any:
        if loss is None:
            return self
        network = getattr(loss, self.network_name, None)
        if network is None:  # not delayed: the network is its own target
            of = getattr(loss, self.network_name.removeprefix("target_"), None)
            if of is None:
                return None
            return cast(Any, TensorDict.from_module(of)).data

        params: Any = TensorDict.from_module(network, as_module=True)
        actor = getattr(loss, "actor_network", None)
        if not getattr(loss, "separate_losses", False) or actor is None or network is actor:
            return params

        shared = set(actor.parameters())

        def detach_shared(parameter: Any) -> Any:
            if parameter in shared:
                return parameter.data
            return parameter

        return TensorDictParams(params.apply(detach_shared, filter_empty=False), no_convert=True)


class LossModule(TensorDictModuleBase):
    """Base class of all losses: configurable keys, the mask of valid rows, and the reduction.

    A subclass defines ``forward(batch)``, which returns a tensordict of losses, and calls :meth:`inputs_of` in it.

    A call takes a tensordict ``[*B]`` and returns a tensordict. Or it takes tensors by the names of their keys, joined
    by ``"_"`` (``next_reward=`` for ``("next", "reward")``), and returns a tuple of the first ``tuple_length`` of
    its ``out_keys``, those that TorchRL's loss returns; or of what :meth:`select_out_keys` chose; or one tensor, if
    that is one key. ``*B`` are then the leading dims that all tensors share.

    Args:
        reduction: ``"mean"`` over the rows that count, ``"sum"`` of them, or ``"none"``: one number per row ``[*B]``,
            0 in rows that do not count. Default: ``"mean"``, also for None.
        burn_in: rows at the beginning of each run (slice) that only warm up recurrent networks. They are excluded
            from the loss, and no gradient flows through them. Default: 0.
        diagnostics: whether to compute and return numbers to log besides the losses; kept as ``with_diagnostics``,
            which may be changed between calls. Default: True.

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
        >>> loss = RewardLoss()
        >>> loss.in_keys, loss.out_keys = [("next", "reward")], ["loss"]
        >>> loss(next_reward=reward, collector_mask=mask)
        tensor(2.)
    """

    #: The names accepted by :meth:`set_keys`, with their default entries.
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

    #: Further entries that may be passed in a call by keyword.
    optional_keys: ClassVar[tuple[NestedKey, ...]] = (NEXT_KNOWN,)

    def __init__(
        self, *, reduction: Reduction | None = "mean", burn_in: int = 0, diagnostics: bool = True
    ) -> None:
        super().__init__()
        checks.check_flags(diagnostics=diagnostics)
        if reduction is None:
            reduction = "mean"
        checks.check_choice("reduction", reduction, ("mean", "sum", "none"))

        self.with_diagnostics = diagnostics
        self.reduction: Reduction = reduction
        self.burn_in = checks.check_whole_number("burn_in", burn_in, 0)
        self._warn_once = WarnOnce()

        self._name_entries(self.default_keys)
        self.in_keys = []  # a subclass may declare its own keys
        self.out_keys: list[Any] = []
        #: Number of out_keys returned by a call by keyword; None for all.
        self.tuple_length: int | None = None

    # overridden to add the setter: the keywords that a call accepts follow in_keys
    @property
    def in_keys(self) -> list[Any]:
        """The entries that the loss reads."""
        return self._in_keys

    @in_keys.setter
    def in_keys(self, value: Iterable[Any]) -> None:
        self._in_keys: list[Any] = unravel_key_list(list(value))
        known = [key for name in self.tensor_keys for key in self.named_keys(name)]
        read = (*self._in_keys, *known, *self.further_keys())
        self._readable_keys: list[Any] = list(dict.fromkeys(read))
        later = map(under_next, self._in_keys)  # a value estimator may read them
        self._keyword_keys: list[Any] = list(dict.fromkeys((*self._readable_keys, *later)))

    def further_keys(self) -> list[NestedKey]:
        """Return the entries that the loss reads if a batch has them, besides :attr:`in_keys` and ``tensor_keys``.

        `UpdateStep.epochs` and compiled updates pass nothing else to the loss, so a subclass that reads more adds it.
        """
        made_of = [base_sample_key(key) for key in self.named_keys("action")]
        legal: list[NestedKey] = []
        if "action_mask" in self.tensor_keys:
            legal = [under_next(self.key("action_mask"))]
        return [*legal, *made_of, *self.optional_keys]

    @property
    def readable_keys(self) -> list[Any]:
        """All entries that the loss may read; none where a subclass does not name its :attr:`in_keys`."""
        if self._in_keys:
            return self._readable_keys
        return []

    def __call__(self, tensordict: Any = None, *args: Any, **entries: Any) -> Any:
        """Compute the losses: see the class for the two ways to call it."""
        if not is_tensor_collection(tensordict):
            if tensordict is not None and not isinstance(tensordict, Tensor):
                checks.check_rows(tensordict)
            columns: Any = () if tensordict is None else (tensordict, *args)
            return self._call_on_columns(*columns, **entries)

        if torch.compiler.is_compiling():
            losses = super().__call__(tensordict, *args, **entries)
        else:
            try:
                losses = super().__call__(tensordict, *args, **entries)
            except checks.BLAMED as error:
                checks.blame_entries(self, tensordict, self.readable_keys, error)
                raise

        selected = self._out_keys_apparent
        if selected is self._out_keys:
            return losses
        return losses.select(*selected)

    @property
    def _tuple_keys(self) -> list[Any]:
        """What a call by keyword returns."""
        chosen: list[Any] = self._out_keys_apparent
        if chosen is self._out_keys:
            chosen = chosen[: self.tuple_length]
        return chosen

    # converts keyword arguments to a tensordict, and the result to a tuple
    @dispatch(source="_keyword_keys", dest="_tuple_keys")  # type: ignore[untyped-decorator]
    def _call_on_columns(self, tensordict: TensorDictBase, **unknown: Any) -> Any:
        """Compute the losses of tensors by keyword."""
        if unknown:
            raise TypeError(
                f"{type(self).__name__} reads no entry for the keyword {', '.join(unknown)}: it takes a tensordict, or "
                f"tensors named {', '.join('_'.join(as_tuple(key)) for key in self._keyword_keys)}"
            )
        return self(tensordict)

    @override
    def select_out_keys(self, *out_keys: NestedKey) -> Self:
        """Return only these losses and diagnostics from now on; :meth:`reset_out_keys` reverts it.

        Raises:
            ValueError: the loss does not write one of them.
        """
        keys = unravel_key_list(list(out_keys))
        unknown = [key for key in keys if key not in self._out_keys]
        if unknown:
            raise ValueError(f"{type(self).__name__} writes no {unknown}; it writes {self._out_keys}")

        self._out_keys_apparent = keys
        return self

    @override
    def reset_out_keys(self) -> Self:
        """Return all losses and diagnostics again."""
        self._out_keys_apparent = self._out_keys
        return self

    def set_keys(self, **keys: NestedKey | None) -> None:
        """Change the keys of entries that the loss reads or writes.

        Args:
            keys: the names in ``tensor_keys``; None leaves a name as it is. ``reward``, ``done`` and
                ``terminated`` are read under ``"next"``.

        Raises:
            ValueError: a name is unknown.
        """
        self._name_entries(renamed(self.tensor_keys, keys))
        self.in_keys = self.in_keys  # a subclass with its own in_keys sets them again afterwards

    def _name_entries(self, keys: Mapping[str, NestedKey]) -> None:
        """Set the keys of all entries, by name."""
        self.tensor_keys = KeyNames(keys)
        #: The batch key of each entry, by its name in :attr:`tensor_keys`.
        self.places = dict(keys)
        for name in _UNDER_NEXT:
            if name in keys:
                self.places[name] = under_next(keys[name])

    def inputs_of(self, batch: TensorDictBase) -> LossInputs:
        """Return ``batch`` ``[*B]`` with the mask of its valid rows, which excludes padding and burn-in.

        A row counts if ``("collector", "mask")`` and ``"shifted_valid"`` (written by estimators) are True or missing,
        and if at least ``burn_in`` rows of its run precede it.

        Raises:
            ValueError: there are no rows at all.
        """
        if not isinstance(batch, TensorDictBase):
            checks.check_rows(batch)
        if batch.batch_size.numel() == 0:  # TensorDict.numel() is at least 1
            raise ValueError(f"{type(self).__name__} needs at least one row, got a batch {list(batch.shape)}")

        keys = self.tensor_keys
        mask = None
        for key in (keys["mask"], keys["valid"]):
            if get_entry(batch, key) is not None:
                mask = mask_and(mask, marker(batch, key))

        real = mask

        if self.burn_in:
            # rows from position burn_in of each run on
            warm = steps_into_run(run_starts(batch, **self.boundary_keys)) >= self.burn_in
            mask = mask_and(mask, warm)
            if on_host(warm) and not bool(warm.any()):
                self._warn_once(
                    f"no run of the batch has more than burn_in={self.burn_in} rows, so no row counts and the loss "
                    "is 0: draw longer slices or burn in fewer rows"
                )

        padded = real is not None and get_entry(batch, keys["mask"]) is not None
        readable = batch
        if padded:
            readable = zero_padding(batch, keys["mask"], self.in_keys)

        return LossInputs(batch, readable, mask, real=real)

    @property
    def boundary_keys(self) -> dict[str, NestedKey]:
        """The keyword arguments of :func:`flatroll.layout.run_ends` that match this loss's keys."""
        names = {"is_init_key": "is_init", "done_key": "done", "traj_key": "traj_ids", "mask_key": "mask"}
        return {argument: self.key(name) for argument, name in names.items()}

    def key(self, name: str) -> NestedKey:
        """Return the key set for ``name`` in :meth:`set_keys`, or its default."""
        return self.places[name]

    def named_keys(self, name: str) -> list[NestedKey]:
        """Return the :meth:`key` in a list, or the list of keys where a loss takes several for a name."""
        key = self.places[name]
        if isinstance(key, list):
            return key
        return [key]

    def entry(self, inputs: LossInputs, name: str) -> Tensor:
        """Return the batch's entry for ``name`` (a name of :meth:`set_keys`) unchanged.

        Raises:
            KeyError: it is missing; the message names what writes it.
        """
        key = self.places[name]
        value: Tensor | None = get_entry(inputs.batch, key)
        if value is None:
            default = self.default_keys.get(name, name)
            if name in _UNDER_NEXT:
                default = under_next(default)
            raise self.missing_entry_error(inputs, key, default)
        return value

    def missing_entry_error(
        self, inputs: LossInputs, key: NestedKey, default: NestedKey | None = None, hint: str = ""
    ) -> KeyError:
        """Return the error for a missing entry: the loss, the entry, what writes it, and which entries there are."""
        text = missing_marker(key, inputs.batch.keys(True, True), default).args[0]
        return KeyError(f"{type(self).__name__}: {text}{hint}")

    def column(self, inputs: LossInputs, name: str) -> Tensor:
        """Return the entry for ``name``, ``[*B]`` or ``[*B, 1]``, as ``[*B]``, 0 where the mask is False."""
        key = self.places[name]
        column = get_entry(inputs.batch, key)
        if column is None:
            column = self.entry(inputs, name)  # the error says what writes the entry
        column = flat_column(column, inputs.batch, key)

        if inputs.mask is None:
            return column
        return zero_masked(column, inputs.mask)

    def reduce(self, inputs: LossInputs, loss: Tensor, weights: Tensor | None = None) -> Tensor:
        """Reduce the loss of each row, ``[*B]`` or ``[*B, 1]``, according to ``reduction``.

        Args:
            inputs: the batch and its mask.
            loss: of each row.
            weights: ``[*B]``, factors of the rows, at least 0; a mean is ``sum(w * loss) / sum(w)``. Default: 1.

        Raises:
            ValueError: the loss has another shape, or a weight of a row that counts is negative or not finite.
        """
        loss = flat_column(loss, inputs.batch, "loss")  # [*B, 1] and a mask [*B] would broadcast to [*B, *B]
        if weights is not None and on_host(weights):
            real = zero_masked(weights, inputs.mask)
            if not bool(((real >= 0) & (real < math.inf)).all()):
                raise ValueError(
                    f"{type(self).__name__}: weights of rows must be finite and at least 0, "
                    f"got {float(real.min())} to {float(real.max())}"
                )

        if self.reduction == "mean":
            return masked_mean(loss, inputs.mask, weights)

        if weights is not None:
            loss = loss * weights
        counted = zero_masked(loss, inputs.mask)
        if self.reduction == "sum":
            return counted.sum()
        return counted

    def register_coeff_buffer(
        self,
        name: str,
        value: float | Tensor | None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Register a coefficient as a buffer, which a schedule may change between calls.

        Either way changes it in place: ``loss.entropy_coeff = 0.1`` and ``loss.entropy_coeff.copy_(0.1)``. It is saved
        with the loss and moves with ``loss.to(device)``.

        Args:
            name: of the attribute.
            value: a finite number, or a tensor of one; None for no coefficient, until a number is assigned.
            device, dtype: of the buffer. Default: the device of the loss's first parameter, torch's default dtype.

        Raises:
            ValueError: anything else.
        """
        if value is None:
            self.register_buffer(name, None)
            return

        is_number = isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)
        try:
            finite = is_number and math.isfinite(float(value))
        except (RuntimeError, ValueError, OverflowError):  # a tensor of several numbers, or an empty one
            finite = False
        if not finite:
            raise ValueError(f"{name} must be a float or a scalar tensor, got {value!r}")

        if isinstance(value, Tensor):
            number = value.detach()
        else:
            number = torch.tensor(float(value))

        if device is None:
            device = next((parameter.device for parameter in self.parameters()), None)
        else:
            device = checks.check_device("device", device)

        kind = dtype or torch.get_default_dtype()
        self.register_buffer(name, number.reshape(()).to(device, kind, copy=True))

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        is_number = isinstance(value, (int, float))
        coefficients: dict[str, Any] = self.__dict__.get("_buffers", {}) if is_number else {}
        if name not in coefficients:
            super().__setattr__(name, cast(Any, value))
        elif coefficients[name] is None:
            self.register_coeff_buffer(name, value)
        elif not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
        else:
            coefficients[name].fill_(value)

    def reset(self) -> None:
        """Reset adaptive coefficients to their initial values; most losses have none."""

    @override
    def reset_parameters_recursive(self, parameters: TensorDictBase | None = None) -> TensorDictBase | None:
        """Reinitialise all networks and copy them into their target copies."""
        made: TensorDictBase | None = super().reset_parameters_recursive(parameters)

        if parameters is None:
            for network, target in self.delayed_networks().values():
                target.load_state_dict(network.state_dict())
        return made

    def delayed_networks(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        """Pairs (network, target copy) by name: the attributes ``<name>`` and ``target_<name>``."""
        children = dict(self.named_children())
        pairs = {}
        for name, network in children.items():
            target = children.get(f"target_{name}")
            if target:
                pairs[name] = (network, target)
        return pairs


def copy_network(network: N) -> N:
    """Return a deep copy that shares the running statistics of ``network``; only their owner updates them."""
    return deepcopy(network, {id(part): part for part in network.modules() if isinstance(part, Moments)})


def target_copy(network: N) -> N:
    """Return a target network: a deep copy without gradients, which shares the statistics of a `RunningNorm`.

    Keep it in a loss as ``self.target_<name>`` beside ``self.<name>``, and
    :class:`~flatroll.estimators.SoftUpdate` and :class:`~flatroll.estimators.HardUpdate` move it.

    >>> target_copy(nn.Linear(2, 1)).weight.requires_grad
    False
    """
    checks.check_type("network", network, nn.Module, "a torch.nn.Module")
    return copy_network(network).requires_grad_(False)


def parameters_and_buffers(network: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """List the parameters and buffers of a network, each once."""
    # keyed by identity, so that shared tensors are listed once. Module.parameters() would also build names
    modules: dict[nn.Module, None] = {}
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    left: list[nn.Module | None] = [network]

    while left:
        module = left.pop()
        if module is None or module in modules:
            continue

        modules[module] = None

        for own, found in ((module._parameters, parameters), (module._buffers, buffers)):
            for tensor in own.values():
                if tensor is not None:
                    found[id(tensor)] = tensor
        left += module._modules.values()

    return list(parameters.values()), list(buffers.values())


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
    # parameters that were frozen before stay frozen afterwards
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)

    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


class Frozen:
    """A network with detached parameters, for ``torch.compile``, which does not support :func:`frozen`."""

    def __init__(self, network: TensorDictModuleBase) -> None:
        self.network = network
        self.out_keys = network.out_keys

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Call the network with its parameters detached."""
        parameters = {name: parameter.detach() for name, parameter in self.network.named_parameters()}
        out: TensorDictBase = functional_call(self.network, parameters, (batch,))
        return out


def shared_parameters(network: nn.Module, other: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that both networks share."""
    others = set(other.parameters())
    return [parameter for parameter in network.parameters() if parameter in others]


class TargetNetUpdater:
    """Base class of the updaters of a loss's target copies."""

    def __init__(self, loss_module: LossModule) -> None:
        if not isinstance(loss_module, LossModule):
            raise TypeError(f"loss_module must be a loss of flatroll, got {type(loss_module).__name__}")
        self.loss_module = loss_module

        if not loss_module.delayed_networks():
            raise ValueError(
                f"this {type(loss_module).__name__} has no delayed network: build it with delay_value=True (DQNLoss, "
                "ReinforceLoss, SACLoss with a value_network), delay_qvalue=True or delay_actor=True (SACLoss, "
                "DiscreteSACLoss); other losses need no updater"
            )

    @torch.no_grad()
    def init_(self) -> None:
        """Copy the networks into their target copies; they are equal when the loss is built."""
        self._move(1.0)

    def step(self) -> None:
        """Update the target copies; call it once after each optimizer step."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    @torch.no_grad()
    def _move(self, share: float) -> None:
        """Move the copies' parameters by the fraction ``share`` towards the networks'; copy buffers."""
        for source, target in self.loss_module.delayed_networks().values():
            learned, read = parameters_and_buffers(source)
            followers, copies = parameters_and_buffers(target)
            if followers:  # target += share * (network - target), all parameters in one call
                torch._foreach_lerp_(followers, learned, share)  # pyright: ignore[reportPrivateImportUsage]
            for buffer, copy in zip(read, copies, strict=True):
                copy.copy_(buffer)

    def state_dict(self) -> dict[str, Any]:
        """Return the updater's state; the target copies themselves are in the loss's state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the updater from a :meth:`state_dict`."""


class SoftUpdate(TargetNetUpdater):
    """Polyak averaging: ``target = eps * target + (1 - eps) * network`` at each :meth:`step`.

    Buffers (running statistics) are copied.

    Args:
        loss_module: a loss with target copies.
        eps: weight of the old target, in [0, 1].
        tau: weight of the network, ``1 - eps``. Exactly one of the two is required.

    Raises:
        ValueError: there is no target copy; both or none of ``eps`` and ``tau`` are given, or one is outside [0, 1].

    Example:
        >>> from flatroll.estimators import DQNLoss
        >>> network = torch.nn.Linear(2, 3)
        >>> loss = DQNLoss(network)
        >>> copy = loss.target_value_network.module
        >>> _ = torch.nn.init.ones_(network.bias), torch.nn.init.zeros_(copy.bias)
        >>> SoftUpdate(loss, tau=0.25).step()
        >>> copy.bias.data
        tensor([0.2500, 0.2500, 0.2500])

    References:
        T. P. Lillicrap et al., Continuous control with deep reinforcement learning,
        https://arxiv.org/abs/1509.02971
    """

    def __init__(
        self, loss_module: LossModule, *, eps: float | None = None, tau: float | None = None
    ) -> None:
        super().__init__(loss_module)
        if (eps is None) == (tau is None):
            raise ValueError(
                f"pass either eps (the share of the old parameters) or tau (1 - eps), got {eps} and {tau}"
            )

        if tau is None:
            share = cast(float, eps)
            checks.check_number("eps", share, least=0, most=1)
            self.eps = share
        else:
            checks.check_number("tau", tau, least=0, most=1)
            self.eps = 1.0 - tau

    @override
    def step(self) -> None:
        self._move(1.0 - self.eps)


class HardUpdate(TargetNetUpdater):
    """Copy the networks into their target copies at every ``value_network_update_interval``-th :meth:`step`.

    Args:
        loss_module: a loss with target copies.
        value_network_update_interval: steps from one copy to the next. Default: 1000.

    Raises:
        ValueError: no target copy, or an interval below 1.

    Example:
        >>> from flatroll.estimators import DQNLoss
        >>> network = torch.nn.Linear(2, 3)
        >>> loss = DQNLoss(network)
        >>> updater, copy = HardUpdate(loss, value_network_update_interval=2), loss.target_value_network.module
        >>> _ = torch.nn.init.ones_(network.bias), torch.nn.init.zeros_(copy.bias)
        >>> for _ in range(2):
        ...     updater.step()
        ...     print(torch.equal(copy.bias, network.bias))
        False
        True

    References:
        V. Mnih et al., Human-level control through deep reinforcement learning, 2015.
    """

    def __init__(self, loss_module: LossModule, *, value_network_update_interval: int = 1000) -> None:
        super().__init__(loss_module)
        self.value_network_update_interval = checks.check_whole_number(
            "value_network_update_interval", value_network_update_interval
        )
        self.counter = 0

    @override
    def step(self) -> None:
        self.counter += 1
        if self.counter == self.value_network_update_interval:
            self.counter = 0
            self._move(1.0)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"counter": self.counter}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counter = int(state_dict["counter"])
