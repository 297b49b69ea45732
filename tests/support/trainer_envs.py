"""Scripted envs of each kind that trainers are given: two rows, whose episodes end in every way."""

from collections.abc import Callable
from typing import Any

from flatroll.wrappers.testing import Script, ScriptedTorchEnv, make_scripted

LENGTHS: Any = [[3, 1, 4], [2, 5]]
ENDS: Any = [["terminated", "truncated", "both"], ["truncated"]]


def envs_of(script: Script) -> dict[str, Callable[[], Any]]:
    """What makes each env, by its name."""
    modes = ("NextStep", "SameStep", "Disabled")
    return {
        **{mode: (lambda mode=mode: make_scripted(script, autoreset_mode=mode)) for mode in modes},
        "torch": lambda: ScriptedTorchEnv(script),
        "torch, last observations by env id": lambda: ScriptedTorchEnv(script, final_obs="ids"),
        "torch Disabled": lambda: ScriptedTorchEnv(script, autoreset=False, reuse_obs=True),
    }
