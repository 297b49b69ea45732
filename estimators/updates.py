"""`update_step`: loss, gradients, clipping, optimizer step and target update in one call, compiled on request."""

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.adam import adam

from flatroll.estimators.losses.base import LossModule, TargetNetUpdater
from flatroll.layout import checks
from flatroll.layout.keys import NestedKey, as_tuple
from flatroll.layout.profiling import call_in_range, is_profiling
from flatroll.layout.tensordict_seam import get_entry, nest, set_entry

Columns = Mapping[NestedKey, Tensor]

#: Adam's state of a parameter, in the order expected by ``torch.optim.adam.adam``.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")


class UpdateStep:
    """``step(batch) -> losses``: one training update in one call; :func:`update_step` is an alias.

    A call adds up the losses (``"loss"``, ``"loss_*"``), computes gradients, scales them down to ``max_grad_norm``,
    steps the optimizer and moves the target networks. The loss's outputs in the batch are kept: with prioritized
    sampling call ``buffer.update_tensordict_priority(sample)`` after ``step(sample)``. ``step.epochs(rows, epochs=4,
    minibatch=256)`` updates on shuffled minibatches of a batch.

    With ``compile=True``, loss, gradients, clipping and the step of Adam or AdamW run as one graph of
    ``torch.compile``; other optimizers, or ones with hooks, step outside. The graph is compiled in the first call,
    for any number of rows (a single row gets its own graph), and again for batches with other entries. Gradients
    equal those of the eager update up to rounding; ``parameter.grad`` stays None if the graph applies them. On a GPU
    it is captured as a CUDA graph. If compilation fails, it warns once and updates run eagerly.

    Args:
        loss: any loss that returns scalars: ``reduction`` is ``"mean"`` or ``"sum"``.
        optimizer: any torch optimizer of all trained parameters, such as ``Adam(loss.parameters())``. Its groups may
            have different learning rates, and schedules may change them. On the CPU, groups of Adam and AdamW with
            neither ``fused`` nor ``foreach`` set get ``fused=True``: the same steps up to rounding, in a third of the
            time.
        max_grad_norm: limit of the global gradient norm, above 0. Default: None, no limit.
        compile: whether to compile, which takes about ten seconds and needs a C++ compiler. Default: False.
        updater: a :class:`SoftUpdate` or :class:`HardUpdate` of this loss, stepped after each update. Default: None.
        autocast: ``torch.bfloat16``: the loss runs in mixed precision. Default: None.

    Attributes:
        compile_seconds: total time of compilation so far; 0.0 before the first call.

    Raises:
        TypeError: an argument is not a flatroll loss (pass the loss, not ``torch.compile(loss)``), optimizer or
            updater.
        ValueError: the optimizer has no parameters of the loss, the updater moves another loss's targets, or a number
            is out of range; called: the loss returns no scalars.

    Example:
        >>> from tensordict import TensorDict
        >>> from flatroll.estimators import DQNLoss, SoftUpdate
        >>> loss = DQNLoss(nn.Linear(3, 2))
        >>> optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
        >>> step = update_step(loss, optimizer, max_grad_norm=1.0, updater=SoftUpdate(loss, tau=0.005))
        >>> rows = TensorDict({
        ...     "observation": torch.randn(10, 3), "action": torch.randint(2, (10,)),
        ...     "next": {"observation": torch.randn(10, 3), "reward": torch.ones(10, 1),
        ...              "terminated": torch.zeros(10, 1, dtype=torch.bool)},
        ... }, [10])
        >>> sorted(step(rows).keys()), rows["td_error"].shape
        (['loss', 'pred_value', 'target_value'], torch.Size([10]))
        >>> step.epochs(rows, epochs=3, minibatch=4)["loss"].shape                     # 4, 4 and 2 rows, three times
        torch.Size([9])

    References:
        The idea is that of LeanRL (V. Moens, https://github.com/pytorch-labs/LeanRL) and PufferLib (J. Suarez,
        https://arxiv.org/abs/2406.12905): a small network's update spends its time in Python and launches.
    """

    def __init__(
        self,
        loss: LossModule,
        optimizer: Optimizer,
        *,
        max_grad_norm: float | None = None,
        compile: bool = False,
        updater: TargetNetUpdater | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        checks.check_type("loss", loss, LossModule, "a loss of flatroll", hint="compile=True compiles it")
        checks.check_type("optimizer", optimizer, Optimizer, "an optimizer of torch")
        if max_grad_norm is not None:
            checks.check_number("max_grad_norm", max_grad_norm, above=0)
        if updater is not None:
            checks.check_type("updater", updater, TargetNetUpdater, "a SoftUpdate or HardUpdate")
            if updater.loss_module is not loss:
                raise ValueError(
                    "updater must move the target networks of this loss, got one of another loss"
                )
        checks.check_flags(compile=compile)
        checks.check_choice("autocast", autocast, (None, torch.bfloat16), hint="float16 needs a GradScaler")

        trained = {id(x) for group in optimizer.param_groups for x in group["params"]}
        if not any(id(x) in trained for x in loss.parameters() if x.requires_grad):
            raise ValueError(
                "optimizer must hold parameters of the loss, got none: create it from loss.parameters()"
            )

        if type(optimizer) in (Adam, AdamW):
            _fuse(optimizer)

        self.loss = loss
        self.optimizer = optimizer
        self.updater = updater
        self.max_grad_norm = max_grad_norm
        self.autocast = autocast
        self.compile_seconds = 0.0

        self._graph = _Graph(self) if compile else None

    @property
    def compiled(self) -> bool:
        """Whether updates run compiled; False again if compiling failed."""
        return self._graph is not None

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Update the networks once on a batch ``[N]`` or ``[B, T]``; return the loss's detached outputs."""
        checks.check_rows(batch)
        columns: Columns = {}
        if self.compiled:
            columns = columns_read_by(self.loss, batch)
        if is_profiling():
            return call_in_range("update", self._update, batch, columns)
        return self._update(batch, columns)

    def epochs(
        self,
        rows: TensorDictBase,
        *,
        epochs: int = 4,
        minibatch: int = 256,
        generator: torch.Generator | None = None,
    ) -> TensorDict:
        """Update on minibatches; each epoch uses every row once, in a new random order.

        Only entries that the loss reads are indexed. The last minibatch of an epoch is shorter if ``minibatch`` does
        not divide the rows.

        Args:
            rows: ``[N]``; or ``[B, T]``, whose series are not split.
            epochs: passes over the rows. Default: 4.
            minibatch: rows (or series) per update. Default: 256.
            generator: draws the orders. Default: torch's, on the device of the rows.

        Returns:
            losses and diagnostics of all updates, ``[updates]`` each, oldest first.

        Raises:
            ValueError: ``epochs`` or ``minibatch`` below 1, no rows, or rows ``[N]`` for a recurrent network.
        """
        checks.check_rows(rows)
        checks.check_whole_number("epochs", epochs)
        checks.check_whole_number("minibatch", minibatch)

        columns = columns_read_by(self.loss, rows)
        device = rows.device
        is_init = self.loss.key("is_init")

        if rows.batch_dims == 1 and any(
            is_init in getattr(part, "in_keys", ()) for part in self.loss.modules()
        ):
            raise ValueError(
                "rows must be [B, T] for a recurrent network, which reads runs in order, got [N]: call the step on "
                "samples of a SliceSampler instead"
            )
        if not columns or not len(rows):
            raise ValueError(
                f"rows must not be empty and must have entries that {type(self.loss).__name__} reads, got "
                f"{list(rows.shape)}"
            )

        place = next(iter(columns.values())).device
        found: list[TensorDict] = []
        for _ in range(epochs):
            drawn_on = place if generator is None else generator.device
            order = torch.randperm(len(rows), generator=generator, device=drawn_on).to(place)
            for some in torch.split(order, minibatch):
                part = {key: column.index_select(0, some) for key, column in columns.items()}
                batch = nest(part, len(some), *rows.batch_size[1:], device=device)
                if is_profiling():
                    found.append(call_in_range("update", self._update, batch, part))
                else:
                    found.append(self._update(batch, part))

        numbers: dict[NestedKey, Tensor] = {
            key: torch.stack([x[key] for x in found])
            for key in found[0].keys()  # noqa: SIM118 (a tensordict's iter is over rows)
        }
        return nest(numbers, len(found))

    def _update(self, batch: TensorDictBase, columns: Columns) -> TensorDict:
        """Update on a batch; the compiled function receives these columns."""
        if self._graph is None:
            losses = self._eager(batch)
        else:
            try:
                losses = self._graph.update(batch, columns)
            except RuntimeError as error:  # torch.compile failed, or the loss cannot read this batch
                losses = self._eager(batch)  # the eager call raises its own error
                self._graph = None
                text = (
                    f"update_step continues uncompiled, because torch.compile failed{_where(error)}\n"
                    "torch.compile(loss, fullgraph=True)(batch) shows torch's whole message"
                )
                warnings.warn(text, UserWarning, stacklevel=3)

        if self.updater is not None:
            self.updater.step()

        return losses

    def _eager(self, batch: TensorDictBase) -> TensorDict:
        total, numbers = self.sum_losses(self.loss, batch)
        parameters = [x for group in self.optimizer.param_groups for x in group["params"]]

        for parameter in parameters:  # like optimizer.zero_grad(), but without its profiling
            parameter.grad = None

        total.backward()  # type: ignore[no-untyped-call]
        if self.max_grad_norm is not None:
            gradients = [x.grad for x in parameters if x.grad is not None]
            if len({x.device for x in gradients}) > 1:
                nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
            else:  # equivalent, in half the time
                norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
                factor = clip_factor(norms, self.max_grad_norm)
                torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]

        self.optimizer.step()
        return nest({key: value.detach() for key, value in numbers.items()})

    def sum_losses(
        self, loss: Callable[[TensorDictBase], TensorDict], batch: TensorDictBase
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the loss; return the sum of its losses, and all that it returns."""
        kind = next(self.loss.parameters()).device.type

        with nullcontext() if self.autocast is None else torch.autocast(kind, self.autocast):
            numbers: dict[str, Tensor] = dict(loss(batch).items())

        losses = [value for key, value in numbers.items() if key.startswith("loss")]
        if not losses or losses[0].ndim:
            raise ValueError(
                f"loss must return scalars named 'loss' or 'loss_*', got {[*numbers]} from "
                f"{type(self.loss).__name__}(reduction={self.loss.reduction!r}): use 'mean' or 'sum'"
            )

        total = losses[0]
        for value in losses[1:]:
            total = total + value

        return total, numbers


def _fuse(optimizer: Optimizer) -> None:
    """Let Adam step with one kernel on the CPU, in groups that leave the choice to torch."""
    for group in optimizer.param_groups:
        chosen = any(group[name] is not None for name in ("fused", "foreach"))
        fits = all(x.is_cpu and x.is_floating_point() for x in group["params"])
        if fits and not (chosen or group["differentiable"] or group["capturable"]):
            group["fused"] = True


def _where(error: RuntimeError) -> str:
    """Return where torch.compile failed, the last line outside of installed packages, and its explanation."""
    text = str(error)
    frames = re.findall(r'File "([^"]+)", line (\d+)', text.partition("from user code")[2])
    own = [frame for frame in frames if not frame[0].startswith((sys.prefix, sys.base_prefix))] or frames
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [repr(error)]

    # "backend='inductor' raised:" and what it raised
    count = 2 if lines[0].endswith(":") else 1
    first = " ".join(lines[:count])
    reason = next((line for line in lines if line.startswith("Explanation: ")), first)
    place = " at {}:{}".format(*own[-1]) if own else ""
    return f"{place}: {reason.removeprefix('Explanation: ')}"


def clip_factor(norms: Sequence[Tensor], most: float) -> Tensor:
    """Return the factor by which ``clip_grad_norm_`` scales gradients to limit their joint norm to ``most``."""
    factor: Tensor = most / (torch.stack([*norms]).norm() + 1e-6)
    return factor.clamp(max=1.0)


def columns_read_by(loss: LossModule, batch: TensorDictBase) -> dict[NestedKey, Tensor]:
    """Return the tensors of a batch that a loss may read, by key; all if it does not declare its keys."""
    keys: list[Any] = loss.readable_keys or list(batch.keys(True, True))
    found: dict[NestedKey, Tensor] = {}
    for key in keys:
        entry = get_entry(batch, key)
        if isinstance(entry, Tensor):
            found[key] = entry
        elif isinstance(entry, TensorDictBase):  # an action of several parts, or parameters of a distribution
            inner: list[Any] = list(entry.keys(True, True))
            for name in inner:
                found[(*as_tuple(key), *as_tuple(name))] = entry.get(name)
    return found


class _Graph:
    """The compiled part of an update: the loss, its gradients, clipping and, of Adam and AdamW, their step."""

    def __init__(self, step: UpdateStep) -> None:
        self.step = step
        self.loss = step.loss
        self.optimizer = step.optimizer
        self.names: list[str] = []  # names of the parameters with gradients, by group
        self.groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        self.compiled_for: set[object] = set()
        hooked = step.optimizer._optimizer_step_pre_hooks or step.optimizer._optimizer_step_post_hooks
        self.applies = type(step.optimizer) in (Adam, AdamW) and not hooked
        # torch limits recompilations to 8 per code object, so each step gets its own
        code = _Graph._traced.__code__.replace()
        names = _Graph._traced.__globals__
        own = MethodType(FunctionType(code, names), self)

        cuda = next(step.loss.parameters()).is_cuda
        mode = "reduce-overhead" if cuda else None
        self.run: Callable[..., Any] = torch.compile(own, fullgraph=True, mode=mode)

    def update(self, batch: TensorDictBase, columns: Columns) -> TensorDict:
        """Update once; compile first if the batch is of a new kind."""
        dims = batch.batch_dims
        device = batch.device
        kind = (dims, device, self.loss.training, *columns)
        if kind not in self.compiled_for:
            self._compile(columns, batch)
            self.compiled_for.add(kind)

        numbers, priorities, gradients = self._call(columns, dims, device)
        for priority in priorities:
            set_entry(batch, self.loss.key("priority"), priority)

        if not self.applies:
            parameters = [x for _, own in self.groups for x in own]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()

        return nest(numbers)

    def _compile(self, columns: Columns, batch: TensorDictBase) -> None:
        """Compile by a first run, whose effects are undone.

        The number of rows must differ from all other sizes: torch would treat equal sizes as the same symbol, and
        compile again for the next batch.
        """
        start = time.perf_counter()
        name = type(self.loss).__name__
        print(f"flatroll: compiling the update of {name} (some ten seconds)", file=sys.stderr, flush=True)

        if not self.groups:
            self._find_parameters(batch)

        sizes = {size for x in (*self.loss.parameters(), *columns.values()) for size in x.shape}
        rows = next(number for number in range(97, 10**9, 2) if number not in sizes)
        longer: dict[Tensor, Tensor] = {}  # two entries may share a tensor
        for column in columns.values():
            if column not in longer:
                index = torch.arange(rows, device=column.device) % len(column)
                longer[column] = column.index_select(0, index)
                torch._dynamo.mark_dynamic(longer[column], 0)

        moments = [x for group in self._moments() for column in group for x in column]
        with self._restoring(moments):
            self._call({key: longer[x] for key, x in columns.items()}, batch.batch_dims, batch.device)
        self.step.compile_seconds += time.perf_counter() - start

    def _find_parameters(self, batch: TensorDictBase) -> None:
        """Find the parameters with gradients: torch.func returns zeros for the others, torch None."""
        if any(isinstance(module, DistributedDataParallel) for module in self.loss.modules()):
            raise RuntimeError("the hooks of DistributedDataParallel do not run in torch.func")
        names = {id(x): name for name, x in self.loss.named_parameters() if x.requires_grad}
        groups: list[Any] = self.optimizer.param_groups
        asked = [[x for x in group["params"] if id(x) in names] for group in groups]

        with self._restoring([]), torch.enable_grad():
            total, _ = self.step.sum_losses(self.loss, batch.copy())
            found = torch.autograd.grad(total, [x for own in asked for x in own], allow_unused=True)

        reached = iter([gradient is not None for gradient in found])
        self.groups = [
            (group, [x for x in own if next(reached)]) for group, own in zip(groups, asked, strict=True)
        ]
        self.names = [names[id(x)] for _, own in self.groups for x in own]

    @contextmanager
    def _restoring(self, moments: list[Tensor]) -> Iterator[None]:
        """Context manager: restore weights, moments, buffers and random state at the end."""
        modules = list(self.loss.modules())
        held = [dict(module._buffers) for module in modules]  # a loss may replace the tensor
        changed = [*self.loss.parameters(), *self.loss.buffers(), *moments]
        before = [x.detach().clone() for x in changed]
        devices = {x.device for x in changed if x.is_cuda}

        with torch.random.fork_rng(devices=list(devices)):
            yield

        with torch.no_grad():
            for module, buffers in zip(modules, held, strict=True):
                module._buffers.update(buffers)
            for x, old in zip(changed, before, strict=True):
                x.copy_(old)

    def _call(self, columns: Columns, dims: int, device: torch.device | None) -> Any:
        """Call the compiled function with the optimizer's current numbers."""
        rates: list[Tensor] = []  # as tensors, because changed Python numbers would cause recompilation
        options: list[tuple[Any, ...]] = []

        if self.applies:
            names = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
            for group, _ in self.groups:
                rates.append(torch.as_tensor(group["lr"], dtype=torch.float32))
                options.append(tuple(group[name] for name in names))

        parameters = [own for _, own in self.groups]
        out = self.run(columns, dims, device, parameters, self._moments(), rates, options)
        if not next(self.loss.parameters()).is_cuda:
            return out

        # a CUDA graph overwrites these results in the next update
        numbers, priorities, gradients = out
        numbers = {key: x.clone() for key, x in numbers.items()}
        return numbers, [x.clone() for x in priorities], gradients

    def _moments(self) -> list[list[list[Tensor]]]:
        """For each group, and each name of :data:`_MOMENTS`, what Adam keeps for each parameter."""
        if not self.applies:
            return []
        state = self.optimizer.state
        new = [x for _, own in self.groups for x in own if not state[x]]
        if new:
            self._begin(new)

        moments = []
        for _, own in self.groups:
            moments.append([[state[x][name] for x in own if name in state[x]] for name in _MOMENTS])
        return moments

    def _begin(self, new: list[nn.Parameter]) -> None:
        """Make the optimizer create its state for these parameters, by an uncounted step with learning rate 0."""
        rates = [group["lr"] for group, _ in self.groups]
        for group, own in self.groups:
            group["lr"] = 0.0
            for x in own:
                x.grad = None
        for x in new:
            x.grad = torch.zeros_like(x)

        self.optimizer.step()

        for (group, _), rate in zip(self.groups, rates, strict=True):
            group["lr"] = rate
        for x in new:
            x.grad = None
            for moment in self.optimizer.state[x].values():
                moment.zero_()
                if moment.is_cuda:
                    torch._dynamo.mark_static_address(moment)

    def _traced(
        self,
        columns: Columns,
        dims: int,
        device: torch.device | None,
        parameters: list[list[nn.Parameter]],
        moments: list[list[list[Tensor]]],
        rates: list[Tensor],
        options: list[tuple[Any, ...]],
    ) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        """Return the loss's outputs, the priorities that it wrote, and gradients not yet applied."""
        rows = next(iter(columns.values())).shape[:dims]

        def total(weights: list[Tensor]) -> tuple[Tensor, tuple[dict[str, Tensor], list[Tensor]]]:
            batch = nest(columns, *rows, device=device)
            named = dict(zip(self.names, weights, strict=True))
            value, numbers = self.step.sum_losses(
                lambda data: functional_call(self.loss, named, (data,)), batch
            )
            written: list[Tensor] = []
            if "priority" in self.loss.tensor_keys:
                written = [get_entry(batch, self.loss.key("priority"))]
            return value, (numbers, written)

        with torch.no_grad():
            flat = [x.detach() for own in parameters for x in own]
            gradients, (_, (numbers, priorities)) = grad_and_value(total, has_aux=True)(flat)
            if self.step.max_grad_norm is not None:
                factor = clip_factor([gradient.norm() for gradient in gradients], self.step.max_grad_norm)
                gradients = [gradient * factor for gradient in gradients]

            if not self.applies:
                return numbers, priorities, gradients

            left = iter(gradients)
            for own, kept, rate, option in zip(parameters, moments, rates, options, strict=True):
                (beta1, beta2), eps, weight_decay, amsgrad, maximize, decoupled = option
                means, squares, largest, steps = kept
                adam(
                    own,  # type: ignore[arg-type]
                    [next(left) for _ in own],
                    means,
                    squares,
                    largest,
                    steps,
                    foreach=False,
                    capturable=True,  # uses only tensor arithmetic
                    lr=rate,
                    beta1=beta1,
                    beta2=beta2,
                    eps=eps,
                    weight_decay=weight_decay,
                    amsgrad=amsgrad,
                    maximize=maximize,
                    decoupled_weight_decay=decoupled,
                )
        return numbers, priorities, []


update_step = UpdateStep
"""The name to call: ``step = update_step(loss, optimizer)`` makes an :class:`UpdateStep`."""
