"""One step of a policy as a graph: a module from tensors by name to tensors by name, and its trace."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase, set_interaction_type
from torch import Tensor, nn
from typing_extensions import override

from flatroll.deploy.interface import Names
from flatroll.layout.keys import NestedKey
from flatroll.layout.tensordict_seam import get_entry
from flatroll.modules.mode import set_recurrent_mode

#: Tensors by name.
Entries = dict[str, Tensor]


class StepGraph(nn.Module):
    """Runs one step of a policy on entries ``[E, ...]`` by name, choosing deterministic actions.

    Args:
        policy: a tensordict module.
        inputs: what it reads.
        outputs: what is returned.
    """

    def __init__(self, policy: TensorDictModuleBase, inputs: Names, outputs: Names) -> None:
        super().__init__()
        self.policy = policy
        self.inputs = inputs
        self.outputs = outputs
        #: Number of rows of the last call.
        self.rows: Any = 0

    @override
    def forward(self, entries: Mapping[str, Tensor]) -> Entries:
        """Return the outputs by name."""
        self.rows = next(iter(entries.values())).shape[0]
        # cloned: a policy may write into what it reads
        columns = {key: entries[name].clone() for name, key in self.inputs.items()}
        batch = act(self.policy, columns, self.rows)
        return {name: get_entry(batch, key) for name, key in self.outputs.items()}


def act(policy: TensorDictModuleBase, columns: Mapping[NestedKey, Tensor], rows: Any) -> TensorDictBase:
    """Return a batch ``[rows]`` of these columns on which a policy has made single, deterministic steps."""
    batch = TensorDict({}, [rows])
    for key, column in columns.items():
        batch.set(key, column)

    with set_interaction_type(InteractionType.DETERMINISTIC), set_recurrent_mode("sequential"):
        acted: TensorDictBase = policy(batch)
    return acted


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turn off autocast of the caller, which would become a part of a graph: on the CPU and on the accelerator."""
    devices = ["cpu"]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        devices.append(accelerator.type)

    with ExitStack() as stack:
        for device in devices:
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def trace(graph: StepGraph, example: Entries) -> torch.export.ExportedProgram:
    """Trace a step, with any number of rows.

    Args:
        graph: the step.
        example: entries of two rows or more; one row would fix the number.

    Raises:
        ValueError: a part of the policy cannot be traced; the error names it.
    """
    rows = torch.export.Dim("batch")
    shapes = ({name: {0: rows} for name in example},)
    with _PartsAtWork(graph) as parts, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch, about itself
        try:
            return torch.export.export(graph, (example,), dynamic_shapes=shapes)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise parts.explain(error) from error


class _PartsAtWork:
    """Follows which part of a policy runs, so that an error can name it."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._names = {part: name for name, part in graph.policy.named_modules()}
        self._running: list[nn.Module] = []
        #: The first part that made a constant of the number of rows.
        self._fixed_rows: nn.Module | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for part in self._names:
            self._hooks.append(part.register_forward_pre_hook(self._begin))
            self._hooks.append(part.register_forward_hook(self._end))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, part: nn.Module, inputs: Any) -> None:
        self._running.append(part)

    def _end(self, part: nn.Module, inputs: Any, outputs: Any) -> None:
        self._running.pop()
        rows = self._graph.rows
        if (
            self._fixed_rows is None
            and isinstance(rows, torch.SymInt)
            and rows.node.maybe_as_int() is not None
        ):
            self._fixed_rows = part

    def explain(self, error: Exception) -> Exception:
        """Return the error that names the part at fault."""
        said = _first_line(error)
        if self._running:
            return ValueError(
                f"policy cannot be exported: its part {self._called(self._running[-1])} does something that depends on "
                "the numbers in its input, as Python's if, while and float() do, or leaves torch. Use torch.where, or "
                f"export the policy without it: {said}"
            )
        if self._fixed_rows is not None:
            return ValueError(
                f"policy cannot be exported: its part {self._called(self._fixed_rows)} makes a constant of the number "
                f"of rows, as len(x) and int(x.shape[0]) do. Use x.shape[0]: {said}"
            )
        return ValueError(f"policy cannot be exported: {said}")

    def _called(self, part: nn.Module) -> str:
        name = self._names[part]
        if not name:
            return type(part).__name__
        return f"{name!r} ({type(part).__name__})"


def _first_line(error: Exception) -> str:
    """Return the first line of torch's error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0]
