"""Cases that run on the CPU and on the emulated device, and must give the same values."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import chip
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from flatroll.rollouts import rollout
from flatroll.wrappers import as_vector_env

CLOSE = {"rtol": 2e-4, "atol": 2e-5}
EQUAL = {"rtol": 0.0, "atol": 0.0}

Run = Callable[[str], Any]


class Cases:
    """Functions of a device; ``close`` ones may differ in rounding.

    Attributes:
        drives: the public names that each case uses.
        made: the cases of all files of this process.
    """

    made: ClassVar[list["Cases"]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.runs: dict[str, tuple[Run, bool]] = {}
        self.drives: dict[str, str] = {}

    def add(self, name: str, *, drives: str = "", close: bool = False) -> Callable[[Run], Run]:
        """Add a case; ``drives`` are public names, separated by spaces."""

        def register(run: Run) -> Run:
            assert name not in self.runs, name
            self.runs[name] = run, close
            self.drives[name] = drives
            return run

        return register

    @property
    def parametrized(self) -> pytest.MarkDecorator:
        return pytest.mark.parametrize("name", list(self.runs))

    def check(self, name: str) -> None:
        """Run a case on both devices and compare all leaves of its results."""
        run, close = self.runs[name]
        expected = seeded(run, "cpu")
        found = seeded(run, chip.NAME)
        assert list(found) == list(expected)

        for path, value in expected.items():
            if isinstance(value, torch.Tensor):
                tolerance = CLOSE if close else EQUAL
                torch.testing.assert_close(
                    found[path],
                    value,
                    equal_nan=True,
                    **tolerance,
                    msg=lambda text, path=path: f"{path}: {text}",
                )
            else:
                assert str(found[path]).replace(f"{chip.NAME}:0", "cpu") == str(value), path


def seeded(run: Run, device: str) -> dict[str, Any]:
    """Return the leaves of a result by path, tensors on the CPU."""
    torch.manual_seed(0)
    np.random.seed(0)
    found = dict(leaves(run(device)))
    return {
        path: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for path, value in found.items()
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All tensors and numbers of a result, by path."""
    if isinstance(value, TensorDictBase):
        for key, part in sorted(value.items(True, True), key=lambda item: str(item[0])):
            yield from leaves(part, f"{path}/{key}")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}/{number}")
    elif isinstance(value, np.ndarray):
        yield path, torch.as_tensor(value)
    elif value is not None:
        yield path, value


class Sim:
    """A simulator on a device: its observation is (env, episode, step). Every third episode is truncated.

    Args:
        num_envs: E.
        device: of its arrays.
        mode: "SameStep", "NextStep" or "Disabled".
        kind: of the observation, "tensor" or "dict".
        info: return entries in info.
        final: "dense": ``info["final_obs"]`` holds the last observations; "absent": nobody does.
        box: actions are two numbers, else one of four.
        mask: the observation has an action mask; needs ``kind="dict"``.
    """

    def __init__(
        self,
        num_envs: int,
        device: str,
        mode: str = "SameStep",
        kind: str = "tensor",
        *,
        info: bool = False,
        final: str = "dense",
        box: bool = False,
        mask: bool = False,
    ) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.mode, self.kind, self.info, self.final, self.mask = mode, kind, info, final, mask

        vector = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_observation_space: Any = vector
        if kind == "dict":
            entries: dict[str, Any] = {"policy": vector, "age": spaces.Box(-np.inf, np.inf, (1,), np.float32)}
            if mask:
                entries["action_mask"] = spaces.MultiBinary(4)
            self.single_observation_space = spaces.Dict(entries)
        self.single_action_space: Any = spaces.Box(-1.0, 1.0, (2,)) if box else spaces.Discrete(4)
        self.metadata = {"autoreset_mode": mode}

        self.lengths = (torch.arange(num_envs * 4).reshape(num_envs, 4) * 7 % 6 + 2).to(device)
        self.env = torch.arange(num_envs, device=device)
        self.episode = torch.full((num_envs,), -1, device=device)
        self.age = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.ended = torch.zeros(num_envs, dtype=torch.bool, device=device)

    def observe(self) -> Any:
        vector = torch.stack([self.env, self.episode, self.age], 1).float()
        if self.kind == "tensor":
            return vector
        found = {"policy": vector, "age": self.age[:, None].float()}
        if self.mask:
            found["action_mask"] = (torch.arange(4, device=self.device) + self.age[:, None]) % 3 != 0
        return found

    def begin(self, where: torch.Tensor) -> None:
        self.episode = self.episode + where.long()
        self.age = torch.where(where, 0, self.age)
        self.ended = self.ended & ~where

    def infos(self) -> dict[str, Any]:
        return {"t": self.age.clone(), "deep": {"e": self.episode.float()}} if self.info else {}

    def reset(self, seed: Any = None, options: Any = None, env_ids: Any = None) -> tuple[Any, Any]:
        where = torch.ones_like(self.ended)
        if seed is not None:
            self.episode = torch.full_like(self.episode, -1)
        if env_ids is not None:
            where = torch.zeros_like(self.ended)
            where[torch.as_tensor(env_ids, device=self.device)] = True
        self.begin(where)
        return self.observe(), self.infos()

    def step(self, action: Any) -> tuple[Any, ...]:
        paid = action.float().sum(-1) if action.ndim > 1 else action.float()
        pending = torch.zeros_like(self.ended)
        if self.mode == "NextStep":
            pending = self.ended
            self.begin(pending)

        self.age = self.age + (~pending).long()
        length = self.lengths.gather(1, (self.episode % 4)[:, None])[:, 0]
        ended = (self.age >= length) & ~pending
        terminated = ended & (self.episode % 3 != 2)
        truncated = ended & (self.episode % 3 == 2)
        reward = torch.where(pending, 0.0, self.episode * 100.0 + self.age + 0.1 * paid)

        info: dict[str, Any] = {}
        if self.mode == "SameStep":
            if self.final == "dense":
                info["final_obs"] = self.observe()
            info |= self.infos()
            self.begin(ended)
        else:
            self.ended = self.ended | ended
            info = self.infos()
        return self.observe(), reward, terminated, truncated, info


def rows(device: str, steps: int = 12) -> TensorDict:
    """Rows of a simulator on the device."""
    env = as_vector_env(Sim(4, device))
    return rollout(env, lambda obs: obs[:, 2].long() % 4, num_steps=steps, seed=0)
