"""The state of adapted envs: of the stream, of what adapts the env, and of the markers."""

from collections.abc import Sequence
from typing import Any

from flatroll.wrappers.gym_source import GymSource
from flatroll.wrappers.markers import MarkerWrapper
from flatroll.wrappers.plain_state import get_attributes, set_attributes
from flatroll.wrappers.snapshots.families import SnapshotFamily, inner_env
from flatroll.wrappers.source import SourceView
from flatroll.wrappers.stream import VectorStream
from flatroll.wrappers.torch_source import TorchSource


def _is_marker(layer: object) -> bool:
    """Return whether a marker's own class names what it holds: a class that derives from it may hold more."""
    return isinstance(layer, MarkerWrapper) and vars(type(layer)).get("row_state") is not None


def _set_of_marker(layer: Any, snapshot: Any) -> None:
    set_attributes(layer, snapshot, layer.stream.capabilities.device)


def _nothing(layer: Any) -> None:
    return None


def _keep(layer: Any, snapshot: Any) -> None:
    """Set nothing."""


def _env_of(layer: Any) -> Sequence[Any]:
    return [layer.env]


FAMILIES = (
    SnapshotFamily(
        name="adapted envs",
        recognises=lambda layer: type(layer) is VectorStream,
        get=lambda layer: layer.flags(),
        set=lambda layer, snapshot: layer.set_flags(snapshot),
        inner=lambda layer: [layer.source],
    ),
    SnapshotFamily(
        name="views of sources",
        recognises=lambda layer: isinstance(layer, SourceView),
        get=_nothing,
        set=_keep,
        inner=lambda layer: [layer.source],
    ),
    # What they remember serves checks only.
    SnapshotFamily(
        name="Gymnasium's vector envs, adapted",
        recognises=lambda layer: isinstance(layer, GymSource),
        get=_nothing,
        set=_keep,
        inner=_env_of,
    ),
    SnapshotFamily(
        name="simulators in torch, adapted",
        recognises=lambda layer: type(layer) is TorchSource,
        get=_nothing,
        set=lambda layer, snapshot: layer.check_no_finals(),
        inner=_env_of,
    ),
    SnapshotFamily(
        name="markers",
        recognises=_is_marker,
        get=lambda layer: get_attributes(layer, layer.row_state),
        set=_set_of_marker,
        inner=inner_env,
    ),
)
