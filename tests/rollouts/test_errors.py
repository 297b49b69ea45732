"""Bad input: what the errors say, and what a collector leaves behind."""

import re
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from flatroll.layout import run_ends, timeline
from flatroll.layout.keys import require
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import (
    CompactObs,
    InitTracker,
    NextObservationDelta,
    RewardSum,
    StepCounter,
    as_vector_env,
)
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv


def make(**options):
    return ScriptedVectorEnv(Script(3, **options), autoreset_mode="SameStep")


def raises(kind, text):
    return pytest.raises(kind, match=re.escape(text))


# --- arguments ----------------------------------------------------------------------------------------------

ARGUMENTS = {
    "no frames": ({"frames_per_batch": 0}, ValueError, "frames_per_batch must be at least 1, got 0"),
    "less than no frames": (
        {"frames_per_batch": -5},
        ValueError,
        "frames_per_batch must be at least 1, got -5",
    ),
    "parts of frames": (
        {"frames_per_batch": 10.5},
        TypeError,
        "frames_per_batch must be an integer, got 10.5",
    ),
    "frames in words": (
        {"frames_per_batch": "10"},
        TypeError,
        "frames_per_batch must be an integer, got '10'",
    ),
    "no total": ({"total_frames": 0}, ValueError, "total_frames must be positive, or -1 for no limit, got 0"),
    "odd total": (
        {"total_frames": -2},
        ValueError,
        "total_frames must be positive, or -1 for no limit, got -2",
    ),
    "no trajectories": (
        {"trajs_per_batch": 0},
        ValueError,
        "trajs_per_batch must be at least 1 or None, got 0",
    ),
    "flag for a count": (
        {"trajs_per_batch": True},
        TypeError,
        "trajs_per_batch must be an integer, got True",
    ),
    "random": ({"init_random_frames": -1}, ValueError, "init_random_frames must be at least 0, got -1"),
    "limit": (
        {"max_frames_per_traj": 0},
        ValueError,
        "max_frames_per_traj must be at least 1 or None, got 0",
    ),
    "exploration": (
        {"exploration_type": "bogus"},
        ValueError,
        "exploration_type must be 'mode', 'median', 'mean', 'random' or 'deterministic', got 'bogus'",
    ),
    "policy": (
        {"policy": 3},
        TypeError,
        "policy must be a tensordict module, a callable from observation to action, or None, got int",
    ),
    "info_keys": (
        {"info_keys": "lives"},
        TypeError,
        "info_keys must be a list of keys, got the string 'lives': write ['lives']",
    ),
    "device": (
        {"env_device": "xpu"},
        ValueError,
        "env_device='xpu' cannot be used here: ",
    ),
    "device of both": ({"device": "xpu"}, ValueError, "device='xpu' cannot be used here: "),
    "policy's device": (
        {"policy_device": torch.device("xpu:0")},
        ValueError,
        "policy_device='xpu:0' cannot be used here: ",
    ),
    "storing device": ({"storing_device": "xpu"}, ValueError, "storing_device='xpu' cannot be used here: "),
    "no values": (
        {"storing_device": "meta"},
        ValueError,
        "storing_device='meta' cannot be used here: tensors on it have no values",
    ),
}


@pytest.mark.parametrize(("options", "kind", "text"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments(options, kind, text):
    with raises(kind, text):
        Collector(make(), **{"frames_per_batch": 10, **options})


def test_counts_are_looked_at_before_an_env_is_made():
    with pytest.raises(ValueError, match="frames_per_batch"):
        Collector(lambda: pytest.fail("an env was made"), frames_per_batch=0)


def test_two_step_counters():
    with raises(
        ValueError,
        "max_frames_per_traj=5 cannot be combined with a StepCounter in the env's stack: give the StepCounter",
    ):
        Collector(StepCounter(make()), frames_per_batch=10, max_frames_per_traj=5)


def test_what_is_no_env():
    with raises(TypeError, "create_env_fn must be one env or one function that makes it, got a list of 2"):
        Collector([make(), make()], frames_per_batch=10)
    with raises(TypeError, "create_env_fn must be an env or a function that makes one, got 'CartPole-v1'"):
        Collector("CartPole-v1", frames_per_batch=10)
    with raises(
        TypeError, "env must be a gymnasium.Env, a gymnasium.vector.VectorEnv, an envpool or a torch env"
    ):
        Collector(lambda: 3, frames_per_batch=10)


def test_steps_of_a_rollout():
    with raises(ValueError, "num_steps must be an integer of at least 1, got 0"):
        rollout(make(), num_steps=0)


# --- envs ---------------------------------------------------------------------------------------------------


class Odd(gym.Env):
    """An env of any spaces; it is never stepped."""

    def __init__(self, observation_space=None, action_space=None):
        self.observation_space = observation_space or spaces.Box(-1, 1)
        self.action_space = action_space or spaces.Discrete(2)


@pytest.mark.parametrize(
    ("space", "shown"),
    [
        (spaces.Text(5), "Text(1, 5, charset=...)"),
        (spaces.Sequence(spaces.Discrete(2)), "Sequence(Discrete(2), stack=False)"),
        (spaces.Graph(spaces.Box(-1, 1), None), "Graph("),
        (spaces.OneOf([spaces.Discrete(2)]), "OneOf("),
    ],
    ids=["text", "sequence", "graph", "one of"],
)
def test_unsupported_spaces(space, shown):
    """Nested ones are named by their place."""
    with raises(
        TypeError, "observation_space must be made of Box, Discrete, MultiDiscrete or MultiBinary inside"
    ):
        Collector(Odd(space), frames_per_batch=10)
    with raises(
        TypeError, "action_space['tool'][1] must be made of Box, Discrete, MultiDiscrete or MultiBinary"
    ) as told:
        Collector(
            Odd(action_space=spaces.Dict({"tool": spaces.Tuple((spaces.Discrete(2), space))})),
            frames_per_batch=10,
        )
    assert shown in str(told.value) and "convert it with an observation or action wrapper" in str(told.value)


class MissionSpace(spaces.Space):
    """As MiniGrid's, which is known by its name."""


@pytest.mark.parametrize(
    ("space", "way_out"),
    [
        (MissionSpace(), "MiniGrid's MissionSpace: .* such as MiniGrid's ImgObsWrapper or FlatObsWrapper"),
        (spaces.Text(5), r"or leave it out: gymnasium.wrappers.FilterObservation\(env, \['image'\]\)"),
    ],
)
def test_an_entry_of_an_unsupported_space_names_a_wrapper(space, way_out):
    with pytest.raises(TypeError, match=rf"observation_space\['mission'\] must be .*{way_out}"):
        Collector(Odd(spaces.Dict({"image": spaces.Box(0, 1), "mission": space})), frames_per_batch=10)


def test_an_unknown_kind_of_space():
    class Own(spaces.Space):
        pass

    with raises(TypeError, "observation_space must be made of Box"):
        Collector(Odd(Own()), frames_per_batch=10)


@pytest.mark.parametrize(
    "env",
    [ScriptedVectorEnv(Script(2), autoreset_mode=None), ScriptedTorchEnv(Script(2), declare=False)],
    ids=["gymnasium", "torch"],
)
def test_an_env_that_declares_no_autoreset_mode(env):
    text = f"autoreset_mode is needed: {type(env).__name__} declares none in metadata['autoreset_mode']"
    with raises(TypeError, text) as told:
        Collector(env, frames_per_batch=10)
    assert "as_vector_env(env, autoreset_mode='NextStep' | 'SameStep' | 'Disabled')" in str(told.value)
    assert len(next(Collector(as_vector_env(env, autoreset_mode="SameStep"), frames_per_batch=10))) == 10


# --- actions ------------------------------------------------------------------------------------------------


ONE = "actions must have shape (3,) (one row for each env), got"
HINT = "(one integer for each env: take .argmax(-1) of one-hot actions, .squeeze(-1) of [E, 1]), got"
ACTIONS = {
    "too few": (torch.zeros(2, dtype=torch.int64), ValueError, f"{ONE} (2,)"),
    "too many": (torch.zeros(4, dtype=torch.int64), ValueError, f"{ONE} (4,)"),
    "a number": (torch.tensor(1), ValueError, f"{ONE} ()"),
    "a column": (torch.zeros(3, 1, dtype=torch.int64), ValueError, f"{HINT} (3, 1)"),
    "one-hot": (torch.zeros(3, 5, dtype=torch.int64), ValueError, f"{HINT} (3, 5)"),
    "floats": (torch.zeros(3), TypeError, "actions must be castable to int64 for Discrete(5), got"),
}


@pytest.mark.parametrize("make_env", [make, lambda: ScriptedTorchEnv(Script(3))], ids=["numpy", "torch"])
@pytest.mark.parametrize(("action", "kind", "text"), ACTIONS.values(), ids=ACTIONS)
def test_actions_of_the_wrong_form(action, kind, text, make_env):
    with raises(kind, text):
        next(Collector(make_env(), lambda obs: action, frames_per_batch=6))
    if action.shape[:1] == (3,):  # a tensordict refuses another row count itself
        module = TensorDictModule(lambda obs: action, in_keys=["observation"], out_keys=["action"])
        with raises(kind, text):
            next(Collector(make_env(), module, frames_per_batch=6))


def test_actions_that_are_no_tree_of_the_space():
    def collect(action, act):
        next(Collector(make(action=action), act, frames_per_batch=6))

    with raises(ValueError, "actions must be a dict with keys ['move', 'press'], got ['move']"):
        collect("dict", lambda obs: {"move": torch.zeros(3, 2)})
    with raises(ValueError, "actions must be a dict with keys ['move', 'press'], got Tensor"):
        collect("dict", lambda obs: torch.zeros(3, 2))
    with raises(ValueError, "actions must have shape (3, 2) (one row for each env), got (3,)"):
        collect("box", lambda obs: torch.zeros(3))


def nothing(obs):
    return None


@pytest.mark.parametrize(
    ("policy", "came"),
    [
        (nothing, "policy nothing returned no action: expected a tensor with one row for each env"),
        (lambda obs: (torch.zeros(3, dtype=torch.int64), torch.zeros(3)), "got tuple"),
        (lambda obs: {"action": torch.zeros(3)}, "got dict"),
        (lambda obs: TensorDict({"action": torch.zeros(3)}, [3]), "got TensorDict"),
    ],
    ids=["None", "tuple", "dict", "tensordict"],
)
def test_a_policy_that_returns_no_action(policy, came):
    with raises(TypeError, came):
        next(Collector(make(), policy, frames_per_batch=6))


def test_a_module_that_writes_no_action():
    policy = TensorDictModule(lambda obs: obs, in_keys=["observation"], out_keys=["logits"])
    with raises(TypeError, "policy TensorDictModule returned no action") as told:
        next(Collector(make(), policy, frames_per_batch=6))
    assert "a tensordict with an 'action' entry), got entries" in str(told.value)
    assert "'logits'" in str(told.value) or "logits" in str(told.value)

    class Silent:
        in_keys, out_keys = (), ("action",)

        def __call__(self, td):
            td["action"] = torch.zeros(3)

    with raises(TypeError, "policy Silent returned no action"):
        next(Collector(make(), Silent(), frames_per_batch=6))


def test_an_output_without_a_row_for_each_env():
    class Policy:
        in_keys, out_keys = (), ("action", "value")

        def __call__(self, td):
            out = TensorDict({"action": torch.zeros(3, dtype=torch.int64), "value": torch.zeros(2)}, [])
            return out

    with raises(
        TypeError,
        "column 'value' must be numbers with one row for each of 3 envs, got torch.float32 of shape (2,)",
    ):
        next(Collector(make(), Policy(), frames_per_batch=6))


# --- info entries -------------------------------------------------------------------------------------------


class Telling(ScriptedVectorEnv):
    def __init__(self, info):
        super().__init__(Script(2), autoreset_mode="SameStep")
        self.info = info

    def _info(self):
        return dict(self.info)


@pytest.mark.parametrize(
    ("value", "came"),
    [
        (object(), "object of shape ()"),
        (np.array(["a", "b"]), "<U1 of shape (2,)"),
        (1.5, "float64 of shape ()"),
        (np.zeros(3), "float64 of shape (3,)"),
    ],
    ids=["object", "text", "number", "other count"],
)
def test_info_entries_that_are_no_columns(value, came):
    collector = Collector(Telling({"x": value}), frames_per_batch=6, info_keys=["x"])
    with raises(TypeError, f"column 'x' must be numbers with one row for each of 2 envs, got {came}"):
        next(collector)


def test_info_entries_that_never_come():
    collector = Collector(
        Telling({"a": np.zeros(2), "_a": np.ones(2, bool)}), frames_per_batch=6, info_keys=["b", "a"]
    )
    with pytest.raises(KeyError) as told:
        next(collector)
    text = told.value.args[0]
    assert (
        "info_keys=['b'] were in no step's info; the last one had ['a', 'final_obs', 'is_init', 'traj_ids']"
        in text
    )
    assert "must occur in the first batch: use a larger frames_per_batch" in text


# --- keys ---------------------------------------------------------------------------------------------------


class Counts(gym.Env):
    """Its observation is the step, under these names, one in the other."""

    action_space = spaces.Discrete(2)

    def __init__(self, *names):
        self.names = names
        self.observation_space = spaces.Box(-1, 9)
        for name in reversed(names):
            self.observation_space = spaces.Dict({name: self.observation_space})

    def observe(self):
        obs = np.array([self.at], np.float32)
        for name in reversed(self.names):
            obs = {name: obs}
        return obs

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return self.observe(), {}

    def step(self, action):
        self.at += 1
        return self.observe(), 1.0, self.at == 4, False, {}


def with_entry(*names):
    return Counts(*names)


@pytest.mark.parametrize(
    "name",
    [
        "action",
        "next",
        "is_init",
        "step_count",
        "collector",
        "reward",
        "terminated",
        "truncated",
        "done",
        "delta",
    ],
)
def test_an_observation_entry_with_a_reserved_name_gets_an_underscore(name):
    batch = next(iter(Collector(with_entry(name), frames_per_batch=6, seed=0)))
    right = next(iter(Collector(with_entry("own"), frames_per_batch=6, seed=0)))
    assert (batch[f"{name}_"] == right["own"]).all()
    assert (batch["next", f"{name}_"] == right["next", "own"]).all()
    assert set(batch.keys(True, True)) - {f"{name}_", ("next", f"{name}_")} == set(right.keys(True, True)) - {
        "own",
        ("next", "own"),
    }
    delta = next(iter(Collector(NextObservationDelta(with_entry(name)), frames_per_batch=6)))
    assert ("next", "delta", f"{name}_") in delta.keys(True)
    Collector(with_entry("own", name), frames_per_batch=6)  # further down it is nobody else's


def test_two_observation_entries_of_one_column():
    env = Odd(spaces.Dict({"done": spaces.Box(-1, 1), "done_": spaces.Box(-1, 1)}))
    with raises(ValueError, "observation entries ['done', 'done_'] would become columns of the same name"):
        Collector(env, frames_per_batch=6)


class Writes:
    in_keys = ("observation",)

    def __init__(self, *keys):
        self.out_keys = ("action", *keys)

    def __call__(self, td):
        raise AssertionError


COLLISIONS = {
    "marker and observation": (
        lambda: Collector(InitTracker(with_entry("first"), init_key="first"), frames_per_batch=6),
        "two parts write the same column: the observation writes 'first', InitTracker writes 'first'",
    ),
    "return and observation": (
        lambda: Collector(RewardSum(with_entry("episode_reward")), frames_per_batch=6),
        "the observation writes ('next', 'episode_reward'), RewardSum writes ('next', 'episode_reward')",
    ),
    "counter and observation": (
        lambda: Collector(StepCounter(with_entry("time"), step_count_key=("time", "n")), frames_per_batch=6),
        "two parts write the same column: the observation writes 'time', StepCounter writes ('time', 'n')",
    ),
    "two markers": (
        lambda: Collector(
            InitTracker(StepCounter(make(), step_count_key="x"), init_key="x"), frames_per_batch=6
        ),
        "two parts write the same column: InitTracker writes 'x', StepCounter writes 'x'",
    ),
    "info and observation": (
        lambda: Collector(make(), frames_per_batch=6, info_keys=["observation"]),
        "two parts write the same column: the observation writes 'observation', info_keys writes 'observation'",
    ),
    "info and reward": (
        lambda: Collector(make(), frames_per_batch=6, info_keys=["reward"]),
        "two parts write the same column: the collector writes ('next', 'reward'), info_keys writes ('next', 'reward')",
    ),
    "info and marker": (
        lambda: Collector(make(), frames_per_batch=6, info_keys=["is_init"]),
        "two parts write the same column: InitTracker writes 'is_init', info_keys writes 'is_init'",
    ),
    "policy and observation": (
        lambda: Collector(make(), Writes("observation"), frames_per_batch=6),
        "two parts write the same column: the observation writes 'observation', the policy writes 'observation'",
    ),
    "policy and flag": (
        lambda: Collector(make(), Writes(("next", "done")), frames_per_batch=6),
        "two parts write the same column: the collector writes ('next', 'done'), the policy writes ('next', 'done')",
    ),
    "policy and info": (
        lambda: Collector(make(), Writes("t"), frames_per_batch=6, info_keys=["t"]),
        "two parts write the same column: info_keys writes 't', the policy writes 't'",
    ),
    "delta": (
        lambda: Collector(NextObservationDelta(make()), Writes(("next", "delta", "x")), frames_per_batch=6),
        "NextObservationDelta writes ('next', 'delta'), the policy writes ('next', 'delta', 'x')",
    ),
}


@pytest.mark.parametrize(("build", "text"), COLLISIONS.values(), ids=COLLISIONS)
def test_two_writers_of_one_column(build, text):
    with raises(ValueError, text) as told:
        build()
    assert "two parts write the same column" in str(told.value)
    assert "the marker wrappers take a key argument, policies out_keys" in str(told.value)


def test_names_with_an_underscore_collide_with_nothing():
    own = spaces.Dict({"_dead": spaces.Box(-1, 1), "dead": spaces.Box(-1, 1)})

    class Env(Odd):
        def reset(self, *, seed=None, options=None):
            return {"_dead": np.zeros(1, np.float32), "dead": np.zeros(1, np.float32)}, {}

        def step(self, action):
            return {"_dead": np.ones(1, np.float32), "dead": np.ones(1, np.float32)}, 0.0, True, False, {}

    env = gym.vector.SyncVectorEnv([lambda: Env(own)] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    batch = next(Collector(env, frames_per_batch=6))
    assert (batch["next", "_dead"] == 1).all() and (batch["_dead"] == 0).all()


# --- markers and extras -------------------------------------------------------------------------------------


def test_a_missing_marker_names_the_wrapper_that_writes_it():
    batch = next(Collector(make(), frames_per_batch=6, track_traj_ids=False))
    for key, writer in (
        ("step_count", "wrap the env in flatroll.wrappers.StepCounter"),
        (("collector", "traj_ids"), "wrap the env in flatroll.wrappers.TrajId"),
        (("next", "episode_reward"), "wrap the env in flatroll.wrappers.RewardSum"),
    ):
        with pytest.raises(KeyError) as told:
            require(batch, key)
        assert f"batch has no entry {key!r}: {writer}" in told.value.args[0]
        assert "Entries present: 'action'" in told.value.args[0]
    compact = next(Collector(CompactObs(make()), frames_per_batch=6))
    with pytest.raises(KeyError) as told:
        require(compact, ("next", "observation"))
    assert "a compact batch comes with collector.final" in told.value.args[0]
    with pytest.raises(KeyError) as told:
        run_ends(batch.select("observation"))
    assert "flatroll.wrappers.InitTracker" in told.value.args[0]


def test_a_missing_extra_names_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    batch = next(Collector(make(), frames_per_batch=6))
    with raises(ImportError, "flatroll[plot]"):
        timeline(batch)


# --- what is left behind ------------------------------------------------------------------------------------


class Fragile(ScriptedVectorEnv):
    """Counts how often it was closed; fails at a step, if it is told to."""

    closings, steps, fails_at = 0, 0, None

    def step(self, actions):
        self.steps += 1
        if self.steps == self.fails_at:
            raise ZeroDivisionError("env")
        return super().step(actions)

    def close_extras(self, **kwargs):
        self.closings += 1


class FakeBuffer:
    def __init__(self, fails_at=None):
        self.batches, self.calls, self.fails_at = [], 0, fails_at

    def extend(self, batch, **options):
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError("disk full")
        self.batches.append(batch)


def at(n, error, function=lambda *arguments: arguments[0] if arguments else None):
    """The function, which fails in its n-th call; without one it gives its argument back."""
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == n:
            raise error
        return function(*arguments)

    return fail


def zeros(obs):
    return torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize(
    "what", ["pre hook", "post hook", "postproc", "policy", "env", "buffer", "interrupt"]
)
def test_an_error_closes_only_what_the_collector_made_and_leaves_nothing_half_written(what, made):
    env, buffer = Fragile(Script(3, lengths=20), autoreset_mode="SameStep"), FakeBuffer()
    options = {
        "pre hook": {"pre_collect_hook": at(3, ZeroDivisionError(what))},
        "post hook": {"post_collect_hook": at(3, ZeroDivisionError(what))},
        "postproc": {"postproc": at(3, ZeroDivisionError(what))},
        "policy": {"policy": at(8, ZeroDivisionError(what), zeros)},
        "interrupt": {"post_collect_hook": at(3, KeyboardInterrupt(what))},
        "env": {},
        "buffer": {},
    }[what]
    env.fails_at = 8 if what == "env" else None
    buffer.fails_at = 3 if what == "buffer" else None
    kind = {"buffer": OSError, "interrupt": KeyboardInterrupt}.get(what, ZeroDivisionError)
    collector = Collector(
        (lambda: env) if made else env, **options, frames_per_batch=9, replay_buffer=buffer, compact_obs=True
    )
    with pytest.raises(kind):
        for _ in collector:
            pass
    assert env.closings == made
    assert [len(batch) for batch in buffer.batches] == [9, 9]
    if not made:  # it goes on with new episodes, and nothing stands between them and the rows before
        next(collector)
        rows = torch.cat(buffer.batches)
        assert rows["is_init"].squeeze(-1).tolist() == [step == 0 for step in rows["observation"][:, 2]]
        old, new = rows["collector", "traj_ids"].split([18, 9])
        assert not torch.isin(new, old).any() and rows["is_init"][18]
        assert collector.final["row"].tolist() == [2, 5, 8]
        assert collector.final["next", "observation"][:, 2].tolist() == [3, 3, 3]
        collector.shutdown()
        assert env.closings == 1
        return
    with raises(RuntimeError, "the collector is closed (by shutdown, or by an error in it): make a new one"):
        next(collector)
    collector.shutdown()
    assert env.closings == 1


def test_errors_through_next_close_too():
    env = Fragile(Script(3), autoreset_mode="SameStep")
    collector = Collector(lambda: env, frames_per_batch=9, pre_collect_hook=at(2, ZeroDivisionError("pre")))
    next(collector)
    with pytest.raises(ZeroDivisionError):
        next(collector)
    with raises(RuntimeError, "the collector is closed"):
        next(collector)
    assert env.closings == 1


def test_a_postproc_that_forgets_to_return():
    collector = Collector(make(), frames_per_batch=9, postproc=lambda batch: None)
    with raises(TypeError, "postproc returned None: it must return the batch"):
        next(collector)


def test_a_step_before_the_first_reset():
    with raises(RuntimeError, "step was called before reset: call env.reset() first"):
        InitTracker(make()).step(np.zeros(3, np.int64))
