"""Doctests of a file that needs an optional package run where the package is installed."""

from importlib.util import find_spec

# File of trainers: the package that it needs.
NEEDS = {
    "rsl_rl": "rsl_rl",
    "sb3": "stable_baselines3",
    "sb3_recurrent": "sb3_contrib",
    "rl_games": "rl_games",
    "skrl": "skrl",
    "tianshou": "tianshou",
    "torchrl": "torchrl",
}

collect_ignore = [
    f"flatroll/trainers/{name}.py" for name, package in NEEDS.items() if find_spec(package) is None
]
# Importing a notebook runs it, and notebooks hold no doctests: tests/examples executes them.
NOTEBOOKS = ("first_rollout", "frames", "from_sb3", "markers", "memory", "own_env")
collect_ignore += [f"flatroll/examples/notebooks/{name}.py" for name in NOTEBOOKS]
