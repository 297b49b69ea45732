"""Writes the graph of a step to a file, and runs the file: ONNX by onnxruntime, ``.pt2`` by torch."""

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from tensordict.nn import TensorDictModuleBase

from flatroll.deploy.graph import Entries, StepGraph, trace
from flatroll.deploy.interface import Interface
from flatroll.deploy.records import RECORD, PolicyRecord
from flatroll.layout.checks import optional_package

#: One step: entries ``[E, ...]`` by name to outputs and scores by name.
Step: TypeAlias = Callable[[Entries], Entries]

#: Name of the first dim of all inputs and outputs in an ONNX file.
BATCH = "batch"


class GraphFile(Protocol):
    """The graph of a policy's step, which can be written to a file."""

    def write(self, path: Path, record: PolicyRecord | None) -> None:
        """Write the graph, with a record of its proof if there is one."""
        ...

    def open(self, path: Path) -> Step:
        """Return a function that runs the file at ``path``, and also returns scores."""
        ...


class OnnxFile:
    """A step as an ONNX graph.

    Args:
        policy: a tensordict module.
        interface: what it reads and writes.
        example: entries of a few rows.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is missing.
        ValueError: a part of the policy cannot be traced, or has no form in ONNX.
    """

    def __init__(self, policy: TensorDictModuleBase, interface: Interface, example: Entries) -> None:
        self._onnx = optional_package("onnx", "onnx", "writing an .onnx file")
        optional_package("onnxscript", "onnx", "writing an .onnx file")
        self._runtime = optional_package("onnxruntime", "onnx", "replaying rows through an .onnx file")

        program = trace(StepGraph(policy, interface.inputs, interface.outputs | interface.scores), example)
        self._model: Any = _translate(program, interface)
        for value in (*self._model.graph.input, *self._model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_param = BATCH

        # Scores stay values inside the graph, under their names: who replays rows asks for them.
        outputs = self._model.graph.output
        self._scores = [value for value in outputs if value.name in interface.scores]
        for value in self._scores:
            outputs.remove(value)

    def write(self, path: Path, record: PolicyRecord | None) -> None:
        """See `GraphFile`."""
        if record is not None:
            self._onnx.helper.set_model_props(self._model, {RECORD: record.as_json()})
        self._onnx.save(self._model, str(path))

    def open(self, path: Path) -> Step:
        """See `GraphFile`."""
        model = self._onnx.load(str(path))
        model.graph.output.extend(self._scores)

        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        with self._errors_of(path):
            session = self._runtime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        names = [value.name for value in session.get_outputs()]

        def run(entries: Entries) -> Entries:
            with self._errors_of(path):
                columns = session.run(None, {name: column.numpy() for name, column in entries.items()})
            return {name: torch.from_numpy(column) for name, column in zip(names, columns, strict=True)}

        return run

    @contextmanager
    def _errors_of(self, path: Path) -> Iterator[None]:
        """Turn onnxruntime's errors, which have no common class but Exception, into a ValueError."""
        state = self._runtime.capi.onnxruntime_pybind11_state
        kinds = tuple(
            kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        try:
            yield
        except kinds as error:
            raise ValueError(
                f"onnxruntime cannot run {path.name}: {error}. No file was written; one that ends with .pt2 may hold "
                "the policy"
            ) from error


def _translate(program: torch.export.ExportedProgram, interface: Interface) -> Any:
    """Return the ONNX model of a program; ValueError, with the part's name, if it has none."""
    outputs = [*interface.outputs, *interface.scores]
    with _quiet():
        try:
            translated: Any = torch.onnx.export(
                program,
                dynamo=True,
                input_names=list(interface.inputs),
                output_names=outputs,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            part, said = _explain(program, str(error))
            raise ValueError(
                f"policy cannot be exported to ONNX, since {part} has no form there: {said}. A file that ends with "
                ".pt2 can hold it"
            ) from error
    return translated.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what torch's exporter says about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _explain(program: torch.export.ExportedProgram, error: str) -> tuple[str, str]:
    """Return the part of a policy that could not be translated, and what torch said."""
    said = error.strip().splitlines()[-1]
    for line in error.splitlines():
        if "No ONNX function found" in line:
            said = line.strip()

    operation = re.search(r"op='([\w.]+)'|torch\.ops\.(\w+\.\w+)", error)
    if operation is None:
        return "a part of it", said

    name = operation[1] or operation[2]
    for node in program.graph.nodes:
        if str(node.target).startswith(name) and node.meta.get("nn_module_stack"):
            path, kind = [*node.meta["nn_module_stack"].values()][-1]
            return (
                f"{name} of its part {path.removeprefix('policy.')!r} ({str(kind).rpartition('.')[2]})",
                said,
            )
    return name, said


class TorchFile:
    """A step as a program of `torch.export`; arguments as of `OnnxFile`.

    Raises:
        ValueError: a part of the policy cannot be traced.
    """

    def __init__(self, policy: TensorDictModuleBase, interface: Interface, example: Entries) -> None:
        self._program = trace(StepGraph(policy, interface.inputs, interface.outputs), example)
        self._scores: Any = None
        if interface.scores:
            self._scores = trace(StepGraph(policy, interface.inputs, interface.scores), example).module()

    def write(self, path: Path, record: PolicyRecord | None) -> None:
        """See `GraphFile`."""
        more = {}
        if record is not None:
            more[RECORD] = record.as_json()
        with _quiet():
            torch.export.save(self._program, path, extra_files=more)

    def open(self, path: Path) -> Step:
        """See `GraphFile`."""
        with _quiet():
            step: Any = torch.export.load(path).module()

        def run(entries: Entries) -> Entries:
            with torch.no_grad():
                found: Entries = step(entries)
                if self._scores is not None:
                    found |= self._scores(entries)
            return found

        return run


#: By the suffix of the file.
KINDS: dict[str, type[OnnxFile] | type[TorchFile]] = {".onnx": OnnxFile, ".pt2": TorchFile}
