"""Scripted envs whose steps are begun and awaited, whole or as the parts of one pool."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from flatroll.wrappers.testing import Script, ScriptedVectorEnv

LENGTHS: Any = [[3, 1, 4], [2, 5], [6], [1, 1, 7], [4]]
ENDS: Any = [
    ["terminated", "truncated", "both"],
    ["truncated", "terminated"],
    ["terminated"],
    ["both"],
    ["truncated"],
]


def script(first: int = 0, last: int = 5) -> Script:
    return Script(last - first, lengths=LENGTHS[first:last], ends=ENDS[first:last])


class Part(ScriptedVectorEnv):
    """Envs ``first`` to ``last`` of the script; ``log`` hears what is done.

    ``early`` envs make the step when it is begun, others when it is awaited, from the same memory of actions.
    """

    def __init__(
        self, first: int = 0, last: int = 5, log: list[Any] | None = None, early: bool = False, **options: Any
    ) -> None:
        super().__init__(script(first, last), record_actions=True, **options)
        self.first, self.log, self.early = first, [] if log is None else log, early
        self.under_way: Any = None
        observe = self.clock.observe

        def shifted() -> Any:
            obs = observe()
            obs[:, 0] += first
            return obs

        self.clock.observe = shifted  # type: ignore[method-assign]

    def reset(self, **options: Any) -> Any:
        assert self.under_way is None, "reset while a step is under way"
        self.log.append(("reset", self.first, options.get("seed")))
        return super().reset(**options)

    def step(self, actions: Any) -> Any:
        assert self.under_way is None, "step while a step is under way"
        return self._step(actions)

    def _step(self, actions: Any) -> Any:
        """A step, whose info tells the last one's entries of ended envs, as Gymnasium's envs do."""
        before = self.clock.step.copy()
        result = super().step(np.array(actions))
        _, _, terminated, truncated, info = result
        ended = terminated | truncated
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP and ended.any():
            info |= {"final_info": {"t": (before + 1) * ended}, "_final_info": ended.copy()}
        return result

    def step_async(self, actions: Any) -> None:
        assert self.under_way is None, "two steps at once"
        self.log.append(("begin", self.first))
        self.under_way = (self._step(actions) if self.early else actions,)

    def step_wait(self) -> Any:
        self.log.append(("await", self.first))
        (kept,), self.under_way = self.under_way, None
        return kept if self.early else self._step(kept)


def parts(*borders: int, **options: Any) -> list[Part]:
    """The pool of five envs in parts that begin at these numbers."""
    return [Part(a, b, **options) for a, b in zip(borders, [*borders[1:], 5], strict=True)]


class CountingState(torch.nn.Module):
    """A recurrent policy that counts the steps of an episode."""

    in_keys = ("observation", "steps", "is_init")
    out_keys = ("action", ("next", "steps"))

    def make_tensordict_primer(self) -> Any:
        return SimpleNamespace(defaults={"steps": torch.zeros(1)})

    def forward(self, data: TensorDict) -> TensorDict:
        data["next", "steps"] = data["steps"] + 1
        data["action"] = (data["steps"].squeeze(-1) % 5).long()
        return data
