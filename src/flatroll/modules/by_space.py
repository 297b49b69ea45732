"""`actor`, `critic`, `q_network`: build networks for an env's spaces, as plain tensordict modules."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from typing_extensions import override

from flatroll.layout.checks import (
    check_choice,
    check_flags,
    check_key_names,
    check_keys,
    check_number,
    check_options,
    check_sizes,
    check_type,
    check_usable_device,
    check_whole_number,
)
from flatroll.layout.column_actor import Columns
from flatroll.layout.keys import (
    ACTION,
    ACTION_MASK,
    IS_INIT,
    MASK,
    NestedKey,
    as_tuple,
    is_hidden,
    marker,
    next_key,
    plain_key,
    require,
)
from flatroll.layout.spaces import (
    MOST_OPTIONS,
    MaskForm,
    find_part,
    first_options,
    mask_form,
    mask_shapes,
    observation_leaves,
    option_counts,
    space_leaves,
    widest_space,
)
from flatroll.modules.delta_net import DeltaNetModule
from flatroll.modules.distributions import (
    CombinedCategorical,
    Gaussian,
    JointBernoulli,
    JointCategorical,
    SquashedGaussian,
)
from flatroll.modules.forgetful import FFMModule
from flatroll.modules.linear import LinearRecurrentModule, MinGRUModule
from flatroll.modules.lru import LRUModule
from flatroll.modules.recurrent import GRUModule, LSTMModule, RecurrentModule
from flatroll.modules.running_norm import RunningNorm
from flatroll.modules.selective import S6Module
from flatroll.modules.transformer import TransformerModule

#: An env; only its spaces are read.
SpacedEnv: TypeAlias = Any
N = TypeVar("N", bound=nn.Module)
Recurrent: TypeAlias = Literal[
    "gru", "lstm", "mingru", "linear", "lru", "s6", "ffm", "deltanet", "transformer"
]
Cnn: TypeAlias = Literal["small", "impala"]

#: The memories with a state in each row, by the value of ``recurrent``; each is made of the sizes of its input and
#: output, and of keys.
MEMORIES: dict[str, Any] = {
    "gru": GRUModule,
    "lstm": LSTMModule,
    "mingru": MinGRUModule,
    "linear": LinearRecurrentModule,
    "lru": LRUModule,
    "s6": S6Module,
    "ffm": FFMModule,
    "deltanet": DeltaNetModule,
}
_KINDS: dict[str, Any] = {**MEMORIES, "transformer": TransformerModule}

#: Minimum side of an image for the three strided layers of the small CNN.
_LEAST_SIDE = 36
_WAY_OUT = "build the network of tensordict modules, or change the space with a wrapper of gymnasium"


def actor(
    env: SpacedEnv,
    *,
    in_keys: Sequence[NestedKey] | None = None,
    hidden: Sequence[int] = (64, 64),
    activation: type[nn.Module] = nn.Tanh,
    cnn: Cnn = "small",
    recurrent: Recurrent | None = None,
    std: Literal["independent", "dependent"] = "independent",
    squash: bool | None = None,
    norm: bool = True,
    action_mask: bool | None = None,
    device: torch.device | str | None = None,
) -> ProbabilisticTensorDictSequential:
    """Build an actor for an env's spaces: a body for the observation and a distribution of actions.

    | action space                     | distribution |
    |---|---|
    | Discrete                         | ``torch.distributions.Categorical`` (`JointCategorical` where it has a start) |
    | MultiDiscrete                    | `JointCategorical` |
    | MultiBinary                      | `JointBernoulli` |
    | Box of few integers              | `JointCategorical` of the integers within its bounds |
    | Choices, masked in combination   | `CombinedCategorical` |
    | Box with bounds                  | `SquashedGaussian` |
    | Box without, or ``squash=False`` | `Gaussian` |
    | Dict, Tuple of these             | a ``CompositeDistribution`` of them, one log-probability for each part |

    The body concatenates features of each entry: a CNN for images (a Box of three dims, or of unsigned bytes with two
    or four; channels first or last), one-hot vectors for Discrete and MultiDiscrete, flattened numbers for others. An
    MLP follows. Weights are orthogonal, those of the head scaled by 0.01.

    The result is a plain ``ProbabilisticTensorDictSequential``: print it, index it (``actor[0]``), replace its
    parts. It writes ``"action"`` and its log-probability, and samples unless `set_interaction_type` says otherwise.

    Args:
        env: has Gymnasium's ``single_observation_space`` and ``single_action_space`` (or, of one env,
            ``observation_space`` and ``action_space``).
        in_keys: the entries of a Dict observation that the network reads, in this order, such as ``["policy"]`` or
            ``[("robot", "joints")]``; the name of a nested Dict stands for all of its entries. A legal-action mask is
            read besides. Default None: all entries.
        hidden: sizes of the layers between the entries' features and the head; with ``recurrent`` the last one is
            the size of the memory. Default ``(64, 64)``. ``(512,)`` with images is the network of Mnih et al.
        activation: between the layers. Default ``nn.Tanh``.
        cnn: the network for images: ``"small"``, three layers with strides 4, 2, 1 (two of 3 x 3 for sides below 36),
            or ``"impala"``, fifteen layers in residual blocks.
        recurrent: the last layer is a memory, whose state collectors carry: ``"gru"`` (`GRUModule`), ``"lstm"``
            (`LSTMModule`), ``"mingru"`` (`MinGRUModule`), ``"linear"`` (`LinearRecurrentModule`), ``"lru"``
            (`LRUModule`), ``"s6"`` (`S6Module`), ``"ffm"`` (`FFMModule`), ``"deltanet"`` (`DeltaNetModule`) or
            ``"transformer"`` (`TransformerModule`, two gated layers with 4 heads and a context of 64 rows). Default
            None: no memory.
        std: the standard deviation of a Box's numbers: ``"independent"`` of the observation, one parameter for each
            number, or a second output of the network, ``"dependent"``.
        squash: squash the numbers of a Box by tanh into its bounds. Default None: where all bounds are finite.
        norm: begin with a `RunningNorm` for each floating Box that is not an image. The statistics change
            only when `update_norms` is called with the actor and a batch. Default True.
        action_mask: read ``"action_mask"``, and set the probability of illegal actions to 0. Its shape is ``[n]`` for
            Discrete, ``[sum(nvec)]`` for MultiDiscrete and Boxes of few integers (``[*shape, n]`` if all numbers have
            n options), ``[2 n]`` for the n flags of a MultiBinary (each off, on); a Dict of masks for a Dict or Tuple.
            A mask in the observation may also have the shape ``nvec``, one number for each combination of choices.
            Default None: if the observation is a Dict with such an entry; for an action space without choices, like a
            Box of floats, the entry is an ordinary input. True: also if it is in ``info``; a `Collector` then stores
            it. False: an entry of this name is an ordinary input.
        device: of the weights. Default: torch's.

    Raises:
        TypeError: ``env`` has no Gymnasium spaces.
        ValueError: a space is not supported; the observation has no entry of ``in_keys``, or they name one twice or
            the mask; ``squash=True`` without finite bounds; the mask's shape does not fit the
            action space; ``action_mask=True`` for an action space without choices; when called: a row has no legal
            action (checked on the CPU only).

    References:
        V. Mnih et al., Human-level control through deep reinforcement learning, 2015; L. Espeholt et al., IMPALA, 2018,
        https://arxiv.org/abs/1802.01561; M. Andrychowicz et al., What matters in on-policy reinforcement learning?,
        2020, https://arxiv.org/abs/2006.05990.

    >>> import gymnasium as gym
    >>> from tensordict import TensorDict
    >>> policy = actor(gym.make_vec("CartPole-v1", num_envs=2))
    >>> out = policy(TensorDict({"observation": torch.zeros(5, 4)}, [5]))
    >>> out["action"].shape, out["action_log_prob"].shape
    (torch.Size([5]), torch.Size([5]))
    """
    check_choice("std", std, ("independent", "dependent"))
    if squash is not None:
        check_flags(squash=squash)
    if action_mask is not None:
        check_flags(action_mask=action_mask)

    observation, action = _env_spaces(env)
    masks = _find_masks(observation, action, action_mask)
    in_observation = any(mask.shape is not None for mask in masks.values())
    leaves = _input_leaves(observation, in_keys, without_mask=in_observation)
    trunk = _make_trunk(observation, leaves, hidden, activation, cnn, recurrent, norm)

    parts = trunk.parts
    out_keys: list[Any] = []  # out_keys of the last head
    names: dict[NestedKey, NestedKey] = {}  # part of the action, () of one without parts -> its key
    kinds: dict[NestedKey, type] = {}
    options: dict[NestedKey, dict[str, Any]] = {}
    chosen = space_leaves(action, (ACTION,))
    for key, path in chosen:
        space = find_part(action, path)
        inner = tuple(map(str, path))
        mask = masks.get(path)
        combined = mask is not None and mask.form == "combinations"
        kind, kwargs, head, written = _make_head(
            space, trunk.width, std, squash, ".".join(inner), combined=combined
        )

        # Nested as the action is: names have no dots but those of the space, so that rows can be exported.
        prefix = ("params", *inner) if path else ()
        out_keys = [plain_key((*prefix, entry)) for entry in written]
        parts.append(TensorDictModule(head, [trunk.features], out_keys))
        if mask is not None:
            parts.append(mask.module_for(space, out_keys[0]))

        part = plain_key(inner)
        names[part] = key
        kinds[part] = kind
        options[part] = kwargs

    sampling: dict[str, Any] = {
        "default_interaction_type": InteractionType.RANDOM,
        "return_log_prob": True,
    }
    if len(chosen) == 1 and not chosen[0][1]:
        sampling |= {"distribution_class": kinds[()], "distribution_kwargs": options[()]}
        parts.append(ProbabilisticTensorDictModule(out_keys, [ACTION], **sampling))
    else:
        sampling["distribution_class"] = CompositeDistribution
        sampling["distribution_kwargs"] = {
            "distribution_map": kinds,
            "name_map": names,
            "extra_kwargs": options,
        }
        parts.append(ProbabilisticTensorDictModule(["params"], list(names.values()), **sampling))

    return _on_device(ProbabilisticTensorDictSequential(*parts), device)


def critic(
    env: SpacedEnv,
    *,
    in_keys: Sequence[NestedKey] | None = None,
    hidden: Sequence[int] = (64, 64),
    activation: type[nn.Module] = nn.Tanh,
    cnn: Cnn = "small",
    recurrent: Recurrent | None = None,
    norm: bool = True,
    actor: ProbabilisticTensorDictSequential | None = None,
    shared: bool = False,
    out_key: NestedKey = "state_value",
    device: torch.device | str | None = None,
) -> TensorDictSequential:
    """Build a critic for an env's observations, which writes a value ``[*B, 1]``.

    Its body is as that of `flatroll.modules.actor`; an ``action_mask`` of a Dict observation is left out if it is a
    mask of the action space.

    Args:
        env, in_keys, hidden, activation, cnn, norm, device: see `flatroll.modules.actor`. A critic may read entries
            that its actor does not (privileged observations).
        recurrent: likewise. The critic's state is not stored and starts from zeros at each run of a batch; with
            ``shared=True`` it is the actor's, which is stored.
        actor: an actor of `flatroll.modules.actor` for the same env: its `RunningNorm` modules are shared, so that
            one update serves both. Default None.
        shared: use the actor's whole body, including weights and recurrent state; only the head is new. Then
            ``hidden``, ``activation``, ``cnn`` and ``recurrent`` have no effect. Default False.
        out_key: of the value, if it is not the only one: the ``value_key`` of its estimator. Default
            ``"state_value"``.

    Raises:
        ValueError: ``shared`` without an ``actor`` or with ``in_keys``, or see `flatroll.modules.actor`.

    >>> import gymnasium as gym
    >>> from tensordict import TensorDict
    >>> value = critic(gym.make_vec("CartPole-v1", num_envs=2))
    >>> value(TensorDict({"observation": torch.zeros(5, 4)}, [5]))["state_value"].shape
    torch.Size([5, 1])
    """
    check_flags(shared=shared)
    check_keys(out_key=out_key)
    taken: list[Any] = []
    if actor is not None:
        check_type("actor", actor, TensorDictSequential, "an actor of flatroll.modules.actor")
        taken = list(actor.module)
    if shared and actor is None:
        raise ValueError(
            "shared=True needs the actor whose body is shared: critic(env, actor=policy, shared=True)"
        )
    if shared and in_keys is not None:
        raise ValueError(
            f"in_keys={in_keys!r} needs a body of the critic's own, but shared=True takes the actor's: leave one out"
        )

    if shared:
        ends = [i for i, part in enumerate(taken) if FEATURES in part.out_keys]
        if not ends:
            raise ValueError(
                f"actor must be made by flatroll.modules.actor: no part of it writes {FEATURES!r}"
            )

        heads = [part for part in taken[ends[0] + 1 :] if FEATURES in part.in_keys]
        width = next(layer.in_features for layer in heads[0].modules() if isinstance(layer, nn.Linear))
        trunk = _Trunk(taken[: ends[0] + 1], FEATURES, width)
    else:
        options: dict[str, Any] = {"norms": taken, "prefix": "_value", "state": "critic_state"}
        observation, action = _env_spaces(env)
        has_mask = bool(_find_masks(observation, action, None, strict=False))
        leaves = _input_leaves(observation, in_keys, without_mask=has_mask)
        trunk = _make_trunk(observation, leaves, hidden, activation, cnn, recurrent, norm, **options)

    return _on_device(TensorDictSequential(*trunk.with_values(plain_key(out_key), 1)), device)


def q_network(
    env: SpacedEnv,
    *,
    in_keys: Sequence[NestedKey] | None = None,
    hidden: Sequence[int] = (64, 64),
    activation: type[nn.Module] = nn.ReLU,
    cnn: Cnn = "small",
    recurrent: Recurrent | None = None,
    norm: bool = True,
    action_mask: bool | None = None,
    epsilon: float = 0.0,
    device: torch.device | str | None = None,
) -> TensorDictSequential:
    """Build a network of action values for an env's spaces.

    For a Discrete space it writes ``"action_value"`` ``[*B, n]`` and the best ``"action"``, so that it is the network
    of `flatroll.estimators.DQNLoss` and the policy; illegal actions get the lowest number, so that neither the policy
    nor the maximum over the next state's actions selects one. For a Box it also reads ``"action"`` and writes
    ``"state_action_value"`` ``[*B, 1]``, as `flatroll.estimators.SACLoss` expects.

    Args:
        env, in_keys, hidden, cnn, recurrent, norm, action_mask, device: see `flatroll.modules.actor`.
        activation: default ``nn.ReLU``.
        epsilon: probability of a random legal action while a collector explores; see `EpsilonGreedy`. Default 0.
            `set_epsilon` changes it during training.

    Raises:
        ValueError: the space is not supported, ``epsilon`` is given for a Box, or see `flatroll.modules.actor`.

    >>> import gymnasium as gym
    >>> from tensordict import TensorDict
    >>> net = q_network(gym.make_vec("CartPole-v1", num_envs=2))
    >>> net(TensorDict({"observation": torch.zeros(5, 4)}, [5]))["action_value"].shape
    torch.Size([5, 2])
    """
    if action_mask is not None:
        check_flags(action_mask=action_mask)

    observation, action = _env_spaces(env)
    box = isinstance(action, spaces.Box)
    if box and recurrent is not None:
        raise ValueError(
            f"recurrent={recurrent!r} needs a Discrete action space, with one value per action, got {action}"
        )
    if box and epsilon != 0:
        raise ValueError(
            f"epsilon={epsilon!r} needs a Discrete action space, got {action}: the network only rates the actor's "
            "actions, and the actor explores"
        )
    if not box and not (isinstance(action, spaces.Discrete) and action.start == 0):
        raise ValueError(
            f"q_network needs a Discrete action space that counts from 0, or a Box, got {action}: {_WAY_OUT}"
        )
    if box and action_mask:
        raise ValueError(
            f"action_mask=True needs a Discrete action space, got {action}: the network only rates the actor's actions"
        )

    masks = _find_masks(observation, action, action_mask, strict=not box)
    in_observation = any(mask.shape is not None for mask in masks.values())
    rated = action if box else None
    leaves = _input_leaves(observation, in_keys, without_mask=in_observation)
    trunk = _make_trunk(observation, leaves, hidden, activation, cnn, recurrent, norm, action=rated)

    if box:
        return _on_device(TensorDictSequential(*trunk.with_values("state_action_value", 1)), device)

    parts = trunk.with_values("action_value", int(action.n))
    if masks:  # a Discrete space's only one
        parts.append(ActionMask("action_value", ACTION_MASK, option_counts(action), strict=False))
    parts.append(TensorDictModule(EpsilonGreedy(epsilon), ["action_value"], [ACTION]))
    return _on_device(TensorDictSequential(*parts), device)


class ActionMask(TensorDictModuleBase):
    """Sets illegal actions to the lowest number: logits get probability 0, values are never the best.

    Args:
        key: logits or values, ``[*B, sum(counts)]``, which are replaced.
        mask_key: True (or 1) where an action is legal, of the same shape, or ``[*B, ..., k]`` where all choices have
            k options; with one choice any shape ``[*B, ...]`` of as many numbers. Default ``"action_mask"``.
        counts: number of options of each choice. Default None: all are those of one choice.
        strict: refuse rows in which a choice has no legal option. Checked on the CPU only; on other devices, and if
            not strict, all options of such a choice remain. Default True.
        binary: the choices are flags: the logits ``[*B, n]`` are those of the value 1, and the mask ``[*B, 2 n]`` has
            two numbers for each flag, whether 0 and whether 1 is legal. Not with ``counts``. Default False.

    Raises:
        ValueError: ``binary`` with ``counts``; the mask has another shape; ``strict``, and a row has no legal action.

    >>> from tensordict import TensorDict
    >>> rows = TensorDict({"logits": torch.zeros(1, 3), "action_mask": torch.tensor([[1, 0, 1]])}, [1])
    >>> ActionMask("logits")(rows)["logits"].softmax(-1)
    tensor([[0.5000, 0.0000, 0.5000]])
    """

    def __init__(
        self,
        key: NestedKey,
        mask_key: NestedKey = ACTION_MASK,
        counts: Sequence[int] | None = None,
        *,
        strict: bool = True,
        binary: bool = False,
    ) -> None:
        super().__init__()
        check_keys(key=key, mask_key=mask_key)
        check_flags(strict=strict, binary=binary)
        if binary and counts is not None:
            raise ValueError(f"counts must be left out with binary=True, where all are 2, got {counts}")

        read: list[Any] = [key, mask_key]
        self.in_keys = read
        self.out_keys = read[:1]
        self.counts = None if counts is None else check_sizes("counts", counts)
        self.strict = strict
        self.binary = binary

    @override
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace the entry in the batch ``[*B]``; return it."""
        read: list[Any] = self.in_keys
        key, mask_key = read

        logits = require(tensordict, key)
        mask = require(tensordict, mask_key)
        real = None  # the padding may be empty
        if tensordict.get(MASK, None) is not None:
            real = marker(tensordict, MASK)
        tensordict.set(key, self._masked(logits, mask, real))
        return tensordict

    def takes_columns(self) -> bool:
        """Return True: see `flatroll.layout.column_actor`."""
        return True

    def on_columns(self, columns: Columns) -> None:
        """Do what :meth:`forward` does, with columns by key and without padding."""
        read: list[Any] = self.in_keys
        key, mask_key = (plain_key(as_tuple(one)) for one in read)
        columns[key] = self._masked(columns[key], columns[mask_key], None)

    def _masked(self, logits: Tensor, mask: Tensor, real: Tensor | None) -> Tensor:
        """Return the logits or values, with illegal ones replaced; ``real`` marks the rows that must allow one."""
        mask_key = self.in_keys[1]
        counts = (2,) * logits.shape[-1] if self.binary else self.counts
        mask = self._flatten(mask, logits, counts)
        whole = check_options(f"batch[{mask_key!r}]", mask, counts, strict=self.strict, real=real)

        lowest = torch.finfo(logits.dtype).min
        legal = whole[0]
        if len(whole) > 1:
            legal = torch.cat(whole, -1)

        if self.binary:
            off, on = legal.reshape(*logits.shape, 2).unbind(-1)
            # The probability of 1 is 0 where 1 is illegal, and 1 where 0 is.
            logits = torch.where(on, logits, lowest)
            return torch.where(off, logits, -lowest)
        return torch.where(legal, logits, lowest)

    def _flatten(self, mask: Tensor, logits: Tensor, counts: Sequence[int] | None) -> Tensor:
        """Return the mask as ``[*B, options]``; ValueError if its shape does not fit."""
        rows = logits.shape[:-1]
        options = logits.shape[-1]
        if self.binary:
            options *= 2
        if mask.shape == (*rows, options):
            return mask

        own = mask.shape[len(rows) :]
        if counts is None:
            fits = math.prod(own) == options
        else:
            fits = mask_form(counts, own) == "options"

        if mask.shape[: len(rows)] != rows or not fits:
            each = "one number for each action"
            if self.binary:
                each = "two numbers for each flag"
            raise ValueError(
                f"batch[{self.in_keys[1]!r}] must have shape {(*rows, options)}, {each}, got {tuple(mask.shape)}"
            )
        return mask.reshape(*rows, options)


class EpsilonGreedy(nn.Module):
    """Chooses the best action or, while a collector explores, with probability ``epsilon`` a random legal one.

    It explores under the interaction type ``"random"``, the default of collectors; in losses, in `evaluate` and in a
    plain call it chooses the best action.

    Args:
        epsilon: in [0, 1]; a buffer, which goes to workers with the weights. `set_epsilon` changes it. Default 0.

    Called with values ``[*B, A]`` it returns int64 ``[*B]``. Values as low as `ActionMask` makes them are illegal.

    >>> from tensordict.nn import set_interaction_type
    >>> with set_interaction_type("deterministic"):
    ...     EpsilonGreedy(0.5)(torch.tensor([[1.0, 2.0, 0.0]]))
    tensor([1])
    """

    epsilon: Tensor

    def __init__(self, epsilon: float = 0.0) -> None:
        super().__init__()
        check_number("epsilon", epsilon, least=0, most=1)
        self.register_buffer("epsilon", torch.tensor(float(epsilon)))

    @override
    def forward(self, value: Tensor) -> Tensor:
        best = value.argmax(-1)
        if interaction_type() is not InteractionType.RANDOM:
            return best

        # A random number for each legal action, -1 for illegal ones; the largest is chosen.
        lots = torch.rand_like(value).masked_fill(value == torch.finfo(value.dtype).min, -1.0)
        explores = torch.rand(best.shape, device=value.device) < self.epsilon
        return torch.where(explores, lots.argmax(-1), best)


def set_epsilon(network: nn.Module, epsilon: float) -> None:
    """Set the probability of a random action in all `EpsilonGreedy` modules of a network, such as a `q_network`.

    Args:
        network: the network.
        epsilon: in [0, 1].

    Raises:
        ValueError: ``epsilon`` is outside, or the network has no `EpsilonGreedy`.

    >>> import gymnasium as gym
    >>> net = q_network(gym.make_vec("CartPole-v1", num_envs=2), epsilon=1.0)
    >>> set_epsilon(net, 0.05)
    """
    check_type("network", network, nn.Module, "a module")
    check_number("epsilon", epsilon, least=0, most=1)
    found = [module for module in network.modules() if isinstance(module, EpsilonGreedy)]
    if not found:
        raise ValueError(
            "network must have an EpsilonGreedy module, like a q_network for a Discrete space, but has none"
        )

    for module in found:
        module.epsilon.fill_(epsilon)


class _Mask(NamedTuple):
    """A legal-action mask of one part of an action.

    Attributes:
        key: of the mask in a batch.
        form: see `mask_form`.
        shape: of one row's mask in the observation; None if it is in ``info``.
    """

    key: NestedKey
    form: MaskForm
    shape: tuple[int, ...] | None

    def module_for(self, space: Any, logits: NestedKey) -> ActionMask:
        """Return the module that applies the mask to these logits."""
        if self.form == "combinations":
            return ActionMask(logits, self.key)
        if isinstance(space, spaces.MultiBinary):
            return ActionMask(logits, self.key, binary=True)
        return ActionMask(logits, self.key, option_counts(space))


def _find_masks(
    observation: Any, action: Any, action_mask: bool | None, *, strict: bool = True
) -> dict[tuple[Any, ...], _Mask]:
    """Return the mask of each part of an action space that has one, by the part's path.

    Args:
        observation, action: the spaces.
        action_mask: see `actor`.
        strict: refuse masks in the observation that fit no part of an action space with choices.
    """
    if action_mask is False:
        return {}

    leaves = {tuple(map(str, path)): path for _, path in space_leaves(action, (ACTION,))}
    choices = [path for path in leaves.values() if option_counts(find_part(action, path)) is not None]
    found: dict[tuple[Any, ...], _Mask] = {}
    if not choices:
        if action_mask:
            raise ValueError(
                f"action_mask=True needs an action space with choices to mask, got {action}: leave it out"
            )
        return found

    shown = isinstance(observation, spaces.Dict) and ACTION_MASK in observation.spaces
    if not shown:
        if action_mask:
            for choice in choices:
                found[choice] = _Mask(plain_key((ACTION_MASK, *map(str, choice))), "options", None)
        return found

    for key, seen in space_leaves(observation[ACTION_MASK], (ACTION_MASK,), (ACTION_MASK,)):
        shape = find_part(observation, seen).shape
        path = leaves.get(as_tuple(key)[1:])
        part = None
        form = None
        if path is not None:
            part = find_part(action, path)
            counts = option_counts(part)
            if counts is not None and shape is not None:
                form = mask_form(counts, shape)

        if path is not None and form is not None:
            found[path] = _Mask(key, form, shape)
        elif strict:
            wanted = f"a part of {action}"
            if part is not None:
                wanted = f"{part} (possible: {mask_shapes(part)})"
            raise ValueError(
                f"observation[{key!r}] must be a mask of {wanted}, got shape {shape}: give it such a shape, or pass "
                "action_mask=False to make it an ordinary input, without effect on the actions"
            )
    return found


def _on_device(network: N, device: torch.device | str | None) -> N:
    if device is None:
        return network
    return network.to(check_usable_device("device", device))


def _env_spaces(env: SpacedEnv) -> tuple[Any, Any]:
    """Return the spaces of one env's observation and action."""
    found: list[Any] = []
    for name in ("observation_space", "action_space"):
        space = getattr(env, f"single_{name}", None)
        if space is None:
            space = getattr(env, name, None)
        hint = "adapt it with flatroll.wrappers.as_vector_env"
        found.append(check_type(f"env.{name}", space, spaces.Space, "a gymnasium space", hint=hint))

    batched = getattr(env, "observation_space", None)
    if getattr(env, "single_observation_space", None) is not None and isinstance(batched, spaces.Space):
        found[0] = widest_space(found[0], batched)  # the rows' bounds may differ
    return found[0], found[1]


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    _orthogonal(layer, gain)
    return layer


def _orthogonal(layer: nn.Module, gain: float) -> None:
    """Give a layer orthogonal weights and biases of 0."""
    for name, weight in layer.named_parameters():
        if weight.ndim > 1:
            nn.init.orthogonal_(weight, gain)
        elif "bias" in name:
            nn.init.zeros_(weight)


def _make_head(
    space: Any, width: int, std: str, squash: bool | None, name: str, *, combined: bool
) -> tuple[type, dict[str, Any], nn.Module, tuple[str, ...]]:
    """The distribution of an action space, its fixed arguments, the layer in front, and what that writes.

    With ``combined`` it is one of all combinations of the space's choices.
    """
    counts = option_counts(space)
    where = f"action space {name!r}" if name else "action space"
    shape: tuple[int, ...] = space.shape or ()
    if 0 in shape:
        raise ValueError(f"{where} must have numbers to choose, got {space}: leave it out of the space")

    if isinstance(space, spaces.MultiBinary) and not combined:
        head = _linear(width, math.prod(shape), gain=0.01)
        return JointBernoulli, {"shape": shape}, head, ("logits",)

    if counts is not None:
        kind: type = JointCategorical
        size = sum(counts)
        if combined:
            kind = CombinedCategorical
            size = math.prod(counts)
        head = _linear(width, size, gain=0.01)

        start: Any = torch.from_numpy(first_options(space))
        if isinstance(space, spaces.Discrete) and not bool(start.any()):
            return Categorical, {"validate_args": False}, head, ("logits",)
        if bool((start == start[0]).all()):
            start = int(start[0])
        return kind, {"nvec": counts, "shape": shape, "start": start}, head, ("logits",)

    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        bounded = _has_bounds(space)
        if squash and not bounded:
            raise ValueError(f"squash=True needs finite bounds, got {space}: leave squash out")
        if squash is None:
            squash = bounded

        spread = LocScale(width, tuple(space.shape), dependent=std == "dependent")
        kwargs: dict[str, Any] = {"event_dims": len(space.shape)}
        if not squash:
            return Gaussian, kwargs, spread, ("loc", "scale")

        for end, bound in (("low", space.low), ("high", space.high)):
            # A Python number if all are equal: a tensor would be copied to the device at every call.
            if (bound == bound.flat[0]).all():
                kwargs[end] = float(bound.flat[0])
            else:
                kwargs[end] = torch.from_numpy(bound.astype(np.float32))
        return SquashedGaussian, kwargs, spread, ("loc", "scale")

    raise ValueError(
        f"{where} must be a Discrete, MultiDiscrete, MultiBinary, a Box of floats or of integers with at most "
        f"{MOST_OPTIONS} values in all, or a Dict or Tuple of these, got {space}: {_WAY_OUT}"
    )


def _has_bounds(space: spaces.Box) -> bool:
    """Return whether all bounds are finite, and far from float32's largest number, which stands for none in envpool."""
    largest = np.finfo(np.float32).max / 4
    return bool((np.abs(space.low) < largest).all() and (np.abs(space.high) < largest).all())


class LocScale(nn.Module):
    """Outputs the means and standard deviations ``[*B, *shape]`` of normal numbers.

    Args:
        inputs: size of the features.
        shape: of an action.
        dependent: whether the deviations are outputs of the layer, with logarithms within -20 and 2, too; else they
            are parameters. Both begin near 1. Default False.

    >>> loc, scale = LocScale(8, (2,))(torch.zeros(5, 8))
    >>> loc.shape, scale[0]
    (torch.Size([5, 2]), tensor([1., 1.], grad_fn=<SelectBackward0>))
    """

    def __init__(self, inputs: int, shape: tuple[int, ...], *, dependent: bool = False) -> None:
        super().__init__()
        size = math.prod(shape)
        if dependent:
            size *= 2
        self.shape = tuple(shape)
        self.dependent = dependent
        self.linear = _linear(inputs, size, gain=0.01)
        if not dependent:
            self.log_scale = nn.Parameter(torch.zeros(self.shape))

    @override
    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        out: Tensor = self.linear(features)
        rows = features.shape[:-1]

        if not self.dependent:
            loc = out.reshape(*rows, *self.shape)
            return loc, self.log_scale.exp().expand_as(loc)

        loc, log_scale = (part.reshape(*rows, *self.shape) for part in out.chunk(2, -1))
        return loc, log_scale.clamp(-20.0, 2.0).exp()


#: Key of the features of actors' bodies; collectors do not store names that begin with "_".
FEATURES = "_features"


class _Trunk(NamedTuple):
    """The parts of a network in front of its heads.

    Attributes:
        parts: modules; the last one writes ``features``.
        features: their key.
        width: their size.
    """

    parts: list[Any]
    features: str
    width: int

    def with_values(self, key: NestedKey, size: int) -> list[Any]:
        """The parts and a linear head that writes ``size`` values."""
        head = _linear(self.width, size, gain=1.0)
        written: list[Any] = [key]
        return [*self.parts, TensorDictModule(head, [self.features], written)]


def observed_spaces(env: SpacedEnv, in_keys: Sequence[NestedKey] | None = None) -> dict[NestedKey, Any]:
    """Return the spaces of an env's observation by batch key, without the mask of its actions.

    Args:
        env, in_keys: see `actor`.

    >>> import gymnasium as gym
    >>> list(observed_spaces(gym.make_vec("CartPole-v1", num_envs=2)))
    ['observation']
    """
    observation, action = _env_spaces(env)
    has_mask = bool(_find_masks(observation, action, None, strict=False))
    leaves = _input_leaves(observation, in_keys, without_mask=has_mask)
    return {key: find_part(observation, path) for key, path in leaves}


def _input_leaves(
    observation: Any, in_keys: Sequence[NestedKey] | None, *, without_mask: bool
) -> list[tuple[NestedKey, tuple[Any, ...]]]:
    """List the batch key and the path of each entry that a network reads.

    Args:
        observation: the space.
        in_keys: see `actor`.
        without_mask: whether ``"action_mask"`` is no input.
    """
    leaves = observation_leaves(observation)
    if without_mask:
        leaves = [(key, path) for key, path in leaves if as_tuple(key)[0] != ACTION_MASK]
    if in_keys is None:
        return leaves

    names = [key for key, _ in leaves]
    chosen: list[tuple[NestedKey, tuple[Any, ...]]] = []
    for wanted in check_key_names("in_keys", in_keys):
        group = as_tuple(wanted)
        inside = [leaf for leaf in leaves if as_tuple(leaf[0])[: len(group)] == group]
        if without_mask and group[0] == ACTION_MASK:
            raise ValueError(
                f"in_keys names {wanted!r}, the mask of the actions, which is read besides: leave it out, or pass "
                "action_mask=False to make it an ordinary input"
            )
        if not inside:
            raise ValueError(
                f"in_keys names {wanted!r}, which the observation does not have: its entries are {names}"
            )

        twice = [key for key, _ in inside if any(key == other for other, _ in chosen)]
        if twice:
            raise ValueError(f"in_keys names {twice[0]!r} twice, got {list(in_keys)}")
        chosen += inside

    if not chosen:
        raise ValueError(f"in_keys must name an entry, got {in_keys!r}: the observation has {names}")
    return chosen


def _make_trunk(
    observation: Any,
    leaves: Sequence[tuple[NestedKey, tuple[Any, ...]]],
    hidden: Sequence[int],
    activation: type[nn.Module],
    cnn: Cnn,
    recurrent: Recurrent | None,
    norm: bool,
    *,
    action: Any = None,
    norms: Sequence[Any] = (),
    prefix: str = "",
    state: str | None = None,
) -> _Trunk:
    """Return the modules that compute features of an observation.

    Args:
        observation: the space.
        leaves: the entries of it that are read, from `_input_leaves`.
        hidden, activation, cnn, recurrent, norm: see `actor`.
        action: the space of an action that is also an input. Default None: no action.
        norms: modules; a `RunningNorm` among them is used instead of an own one for its entry.
        prefix: of the entries that the parts write.
        state: name of the memory's states, which then begin with zeros at each run. Default None: they are stored.
    """
    check_flags(norm=norm)
    check_choice("cnn", cnn, ("small", "impala"))
    check_choice("recurrent", recurrent, (None, *_KINDS))
    widths = [check_whole_number("hidden", size) for size in check_sizes("hidden", hidden)]
    if recurrent is not None and not widths:
        raise ValueError(
            f"hidden must have at least one size, that of the memory, with recurrent={recurrent!r}, got ()"
        )

    given = {part.in_key: part for part in norms if isinstance(part, RunningNorm)}
    parts: list[Any] = []
    keys: list[Any] = []  # keys that the encoder reads
    seen: list[Any] = []  # the spaces of these keys
    for key, path in leaves:
        space: Any = find_part(observation, path)
        if 0 in (space.shape or ()):  # a Box of shape (0,) or (3, 0): it tells nothing
            continue

        is_floating = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
        if norm and is_floating and not _is_image(space):
            if key not in given:
                given[key] = RunningNorm(key, shape=tuple(space.shape))
            parts.append(given[key])
            key = given[key].out_key
        keys.append(key)
        seen.append(space)

    if not keys:
        raise ValueError(
            f"the observation must have an entry with numbers besides {ACTION_MASK!r}, got {observation}"
        )
    if action is not None:
        keys.append(ACTION)
        seen.append(action)

    features = prefix + FEATURES
    if recurrent is None:
        body = Encoder(seen, widths, activation, cnn)
        return _Trunk([*parts, TensorDictModule(body, keys, [features])], features, body.size)

    size = widths.pop()
    body = Encoder(seen, widths, activation, cnn)
    embedding = f"{prefix}_embedding"
    kind = _KINDS[recurrent]
    options: dict[str, Any] = {}
    if kind is TransformerModule:
        options = {"num_layers": 2, "context": 64, "gate": "gtrxl"}
    names = list(kind.state_keys)
    if state is not None:
        names = [_renamed_state(key, state) for key in names]
        if kind is not TransformerModule:  # which stores none
            options = {"state": "zero"}

    memory: Any = kind(
        body.size,
        size,
        in_keys=[embedding, *names, IS_INIT],
        out_keys=[features, *map(next_key, names)],
        **options,
    )
    if isinstance(memory, RecurrentModule):
        _orthogonal(memory.net, 1.0)
    return _Trunk([*parts, TensorDictModule(body, keys, [embedding]), memory], features, size)


def _renamed_state(key: str, state: str) -> str:
    """Return a default state key with another name; what is hidden stays so.

    >>> _renamed_state("recurrent_state_h", "critic_state"), _renamed_state("_cache", "critic_state")
    ('critic_state_h', '_critic_state_cache')
    """
    if is_hidden(key):
        return f"_{state}{key}"
    return key.replace("recurrent_state", state)


def _is_image(space: Any) -> bool:
    """Whether a space holds images: a Box of three dims, or of unsigned bytes in two or four."""
    if not isinstance(space, spaces.Box):
        return False
    return len(space.shape) == 3 or (space.dtype == np.uint8 and len(space.shape) in (2, 4))


class Encoder(nn.Module):
    """Encodes an observation's entries as one vector, in the dtype of its weights.

    Args:
        leaves: the spaces of the entries.
        hidden: sizes of the layers behind the entries' features.
        activation: behind each of these layers.
        cnn: for images, see `flatroll.modules.actor`.

    Called with the entries, ``[*B, *shape]`` each, it returns ``[*B, size]``.

    >>> net = Encoder([spaces.Box(-1, 1, (3,)), spaces.Discrete(4)], [16])
    >>> net(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        leaves: "Sequence[spaces.Space[Any]]",
        hidden: Sequence[int] = (),
        activation: type[nn.Module] = nn.Tanh,
        cnn: Cnn = "small",
    ) -> None:
        super().__init__()
        self.entries = nn.ModuleList([_make_encoder(space, cnn) for space in leaves])

        sizes = [sum(entry.size for entry in self.entries), *hidden]  # type: ignore[misc]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            is_maker = callable(activation) and not isinstance(activation, nn.Module)
            between = activation() if is_maker else activation
            if not is_maker or not isinstance(between, nn.Module):
                raise TypeError(
                    f"activation must be a class of modules such as torch.nn.ReLU, got {activation!r}"
                )
            layers += [_linear(inputs, outputs, gain=math.sqrt(2.0)), between]

        self.layers = nn.Sequential(*layers)
        #: Number of features of the result.
        self.size: int = sizes[-1]

    @override
    def forward(self, *entries: Tensor) -> Tensor:
        weight = getattr(next(self.layers.children(), None), "weight", None)
        if not isinstance(weight, Tensor):
            weight = next(self.parameters(), None)  # iterates over all modules: many times slower
        dtype = torch.get_default_dtype() if weight is None else weight.dtype

        seen = [entry(column, dtype) for entry, column in zip(self.entries, entries, strict=True)]
        joined = seen[0] if len(seen) == 1 else torch.cat(seen, -1)
        features: Tensor = self.layers(joined)
        return features


def _make_encoder(space: Any, cnn: Cnn) -> Any:
    """Return the module that encodes an observation's entry."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return OneHotEntry(space)
    if _is_image(space):
        return ImageEntry(space.shape, cnn, scaled=space.dtype == np.uint8)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return VectorEntry(space.shape)
    raise ValueError(
        f"observation entries must be Box, Discrete, MultiDiscrete or MultiBinary, got {space}: {_WAY_OUT}"
    )


def _leading_dims(x: Tensor, shape: tuple[int, ...]) -> torch.Size:
    """The leading dims of an observation's entry ``[*B, *shape]``."""
    lead = max(x.ndim - len(shape), 0)
    if x.shape[lead:] != shape:
        raise ValueError(
            f"an observation's entry must have shape {('*', *shape)}, as in the space that the network was built for, "
            f"got {tuple(x.shape)}: another space needs another network"
        )
    return x.shape[:lead]


class VectorEntry(nn.Module):
    """Flattens an entry ``[*B, *shape]`` to ``[*B, size]``."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.size = math.prod(shape)

    @override
    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.reshape(*_leading_dims(x, self.shape), self.size).to(dtype)

    @override
    def extra_repr(self) -> str:
        return f"{self.shape} -> {self.size}"


class OneHotEntry(nn.Module):
    """Makes one-hot numbers ``[*B, size]`` of choices ``[*B, *shape]``."""

    start: Tensor

    def __init__(self, space: "spaces.Discrete | spaces.MultiDiscrete") -> None:
        super().__init__()
        counts = option_counts(space)
        assert counts is not None  # these spaces have options
        self.counts = counts
        self.shape = np.shape(space.start)
        self.size = sum(counts)

        # Column of each choice's first option minus that option's number, so that option + start is its column.
        first = np.cumsum([0, *self.counts[:-1]]) - np.asarray(space.start, np.int64).reshape(-1)
        self.register_buffer("start", torch.from_numpy(first), persistent=False)

    @override
    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        columns = x.reshape(*_leading_dims(x, self.shape), -1).long() + self.start
        out = torch.zeros(*columns.shape[:-1], self.size, dtype=dtype, device=x.device)
        return out.scatter_(-1, columns, 1.0)

    @override
    def extra_repr(self) -> str:
        return f"counts={self.counts}"


class ImageEntry(nn.Module):
    """A CNN of images ``[*B, *shape]``, channels first or last, with features ``[*B, size]``."""

    def __init__(self, shape: Sequence[int], cnn: Cnn, *, scaled: bool) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.scaled = scaled

        # Channel dims: the first and last of [stack, H, W, C], none of [H, W], and of three dims the smaller
        # of first and last.
        self.last = len(shape) == 3 and shape[-1] < shape[0]
        if len(shape) == 4:
            height, width = shape[1:3]
        elif self.last or len(shape) == 2:
            height, width = shape[:2]
        else:
            height, width = shape[1:]

        channels = math.prod(shape) // (height * width)
        self.sides = height, width
        make = _small_cnn if cnn == "small" else _impala_cnn
        self.layers = make(channels, min(height, width))

        for layer in self.layers.modules():
            if isinstance(layer, nn.Conv2d):
                _orthogonal(layer, math.sqrt(2.0))

        with torch.no_grad():
            self.size = self.layers(torch.zeros(1, channels, height, width)).numel()

    @override
    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = _leading_dims(x, self.shape)
        x = x.reshape(-1, *self.shape)
        if len(self.shape) == 4 or self.last:
            x = x.movedim(-1, 1)
        x = x.reshape(x.shape[0], -1, *self.sides).to(dtype)
        if self.scaled:
            x = x / 255.0
        out: Tensor = self.layers(x)
        return out.reshape(*rows, self.size)

    @override
    def extra_repr(self) -> str:
        if self.scaled:
            return f"{self.shape}, divided by 255"
        return f"{self.shape}"


def _small_cnn(channels: int, side: int) -> nn.Sequential:
    if side >= _LEAST_SIDE:
        sizes = [(channels, 32, 8, 4, 0), (32, 64, 4, 2, 0), (64, 64, 3, 1, 0)]
    else:
        sizes = [(channels, 16, 3, 1, 1), (16, 32, 3, 1, 1)]

    layers = [layer for size in sizes for layer in (nn.Conv2d(*size), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten())


def _impala_cnn(channels: int, side: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for out in (16, 32, 32):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
        layers += [Residual(out), Residual(out)]
        channels = out
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())


class Residual(nn.Module):
    """Adds two convolutions of an image to it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(F.relu(self.first(F.relu(x))))
        return out
