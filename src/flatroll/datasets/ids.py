"""Names of published data sets, and the error for unknown names."""

from collections.abc import Collection
from difflib import get_close_matches


def unknown_id_error(kind: str, name: str, known: Collection[str]) -> ValueError:
    """Return the error for an unknown data set name; it lists similar names.

    >>> unknown_id_error("D4RL", "hoper-medium-v2", D4RL).args[0]
    "D4RL has no set 'hoper-medium-v2': did you mean 'hopper-medium-v2', 'hopper-medium-v1', 'hopper-medium-v0'?"
    """
    near = get_close_matches(name, known, n=3)
    if near:
        return ValueError(f"{kind} has no set {name!r}: did you mean {', '.join(map(repr, near))}?")
    return ValueError(f"{kind} has no set {name!r}; it has {len(known)} sets, such as {next(iter(known))!r}")


def _all(names: str, tails: str, versions: str = "0") -> list[str]:
    """Every name with every tail in every version."""
    return [
        f"{name}-{tail}-v{version}"
        for name in names.split()
        for tail in tails.split()
        for version in versions.split()
    ]


_ROBOTS = "halfcheetah hopper walker2d ant"
_HANDS = "pen hammer relocate door"
_BULLET = "bullet-halfcheetah bullet-hopper bullet-walker2d bullet-ant"
_MAZES = "umaze umaze-diverse medium-play medium-diverse large-play large-diverse"
_LEVELS = "random medium expert medium-replay medium-expert"

D4RL: tuple[str, ...] = (
    *_all(_ROBOTS, _LEVELS, "2 1 0"),
    *_all(_ROBOTS, "full-replay", "2 1"),
    "ant-random-expert-v0",
    *_all(_HANDS, "human cloned expert", "1 0"),
    *_all(_HANDS, "human-longhorizon"),
    *_all("antmaze", _MAZES, "2 1 0"),
    *_all("antmaze-eval", _MAZES),
    *_all("maze2d", "umaze medium large umaze-dense medium-dense large-dense", "1 0"),
    *_all("maze2d-eval", "umaze medium large umaze-dense medium-dense large-dense", "1"),
    *_all("maze2d", "open open-dense"),
    *_all("kitchen", "complete partial mixed"),
    *_all("carla", "lane town town-full lane-render town-render"),
    *_all("flow", "ring-random ring-controller merge-random merge-controller"),
    *_all("minigrid", "fourrooms fourrooms-random"),
    *_all(_BULLET, _LEVELS),
    *_all("bullet-maze2d", "open umaze medium large"),
)

_KITCHEN = ["MicroOpen", "SdoorOpen", "LdoorOpen", "Knob1On", "Knob2Off"]

ROBOSET: tuple[str, ...] = (
    *(
        f"DAPG({who})/{task}_v2d-v1"
        for who in ("expert", "human")
        for task in ["door", "relocate", "hammer", "pen"]
    ),
    *(f"FK1-v4(expert)/FK1_{task}Random_v2d-v4" for task in _KITCHEN),
    "FK1-v4(human)/human_demos_by_playdata",
    "FK1-v4(human)/human_demos_by_task/human_demo_singleTask_Fixed-v4",
    *(f"FK1-v4(human)/human_demos_by_task/FK1_{task}Random_v2d-v4" for task in _KITCHEN),
)
