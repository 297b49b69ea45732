"""Every kind of env of `env_kinds` in every mode: its rows are those of the script, and the kit knows it."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from env_kinds import INVALID, MASKS, PLACE, SCRIPT, VALID, EnvKind, Place, Told, close, place, sync
from forms import scaled
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict

from flatroll.modules import actor
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers.testing import expected_rows, vector_env_problems

FRAMES = 47  # no multiple of the three envs


def cases(kinds: list[EnvKind]) -> Any:
    each = [(kind, mode) for kind in kinds for mode in kind.modes]
    return pytest.mark.parametrize(
        ("kind", "mode"),
        each,
        ids=[f"{kind.name}: {mode}".replace("[", "(").replace("]", ")") for kind, mode in each],
    )


@pytest.fixture
def made(kind: EnvKind, mode: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Function that makes an env of the kind; the mode in shared metadata is that of another env."""
    if kind.shares_metadata:
        other = AutoresetMode.NEXT_STEP if mode != "NextStep" else AutoresetMode.SAME_STEP
        monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", other)
    envs: list[Any] = []

    def make() -> Any:
        envs.append(kind.make(mode))
        return envs[-1]

    yield make
    for env in envs:
        close(env)


def compare(kind: EnvKind, mode: str, rows: TensorDict) -> None:
    """Compare rows from the first reset on, in any order, with the script."""
    true = expected_rows(SCRIPT, 2 * len(rows), autoreset_mode=mode)[: len(rows)]  # type: ignore[arg-type]
    script = {(int(row["env"]), int(row["episode"]), int(row["step"])): row for row in true}
    seen = [tuple(at) for at in rows[kind.seen].int().tolist()]
    assert sorted(seen) == sorted(script)

    nexts = rows[("next", *kind.seen)] if isinstance(kind.seen, tuple) else rows["next", kind.seen]
    assert nexts.tolist() == [[env, episode, step + 1] for env, episode, step in seen]
    for name in ("reward", "terminated", "truncated"):
        assert rows["next", name].flatten().tolist() == [script[at][name].item() for at in seen], name
    assert rows["is_init"].flatten().tolist() == [step == 0 for _, _, step in seen]

    for key, value in kind.columns.items():
        column = rows[key].tolist()
        for i, (env, episode, step) in enumerate(seen):
            row = script[env, episode, step]
            ended = bool(row["terminated"] | row["truncated"])
            wanted = value(Place(env, episode, step, ended, mode))
            if wanted is not None:
                np.testing.assert_array_equal(column[i], wanted, f"{key!r} of {(env, episode, step)}")


@contextlib.contextmanager
def told_of(text: str | None) -> Iterator[None]:
    """What a collector must warn of, once, and nothing else."""
    if text is None:
        yield
        return
    with pytest.warns(UserWarning, match=text) as caught:
        yield
    assert len(caught) == 1


@cases(VALID)
def test_a_collectors_rows_are_those_of_the_script(kind: EnvKind, mode: str, made: Any) -> None:
    with told_of(kind.warns or kind.warns_random):
        collector = Collector(made(), frames_per_batch=FRAMES, seed=0, info_keys=list(kind.info_keys))
        rows = torch.cat([next(collector) for _ in range(2)])
    assert len(rows) == 2 * FRAMES
    compare(kind, mode, rows)


@cases([kind for kind in VALID if not kind.info_keys])
def test_a_rollouts_rows_are_those_of_the_script(kind: EnvKind, mode: str, made: Any) -> None:
    with told_of(kind.warns or kind.warns_random):
        rows = rollout(made(), num_steps=30, seed=0)
    true = expected_rows(SCRIPT, 30, autoreset_mode=mode)  # type: ignore[arg-type]
    assert len(rows) >= len(true)
    keep = set(true[["env", "episode", "step"]].tolist())
    mine = torch.tensor([tuple(at) in keep for at in rows[kind.seen].int().tolist()])
    assert mine.sum() == len(true)
    compare(kind, mode, rows[mine])


@cases([kind for kind in VALID if kind.policy])
def test_an_actor_plays_it(kind: EnvKind, mode: str, made: Any) -> None:
    env = made()
    with told_of(kind.warns):
        policy = actor(env, hidden=(4,))
        collector = Collector(env, policy, frames_per_batch=FRAMES, seed=0, info_keys=list(kind.info_keys))
        rows = next(collector)
    compare(kind, mode, rows)


@cases(VALID)
def test_the_kit_accepts_it(kind: EnvKind, mode: str, made: Any) -> None:
    problems = vector_env_problems(made(), steps=scaled(quick=30, long=60))
    if kind.problem:  # its rows are right, but it breaks the contract
        assert [kind.problem in text for text in problems] == [True]
    else:
        assert problems == []


@cases(INVALID)
def test_the_kit_names_what_is_wrong(kind: EnvKind, mode: str, made: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problems = vector_env_problems(made(), steps=60)
    assert any(kind.problem in text for text in problems), problems


class Strict(Told):
    """Raises an error for an illegal action."""

    masked: Any

    def step(self, action: Any) -> Any:
        at = Place(self.index, int(self.clock.episode), int(self.clock.step), False)
        assert np.asarray(action).tolist() == self.masked.action(at), "illegal"
        return super().step(action)


@pytest.mark.parametrize("where", ["obs", "info"])
@pytest.mark.parametrize("name", ["[5] of Discrete", "[7] of MultiDiscrete", "[4] of MultiBinary"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_the_kit_plays_legal_actions(
    where: str, name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked = MASKS[name]
    monkeypatch.setattr(Strict, "masked", masked, raising=False)
    both = spaces.Dict(seen=PLACE, action_mask=spaces.Box(0, 1, masked.shape, np.int8))

    def make(i: int) -> Told:
        if where == "obs":
            see = lambda at: {"seen": place(at), "action_mask": masked.mask(at)}  # noqa: E731
            return Strict(i, both, see, action_space=masked.space)
        return Strict(i, PLACE, place, lambda at, method: {"action_mask": masked.mask(at)}, masked.space)

    problems = vector_env_problems(sync(make)(mode), steps=30)
    assert problems == []
