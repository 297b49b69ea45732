"""What a policy's file says about itself: inputs, outputs, norm and proof."""

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple, Self

from flatroll.layout.checks import check_path, optional_package

#: Name of the record in a file.
RECORD = "flatroll.json"
#: Largest record that is read.
_MAX_BYTES = 2**24


class Entry(NamedTuple):
    """An input or output of a policy's file.

    Attributes:
        name: of the entry.
        dtype: such as ``"float32"``.
        shape: of one row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Norm(NamedTuple):
    """A `RunningNorm` in a policy's file.

    Attributes:
        entry: what it normalises.
        rows: number of observations that its mean and deviation are those of.
    """

    entry: str
    rows: int


class PolicyRecord(NamedTuple):
    """What a file of `export_policy` says about itself.

    Attributes:
        flatroll: version that wrote it.
        inputs, outputs: in the order of the graph.
        states: the output that the next step reads, by the input.
        norms: that are frozen inside.
        sample: whether the outputs are what actions are drawn from.
        rows: number of rows on which file and policy were compared.
        episodes: number of these rows that begin an episode.
        largest_difference: see `ExportedPolicy`.
    """

    flatroll: str
    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    states: dict[str, str]
    norms: tuple[Norm, ...]
    sample: bool
    rows: int
    episodes: int
    largest_difference: float

    def as_json(self) -> str:
        """Return the record as text."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record of a text; ValueError for another text."""
        try:
            fields: dict[str, Any] = json.loads(text)
            for name in ("inputs", "outputs"):
                fields[name] = tuple(
                    Entry(str(entry), str(dtype), tuple(map(int, shape)))
                    for entry, dtype, shape in fields[name]
                )
            fields["norms"] = tuple(Norm(str(entry), int(rows)) for entry, rows in fields["norms"])
            return cls(**fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the record in the file must be one that export_policy writes: {error}"
            ) from error

    def as_text(self) -> str:
        """Return the record for people to read."""
        actions = "what actions are drawn from" if self.sample else "deterministic actions"
        lines = [f"a policy exported by flatroll {self.flatroll}, {actions}"]
        for title, entries in (("inputs", self.inputs), ("outputs", self.outputs)):
            lines.append(f"{title}:")
            lines += [f"  {entry.name}: {entry.dtype} {_shape_text(entry.shape)}" for entry in entries]

        if self.states:
            lines.append("states:")
            lines += [f"  {after} goes to {before} of the next step" for before, after in self.states.items()]

        if self.norms:
            lines.append("norm:")
            lines += [f"  {norm.entry}, by mean and deviation of {norm.rows:,} rows" for norm in self.norms]
        else:
            lines.append("norm: none")
        of_episodes = f" ({self.episodes:,} begin an episode)" if self.states else ""
        lines.append(
            f"proof: {self.rows:,} rows{of_episodes} were replayed through the file and the policy, the largest "
            f"difference was {self.largest_difference:.2g}"
        )
        return "\n".join(lines)


def _shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(["batch", *map(str, shape)]) + "]"


def read_record(path: str | Path) -> PolicyRecord:
    """Return what a policy's file says about itself; no code of the file runs.

    Args:
        path: a file of `export_policy`, ``.onnx`` (extra ``onnx``) or ``.pt2``.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: onnx is missing; the message names the extra.
        ValueError: ``path`` has another suffix, or the file was not written by `export_policy`.
    """
    path = check_path("path", path)
    if path.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"path must end with .onnx or .pt2, got {str(path)!r}")
    if not path.is_file():
        raise FileNotFoundError(f"path {str(path)!r} is not a file")

    text = _onnx_text(path) if path.suffix == ".onnx" else _pt2_text(path)
    if text is None:
        raise ValueError(
            f"path {str(path)!r} has no record of flatroll.export_policy: nothing is known about its proof"
        )
    return PolicyRecord.from_json(text)


def _onnx_text(path: Path) -> str | None:
    onnx = optional_package("onnx", "onnx", "reading an .onnx file")
    decode = optional_package("google.protobuf.message", "onnx", "reading an .onnx file").DecodeError
    try:
        model = onnx.load(str(path), load_external_data=False)
    except decode as error:
        raise ValueError(f"path {str(path)!r} is no ONNX file: {error}") from error
    found: dict[str, str] = {entry.key: entry.value for entry in model.metadata_props}
    return found.get(RECORD)


def _pt2_text(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.rpartition("/")[2] == RECORD and member.file_size <= _MAX_BYTES:
                    return archive.read(member).decode()
    except (zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise ValueError(f"path {str(path)!r} is no .pt2 file: {error}") from error
    return None
