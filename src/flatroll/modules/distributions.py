"""Distributions of actions, with one log-probability ``[*B]`` per action of any shape."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
    register_kl,
)
from torch.nn import functional as F

from flatroll.layout.checks import (
    as_text,
    check_dense_tensor,
    check_floating_tensor,
    check_number,
    check_sizes,
    check_whole_number,
)
from flatroll.layout.column_actor import Drawn, draw_choice

#: log sqrt(2 pi), a constant of the normal density.
_HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


def _draw_noise(sample_shape: Any, loc: Tensor) -> Tensor:
    """Draw standard normal numbers ``[*sample_shape, *loc.shape]``."""
    return torch.randn((*sample_shape, *loc.shape), dtype=loc.dtype, device=loc.device)


class JointCategorical(Distribution):
    """Independent categorical choices, as in a MultiDiscrete space, or a Discrete one that does not start at 0.

    Args:
        logits: of all choices, one after the other, ``[*B, sum(nvec)]``.
        nvec: number of options of each choice.
        shape: of an action; the product of its sizes is the number of choices.
        start: first option of all choices, or of each, int64 ``[choices]``. Default: 0.

    Samples are int64 ``[*B, *shape]``.

    >>> dist = JointCategorical(torch.zeros(4, 5), nvec=(2, 3), shape=(2,))
    >>> dist.sample().shape, dist.entropy().exp()
    (torch.Size([4, 2]), tensor([6., 6., 6., 6.]))
    """

    arg_constraints: ClassVar[Any] = {}  # pyright: ignore[reportIncompatibleMethodOverride]
    has_enumerate_support = False

    def __init__(
        self,
        logits: Tensor,
        *,
        nvec: tuple[int, ...],
        shape: tuple[int, ...] = (),
        start: Tensor | int = 0,
    ) -> None:
        check_floating_tensor("logits", logits)
        nvec = check_sizes("nvec", nvec)
        shape = check_sizes("shape", shape)
        if not nvec or logits.shape[-1:] != (sum(nvec),):
            raise ValueError(
                f"logits must have shape [*B, {sum(nvec)}], a number for each option of nvec={nvec}, got "
                f"{tuple(logits.shape)}"
            )

        _check_choices(nvec, shape, start)
        self.choices = Categorical(logits=_stack_choices(logits, nvec), validate_args=False)

        self.logits = logits
        if not isinstance(start, int):
            start = start.to(logits.device)
        self._start = start
        super().__init__(logits.shape[:-1], torch.Size(shape), validate_args=False)

    @classmethod
    def drawer(
        cls, *, nvec: tuple[int, ...], shape: tuple[int, ...] = (), start: Tensor | int = 0
    ) -> Callable[..., Drawn]:
        """Return a function that draws from logits without a distribution: see `flatroll.layout.column_actor`."""

        def draw_from(logits: Tensor) -> Drawn:
            # The choices of all rows are rows of one draw: [E, choices, most] -> [E * choices, most].
            drawn = draw_choice(_stack_choices(logits, nvec).flatten(0, -2))
            if drawn is None:
                return None

            options, log_prob = (column.reshape(-1, len(nvec)) for column in drawn[:2])
            return (options + start).reshape(-1, *shape), log_prob.sum(-1), None

        return draw_from

    @property
    def mode(self) -> Tensor:
        """The most probable option of each choice, ``[*B, *shape]``."""
        return self._action(self.choices.mode)

    deterministic_sample = mode

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw actions ``[*sample_shape, *B, *shape]``."""
        choices: Any = self.choices  # torch has no types for it
        return self._action(_draw(choices, sample_shape, logits=self.logits))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probabilities ``[*B]`` of actions ``[*B, *shape]``."""
        dims = len(self.event_shape)
        rows = value.shape[: value.ndim - dims]
        options = value.reshape(*rows, -1).long() - self._start  # long: narrow or unsigned actions of a Box
        choices: Any = self.choices
        log_prob: Tensor = choices.log_prob(options).sum(-1)
        return log_prob

    def entropy(self) -> Tensor:
        """The sum of the choices' entropies, ``[*B]``."""
        choices: Any = self.choices
        entropy: Tensor = choices.entropy().sum(-1)
        return entropy

    def _action(self, options: Tensor) -> Tensor:
        return (options + self._start).reshape(*options.shape[:-1], *self.event_shape)


def _stack_choices(logits: Tensor, nvec: tuple[int, ...]) -> Tensor:
    """Return the logits of all choices ``[*B, sum(nvec)]`` as ``[*B, choices, most options]``."""
    if len(nvec) == 1:
        return logits.unsqueeze(-2)

    most = max(nvec)
    parts = logits.split_with_sizes(nvec, -1)
    # Choices with fewer options are padded with the lowest logit, of probability 0.
    lowest = torch.finfo(logits.dtype).min
    wide = [F.pad(part, (0, most - part.shape[-1]), value=lowest) for part in parts]
    return torch.stack(wide, -2)


class CombinedCategorical(Distribution):
    """One choice among all combinations of several choices, for masks that allow or forbid combinations.

    Args:
        logits: of all combinations, the last choice varying fastest, ``[*B, prod(nvec)]``.
        nvec: number of options of each choice.
        shape: of an action; the product of its sizes is the number of choices. Default: ``(len(nvec),)``.
        start: first option of all choices, or of each, int64 ``[choices]``. Default: 0.

    Samples are int64 ``[*B, *shape]``.

    >>> dist = CombinedCategorical(torch.tensor([[0.0, 0.0, 0.0, 9.0, 0.0, 0.0]]), nvec=(2, 3))
    >>> dist.mode, dist.log_prob(torch.tensor([[1, 0]])).exp() > 0.99
    (tensor([[1, 0]]), tensor([True]))
    """

    arg_constraints: ClassVar[Any] = {}  # pyright: ignore[reportIncompatibleMethodOverride]
    has_enumerate_support = False

    def __init__(
        self,
        logits: Tensor,
        *,
        nvec: tuple[int, ...],
        shape: tuple[int, ...] | None = None,
        start: Tensor | int = 0,
    ) -> None:
        check_floating_tensor("logits", logits)
        nvec = check_sizes("nvec", nvec)
        if not nvec or logits.shape[-1:] != (math.prod(nvec),):
            raise ValueError(
                f"logits must have shape [*B, {math.prod(nvec)}], a number for each combination of nvec={nvec}, got "
                f"{tuple(logits.shape)}"
            )

        shape = (len(nvec),) if shape is None else check_sizes("shape", shape)
        _check_choices(nvec, shape, start)
        self.combinations = Categorical(logits=logits, validate_args=False)
        self.logits = logits
        self._nvec = nvec
        if not isinstance(start, int):
            start = start.to(logits.device)
        self._start = start
        super().__init__(logits.shape[:-1], torch.Size(shape), validate_args=False)

    @classmethod
    def drawer(
        cls, *, nvec: tuple[int, ...], shape: tuple[int, ...] | None = None, start: Tensor | int = 0
    ) -> Callable[..., Drawn]:
        """Return a function that draws from logits without a distribution: see `flatroll.layout.column_actor`."""
        own = (len(nvec),) if shape is None else shape

        def draw_from(logits: Tensor) -> Drawn:
            drawn = draw_choice(logits)
            if drawn is None:
                return None

            combination, log_prob, _ = drawn
            options = torch.stack(torch.unravel_index(combination, nvec), -1)
            return (options + start).reshape(-1, *own), log_prob, None

        return draw_from

    @property
    def mode(self) -> Tensor:
        """The most probable combination, ``[*B, *shape]``."""
        return self._action(self.combinations.mode)

    deterministic_sample = mode

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw actions ``[*sample_shape, *B, *shape]``."""
        combinations: Any = self.combinations  # torch has no types for it
        return self._action(_draw(combinations, sample_shape, logits=self.logits))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probabilities ``[*B]`` of actions ``[*B, *shape]``."""
        rows = value.shape[: value.ndim - len(self.event_shape)]
        options = value.reshape(*rows, -1).long() - self._start

        # The number of a combination, the last choice varying fastest: ((o0 * n1) + o1) * n2 + o2.
        at = options[..., 0]
        for choice, count in enumerate(self._nvec[1:], 1):
            at = at * count + options[..., choice]

        combinations: Any = self.combinations
        log_prob: Tensor = combinations.log_prob(at)
        return log_prob

    def entropy(self) -> Tensor:
        """The entropy of the combinations, ``[*B]``."""
        combinations: Any = self.combinations
        entropy: Tensor = combinations.entropy()
        return entropy

    def _action(self, combinations: Tensor) -> Tensor:
        options = torch.stack(torch.unravel_index(combinations, self._nvec), -1)
        return (options + self._start).reshape(*combinations.shape, *self.event_shape)


def _check_choices(nvec: tuple[int, ...], shape: tuple[int, ...], start: Tensor | int) -> None:
    """Raise ValueError unless ``shape`` and ``start`` fit the choices."""
    if math.prod(shape) != len(nvec):
        raise ValueError(f"shape must have one element for each choice of nvec={nvec}, got {shape}")
    if isinstance(start, int):
        check_whole_number("start", start, -(2**63))
    elif check_dense_tensor("start", start).is_meta or start.shape not in ((), (len(nvec),)):
        raise ValueError(f"start must be a number or have shape ({len(nvec)},), got {as_text(start)}")


@register_kl(CombinedCategorical, CombinedCategorical)  # type: ignore[untyped-decorator,no-untyped-call]
def _kl_of_combinations(p: CombinedCategorical, q: CombinedCategorical) -> Tensor:
    return kl_divergence(p.combinations, q.combinations)


@register_kl(JointCategorical, JointCategorical)  # type: ignore[untyped-decorator,no-untyped-call]
def _kl_of_choices(p: JointCategorical, q: JointCategorical) -> Tensor:
    divergence: Tensor = kl_divergence(p.choices, q.choices).sum(-1)
    return divergence


class JointBernoulli(Independent):  # type: ignore[type-arg]  # at run time it takes none
    """Independent flags, as in a MultiBinary space.

    Args:
        logits: ``[*B, n]``.
        shape: of an action, n flags in all. Default: ``(n,)``.

    Samples are int8 ``[*B, *shape]``; the mode is 0 where both values are equally probable.

    >>> JointBernoulli(torch.tensor([[2.0, -2.0, 0.0]])).mode
    tensor([[1, 0, 0]], dtype=torch.int8)
    """

    def __init__(self, logits: Tensor, *, shape: tuple[int, ...] | None = None) -> None:
        check_floating_tensor("logits", logits)
        shape = logits.shape[-1:] if shape is None else check_sizes("shape", shape)
        if logits.shape[-1:] != (math.prod(shape),):
            raise ValueError(
                f"logits must have shape [*B, {math.prod(shape)}], a number for each flag of shape={tuple(shape)}, "
                f"got {tuple(logits.shape)}"
            )

        flags = Bernoulli(logits=logits.reshape(*logits.shape[:-1], *shape), validate_args=False)
        super().__init__(flags, len(shape), validate_args=False)

    @classmethod
    def drawer(cls, *, shape: tuple[int, ...] | None = None) -> Callable[..., Drawn]:
        """Return a function that draws from logits without a distribution: see `flatroll.layout.column_actor`."""

        def draw_from(logits: Tensor) -> Drawn:
            scores = logits
            if shape is not None:
                scores = logits.reshape(len(logits), *shape)

            probabilities = scores.sigmoid()
            if not probabilities.is_cpu or not math.isfinite(float(probabilities.sum())):
                return None  # the distribution says what is wrong
            flags = probabilities.bernoulli()
            log_prob = -F.binary_cross_entropy_with_logits(scores, flags, reduction="none")
            return flags.to(torch.int8), log_prob.sum(tuple(range(1, scores.ndim))), None

        return draw_from

    @property
    def mode(self) -> Tensor:
        """The more probable value of each flag."""
        flags: Any = self.base_dist
        mode: Tensor = (flags.logits > 0).to(torch.int8)
        return mode

    deterministic_sample = mode

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw flags ``[*sample_shape, *B, *shape]``."""
        return _draw(super(), sample_shape, logits=self.base_dist.logits).to(torch.int8)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probabilities ``[*B]`` of flags ``[*B, *shape]`` of any dtype."""
        flags: Any = self.base_dist
        log_prob: Tensor = super().log_prob(value.to(flags.logits.dtype))  # type: ignore[no-untyped-call]
        return log_prob


class Gaussian(Independent):  # type: ignore[type-arg]
    """Independent normal distributions, one for each component of an action.

    Args:
        loc: means, ``[*B, *shape]``.
        scale: standard deviations, likewise.
        event_dims: number of dims of an action. Default: 1.

    >>> Gaussian(torch.zeros(4, 2), torch.ones(4, 2)).log_prob(torch.zeros(4, 2)).shape
    torch.Size([4])
    """

    def __init__(self, loc: Tensor, scale: Tensor, *, event_dims: int = 1) -> None:
        _check_normal(loc, scale, event_dims)
        super().__init__(Normal(loc, scale, validate_args=False), event_dims, validate_args=False)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw actions ``[*sample_shape, *B, *shape]``."""
        return _draw(super(), sample_shape, loc=self.base_dist.loc, scale=self.base_dist.scale)

    def rsample_and_log_prob(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """Draw actions, and their log-probabilities from the noise that made them, which loses no digits."""
        normal: Any = self.base_dist
        axes = tuple(range(-self.reinterpreted_batch_ndims, 0))
        return _draw_normal(normal.loc, normal.scale, axes, sample_shape)

    @classmethod
    def drawer(cls, *, event_dims: int = 1) -> Callable[..., Drawn]:
        """Return a function of means and deviations: see `flatroll.layout.column_actor`."""
        axes = tuple(range(-event_dims, 0))

        def draw_from(loc: Tensor, scale: Tensor) -> Drawn:
            return *_draw_normal(loc, scale, axes), None

        return draw_from

    @property
    def deterministic_sample(self) -> Tensor:
        """The mean, which is the mode."""
        return self.mean


def _draw_normal(
    loc: Tensor, scale: Tensor, axes: tuple[int, ...], sample_shape: Any = ()
) -> tuple[Tensor, Tensor]:
    """Draw normal numbers ``[*sample_shape, *loc.shape]``; return them and log-probabilities, summed over axes."""
    noise = _draw_noise(sample_shape, loc)
    log_prob = -0.5 * noise.square() - scale.log() - _HALF_LOG_2_PI
    if axes:
        log_prob = log_prob.sum(axes)
    return loc + scale * noise, log_prob


def _check_normal(loc: Tensor, scale: Tensor, event_dims: int) -> None:
    """Raise TypeError or ValueError unless these are means and deviations with ``event_dims`` dims of an action."""
    like = type(loc) is type(scale) is Tensor and (loc.shape, loc.device) == (scale.shape, scale.device)
    floating = like and loc.is_floating_point() and scale.is_floating_point()
    plain = floating and loc.layout is scale.layout is torch.strided
    if plain and type(event_dims) is int and 0 <= event_dims <= loc.ndim:
        return  # hot path: called for every action

    check_floating_tensor("loc", loc)
    check_floating_tensor("scale", scale, loc.device, "loc")
    if loc.shape != scale.shape:
        try:
            torch.broadcast_shapes(loc.shape, scale.shape)  # type: ignore[no-untyped-call]  # torch's own
        except RuntimeError as error:
            raise ValueError(
                f"scale must have the shape of loc, {tuple(loc.shape)}, got {tuple(scale.shape)}"
            ) from error

    check_whole_number("event_dims", event_dims, 0, max(loc.ndim, scale.ndim))


def _bound(name: str, end: Tensor | float, loc: Tensor, event_dims: int) -> Tensor | float:
    """Return a bound after checking that it is a number, or a tensor with one for each number of an action."""
    if type(end) is float and end == end:
        return end
    if not isinstance(end, Tensor):
        return float(check_number(name, end))

    check_dense_tensor(name, end)
    shape = loc.shape[loc.ndim - event_dims :]
    fits = end.ndim <= len(shape) and all(
        n in (1, m) for n, m in zip(end.shape[::-1], shape[::-1], strict=False)
    )
    if end.is_meta != loc.is_meta or not fits:
        raise ValueError(f"{name} must be a number or of shape {tuple(shape)}, got {as_text(end)}")
    return end


def _draw(dist: Any, sample_shape: Any, **parameters: Tensor) -> Tensor:
    """``dist.sample(sample_shape)``; where torch refuses to draw, the error says which parameter is at fault."""
    shape = torch.Size(sample_shape)
    if torch.compiler.is_compiling():
        return cast(Tensor, dist.sample(shape))
    try:
        return cast(Tensor, dist.sample(shape))
    except RuntimeError as error:
        for name, column in parameters.items():
            bad = ~column.isfinite()
            wanted = "finite"
            if name == "scale":
                bad = bad | ~(column >= 0)
                wanted = "finite and at least 0"
            if not column.is_meta and bool(bad.any()):
                raise ValueError(
                    f"{name} must be {wanted}, but {int(bad.sum())} of {bad.numel()} numbers are not"
                ) from error
        raise


class _BoundedTanh(TanhTransform):
    """Tanh whose inverse stays finite at -1 and 1."""

    def _inverse(self, y: Tensor) -> Tensor:
        most = 1.0 - torch.finfo(y.dtype).eps
        return y.clamp(-most, most).atanh()


class _IntoBounds(AffineTransform):
    """Maps [-1, 1] to bounds, never beyond them by rounding."""

    def __init__(self, low: Tensor, high: Tensor, event_dims: int) -> None:
        # Halved before adding: the difference of the bounds may overflow.
        super().__init__(high / 2 + low / 2, high / 2 - low / 2, event_dim=event_dims)
        self._low = low
        self._high = high

    def _call(self, x: Tensor) -> Tensor:
        into: Tensor = self.loc + self.scale * x
        return into.clamp(self._low, self._high)


def _squash_constant(half: Tensor | float) -> Any:
    """The part of a squashed number's log-probability that depends on the bounds alone, half their difference."""
    log_half: Any = -math.inf
    if isinstance(half, Tensor):
        log_half = half.abs().log()
    elif half:
        log_half = math.log(abs(half))
    return log_half + _HALF_LOG_2_PI + 2.0 * math.log(2.0)


def _score_squashed(base: Tensor, loc: Tensor, scale: Tensor, constant: Any, axes: tuple[int, ...]) -> Tensor:
    """Log-probabilities of numbers made from normal numbers ``base``, summed over the axes."""
    deviations = (base - loc) / scale
    # log N(base) - log |tanh'(base)| - log half, where log tanh' is 2 (log 2 - base - softplus(-2 base))
    log_prob: Tensor = (
        2.0 * (base + F.softplus(-2.0 * base)) - 0.5 * deviations.square() - scale.log() - constant
    )
    if axes:
        log_prob = log_prob.sum(axes)
    return log_prob


class SquashedGaussian(TransformedDistribution):
    """Independent normal distributions, squashed by tanh to the bounds of an action.

    In float32 an action close to a bound does not determine its normal sample. A collector stores that sample in the
    batch (``("base_sample", "action")``), and flatroll's losses compute the log-probability from it; without it the
    log-probability of such an action is finite but wrong.

    Args:
        loc: means before tanh, ``[*B, *shape]``.
        scale: standard deviations before tanh, likewise.
        low: lower bounds, ``[*shape]`` or a number.
        high: upper bounds, likewise.
        event_dims: number of dims of an action. Default: 1.

    Reference: T. Haarnoja et al., Soft actor-critic, 2018, https://arxiv.org/abs/1801.01290, appendix C.

    >>> dist = SquashedGaussian(torch.zeros(4, 2), torch.ones(4, 2), low=-2.0, high=2.0)
    >>> dist.sample().shape, dist.deterministic_sample[0]
    (torch.Size([4, 2]), tensor([0., 0.]))
    """

    has_rsample = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        *,
        low: Tensor | float = -1.0,
        high: Tensor | float = 1.0,
        event_dims: int = 1,
    ) -> None:
        _check_normal(loc, scale, event_dims)
        low = _bound("low", low, loc, event_dims)
        high = _bound("high", high, loc, event_dims)
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            low, high = (torch.as_tensor(end, dtype=loc.dtype, device=loc.device) for end in (low, high))

        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)  # type: ignore[no-untyped-call]

        self.loc = loc
        self.scale = scale
        self.low = low
        self.high = high

        # Halved before adding: the difference of the bounds may overflow.
        self._middle = high / 2 + low / 2
        self._half = high / 2 - low / 2

        dims = loc.ndim - event_dims
        self._event_axes = tuple(range(-event_dims, 0))

        # TransformedDistribution.__init__ would build and check transforms, which takes longer than drawing an action
        Distribution.__init__(self, loc.shape[:dims], loc.shape[dims:], validate_args=False)

    @classmethod
    def drawer(
        cls, *, low: Tensor | float = -1.0, high: Tensor | float = 1.0, event_dims: int = 1
    ) -> Callable[..., Drawn]:
        """Return a function of means and deviations: see `flatroll.layout.column_actor`."""
        axes = tuple(range(-event_dims, 0))
        # By dtype and device of the means: a distribution, of which only the bounds are used, and their constant.
        bounds: dict[tuple[torch.dtype, torch.device], tuple[SquashedGaussian, Any]] = {}

        def draw_from(loc: Tensor, scale: Tensor) -> Drawn:
            kind = (loc.dtype, loc.device)
            if kind not in bounds:
                one = cls(loc.detach(), scale.detach(), low=low, high=high, event_dims=event_dims)
                bounds[kind] = (one, _squash_constant(one._half))
            bounded, constant = bounds[kind]

            base = loc + scale * _draw_noise((), loc)
            log_prob = _score_squashed(base, loc, scale, constant, axes)
            return bounded._into_bounds(base), log_prob, base

        return draw_from

    @property  # not cached_property: before Python 3.12 it has a lock, which torch.compile cannot trace
    def base_dist(self) -> Any:  # type: ignore[override]
        """The normal distributions before tanh, for what torch does with any transformed distribution."""
        normal = Normal(self.loc, self.scale, validate_args=False)
        return Independent(normal, len(self.event_shape), validate_args=False)

    @property
    def transforms(self) -> list[Any]:  # type: ignore[override]
        """Tanh, and the map into the bounds."""
        # A single bound is expanded to all dims: the Jacobian has one factor per dim.
        low, high = (
            torch.as_tensor(end).to(self.loc).expand(self.event_shape) for end in (self.low, self.high)
        )
        return [_BoundedTanh(), _IntoBounds(low, high, len(self.event_shape))]

    def draw_base(self, sample_shape: Any = ()) -> Tensor:
        """Draw normal numbers ``[*sample_shape, *B, *shape]``; gradients flow through them."""
        return self.loc + self.scale * _draw_noise(sample_shape, self.loc)

    def from_base(self, base: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actions made from normal numbers, and their log-probabilities ``[*B]``."""
        constant = _squash_constant(self._half)
        log_prob = _score_squashed(base, self.loc, self.scale, constant, self._event_axes)
        return self._into_bounds(base), log_prob

    def to_base(self, value: Tensor) -> Tensor:
        """Return the normal numbers of actions, as far as their precision allows; finite at the bounds."""
        y = (value - self._middle) / self._half
        most = 1.0 - torch.finfo(y.dtype).eps
        return y.clamp(-most, most).atanh()

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw actions ``[*sample_shape, *B, *shape]``; gradients flow through them."""
        return self._into_bounds(self.draw_base(sample_shape))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw actions without gradients."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probabilities ``[*B]`` of actions ``[*B, *shape]``."""
        return self.from_base(self.to_base(value))[1]

    @property
    def deterministic_sample(self) -> Tensor:
        """The median: the transformed mean."""
        return self._into_bounds(self.loc)

    @property
    def mode(self) -> Tensor:
        """The median, which stands in for the mode; the mode of the density differs."""
        return self.deterministic_sample

    def _into_bounds(self, base: Tensor) -> Tensor:
        # rounding must not move the sum beyond the bounds
        low: Any = self.low
        return (self._middle + self._half * base.tanh()).clamp(low, self.high)
