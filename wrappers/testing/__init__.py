"""Tools for testing: `check_vector_env` checks your env, `check_snapshots` its snapshots, `check_marker` your marker.

Scripted envs have known rows.
"""

from flatroll.wrappers.testing.check_env import ContractError, check_vector_env, vector_env_problems
from flatroll.wrappers.testing.check_marker import check_marker
from flatroll.wrappers.testing.check_snapshots import check_snapshots
from flatroll.wrappers.testing.script import Script, decode, encode, expected_rows
from flatroll.wrappers.testing.scripted_envs import (
    ScriptedEnv,
    ScriptedRslEnv,
    ScriptedTorchEnv,
    ScriptedVectorEnv,
    make_scripted,
)
from flatroll.wrappers.testing.scripted_game import ScriptedGame

__all__ = [
    "ContractError",
    "Script",
    "ScriptedEnv",
    "ScriptedGame",
    "ScriptedRslEnv",
    "ScriptedTorchEnv",
    "ScriptedVectorEnv",
    "check_marker",
    "check_snapshots",
    "check_vector_env",
    "decode",
    "encode",
    "expected_rows",
    "make_scripted",
    "vector_env_problems",
]
