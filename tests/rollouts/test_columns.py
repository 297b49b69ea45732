"""Which columns a batch has: entries of info, and markers."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from list_collector import GYM_MODES, IDS, MODES, ListCollector, keys_of, make, next_obs, script, true_next
from tensordict.nn import TensorDictModule

from flatroll.rollouts import Collector, evaluate, rollout
from flatroll.wrappers import (
    InitTracker,
    MarkerWrapper,
    StepCounter,
    TrajId,
    as_vector_env,
)
from flatroll.wrappers.testing import Script, ScriptedVectorEnv, make_scripted

# --- info entries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sync", "native"])
@pytest.mark.parametrize("mode", GYM_MODES)
def test_info_entries_stand_with_the_observation_and_with_the_step(mode, backend):
    """The scripted envs say ``t``; SAME_STEP moves that of the last step to ``final_info``."""
    if backend == "native" and mode == "SameStep":
        pytest.skip(
            "this env keeps the last ``t`` to itself: see test_an_entry_of_a_last_step_that_is_unknown"
        )
    env = make_scripted(script(), backend=backend, autoreset_mode=mode)
    collector = Collector(env, frames_per_batch=20, total_frames=40, info_keys=["t"], seed=0)
    for batch in collector:
        assert torch.equal(batch["t"].double(), batch["observation"][:, 2].double())
        assert torch.equal(batch["next", "t"], batch["t"] + 1)


class Forgets(ScriptedVectorEnv):
    """SAME_STEP with ``final_obs`` and no ``final_info``, like ale-py's vector env; or one of some ended rows."""

    def __init__(self, dtype=np.float32, tells=None, lengths=((2, 3), (4,), (3,))):
        super().__init__(Script(len(lengths), lengths), autoreset_mode="SameStep")
        self.dtype, self.tells = dtype, tells

    def _info(self):
        return {"lives": self.clock.step.astype(self.dtype)}

    def step(self, actions):
        before = self.clock.step.copy()
        *result, info = super().step(actions)
        ended = result[2] | result[3]
        if self.tells is not None and ended.any():
            told = ended & self.tells
            info |= {"final_info": {"lives": ((before + 1) * told).astype(self.dtype)}, "_final_info": told}
        return *result, info


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_an_entry_of_a_last_step_that_is_unknown_is_nan(framework, dtype):
    env = as_vector_env(Forgets(dtype), framework=framework)
    batch = next(Collector(env, frames_per_batch=60, info_keys=["lives"], seed=0))
    done = batch["next", "done"].squeeze(-1)
    assert done.sum() > 9
    assert torch.equal(batch["next", "lives"].isnan(), done)
    assert torch.equal(batch["next", "lives"][~done], batch["lives"][~done] + 1)
    assert torch.equal(batch["lives"], batch["observation"][:, 2].to(batch["lives"].dtype))
    assert evaluate(env, episodes=6, info_keys=["lives"]).info["lives"].isnan().all()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [np.int64, np.bool_])
def test_an_entry_of_a_last_step_that_is_unknown_and_has_no_nan_is_an_error(framework, dtype):
    text = (
        r"info_keys=\['lives'\]: Forgets resets ended envs in the same step and gives no info\['final_info'\], so "
        r"'lives' of an episode's last step is unknown"
    )
    if framework == "numpy":
        text += r".* \(env 0 ended, and info says (0|False)\)"
    env = as_vector_env(Forgets(dtype), framework=framework)
    collector = Collector(env, frames_per_batch=3, info_keys=["lives"], seed=0)
    assert len(next(collector)) == 3  # no episode has ended yet
    with pytest.raises(ValueError, match=text):
        next(collector)
    with pytest.raises(ValueError, match=text):
        evaluate(env, episodes=3, info_keys=["lives"])


def test_final_info_of_some_ended_rows():
    tells = np.array([True, False, True])
    env = Forgets(tells=tells)
    batch = next(Collector(env, frames_per_batch=90, info_keys=["lives"], seed=0))
    done = batch["next", "done"].squeeze(-1)
    told = torch.from_numpy(tells)[batch["observation"][:, 0].long()]
    assert torch.equal(batch["next", "lives"].isnan(), done & ~told)
    known = ~(done & ~told)
    assert torch.equal(batch["next", "lives"][known], batch["lives"][known] + 1)


class Solves(gym.Env):
    """Says "success", a NumPy bool, in each second step, "size" as a NumPy array in others, and a text."""

    observation_space, action_space = gym.spaces.Box(0, 99, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        info = {"success": np.bool_(self.count > 2), "stage": f"s{self.count}", "pair": (self.count, 0.5)}
        if self.count % 2 == 0:
            del info["success"]
        return np.full(1, self.count, np.float32), 1.0, self.count == 3, False, info


class Quiet(Solves):
    """Says nothing."""

    def step(self, action):
        return *super().step(action)[:4], {}


@pytest.mark.parametrize("mode", GYM_MODES)
def test_flags_of_numpy_are_bools_and_false_where_an_env_is_silent(mode):
    env = gym.vector.SyncVectorEnv([Solves, Quiet], autoreset_mode=mode)
    batch = next(Collector(env, frames_per_batch=24, info_keys=["success", "pair"], seed=0))
    count = batch["next", "observation"].squeeze(-1)
    speaks = torch.arange(24) < 12  # env after env
    assert batch["success"].dtype is batch["next", "success"].dtype is torch.bool
    assert torch.equal(batch["next", "success"], speaks & (count == 3))
    pairs = torch.stack([count, torch.full((24,), 0.5)], 1) * speaks.unsqueeze(1)
    assert torch.equal(batch["next", "pair"], pairs.double())
    assert (
        evaluate(env, episodes=4, info_keys=["success"]).info["success"].tolist() == [True] * 2 + [False] * 2
    )


def test_an_entry_that_is_no_number_names_itself():
    env = gym.vector.SyncVectorEnv([Quiet, Solves])
    with pytest.raises(
        TypeError, match=r"info_keys has 'stage', whose values must be numbers.* got 's1' in env 1: "
    ):
        next(Collector(env, frames_per_batch=8, info_keys=["stage", "success"]))


class Telling(ScriptedVectorEnv):
    """Its info has what ``tell(step)`` gives, the same array again and again."""

    def __init__(self, tell, at_reset=None, mode="SameStep"):
        super().__init__(Script(2, lengths=50), autoreset_mode=mode)
        self.tell, self.at_reset, self.steps = tell, at_reset or {}, 0

    def reset(self, **options):
        return super().reset(**options)[0], dict(self.at_reset)

    def step(self, actions):
        *result, _ = super().step(actions)
        self.steps += 1
        return *result, self.tell(self.steps)


def test_info_entries_that_come_now_and_then_are_zero_elsewhere():
    """Not what an earlier batch left in the same place."""
    env = Telling(lambda n: {"hit": np.full(2, float(n))} if n % 3 == 0 else {})
    collector = Collector(env, frames_per_batch=8, total_frames=40, info_keys=["hit"])
    batch = torch.cat(list(collector))
    time = batch["observation"][:, 2] + 1
    assert torch.equal(batch["next", "hit"], torch.where(time % 3 == 0, time, 0.0).double())
    before = time - 1
    assert torch.equal(batch["hit"], torch.where((before % 3 == 0) & (before > 0), before, 0.0).double())


def test_an_entry_that_begins_as_an_integer_is_not_truncated():
    env = Telling(lambda n: {"gap": np.full(2, n + 0.5)}, at_reset={"gap": np.zeros(2, np.int64)})
    batch = next(Collector(env, frames_per_batch=8, info_keys=["gap"]))
    assert batch["next", "gap"].tolist() == [1.5, 2.5, 3.5, 4.5] * 2
    assert batch["gap"].tolist() == [0, 1.5, 2.5, 3.5] * 2


def test_batches_have_the_same_columns_whenever_an_entry_first_comes():
    collector = Collector(
        Telling(lambda n: {"gap": np.full(2, n)}), frames_per_batch=2, total_frames=8, info_keys=["gap"]
    )
    state = collector.state_dict()
    for _ in range(2):
        keys = [sorted(map(str, batch.keys(True, True))) for batch in collector]
        assert keys == [keys[0]] * 4 and "gap" in keys[0]
        collector.load_state_dict(state)


def test_a_policy_reads_info_entries():
    seen = []
    module = TensorDictModule(
        lambda gap: seen.append(gap.tolist()) or torch.zeros(2, dtype=torch.int64),
        in_keys=["gap"],
        out_keys=["action"],
    )
    env = Telling(lambda n: {"gap": np.full(2, n)}, at_reset={"gap": np.zeros(2, np.int64)})
    next(Collector(env, module, frames_per_batch=6, info_keys=["gap"]))
    assert seen == [[0, 0], [1, 1], [2, 2]]


def test_info_entries_of_a_torch_env():
    env = as_vector_env(make_scripted(script(), autoreset_mode="SameStep"), framework="torch")
    batch = next(Collector(env, frames_per_batch=30, info_keys=["t"], seed=0))
    assert torch.equal(batch["next", "t"], batch["t"] + 1)


# --- markers ------------------------------------------------------------------------------------------------


def test_markers_of_the_user_are_kept_with_their_keys():
    env = InitTracker(
        StepCounter(TrajId(make("SameStep"), writer=2, traj_key="id"), step_count_key="n"), init_key="first"
    )
    collector = Collector(env, frames_per_batch=10, total_frames=30, compact_obs=True, seed=0)
    oracle = ListCollector(script(), "SameStep", 10)
    for batch in collector:
        rows = oracle.window()
        assert batch["id"].tolist() == [2 * 2**40 + row["id"] for row in rows]
        assert batch["n"].squeeze(-1).tolist() == [row["count"] for row in rows]
        assert batch["first"].squeeze(-1).tolist() == [row["is_init"] for row in rows]
        assert {"is_init", "step_count", IDS} & keys_of(batch) == set()
        assert next_obs(batch, collector.final) == true_next(rows)


def test_the_markers_are_added_once():
    env = InitTracker(TrajId(make("SameStep")))
    assert Collector(env, frames_per_batch=10).env is env
    added = Collector(make("SameStep"), frames_per_batch=10).env
    assert isinstance(added, TrajId) and isinstance(added.env, InitTracker)


def test_a_factory_or_a_class_makes_the_env():
    class Env(ScriptedVectorEnv):
        def __init__(self):
            super().__init__(script(), autoreset_mode="SameStep")

    for create in (Env, lambda: make("SameStep"), lambda: InitTracker(make("SameStep"))):
        assert len(next(Collector(create, frames_per_batch=10))) == 10


class Marker(MarkerWrapper):
    """A marker of a user's: (env, step) in each row, of the shape [E, *shape], about the observation or the step."""

    def __init__(self, env, shape, describes_step):
        super().__init__(env, ("user", "mark"))
        self.shape, self.describes_step = shape, describes_step

    def mark(self, info):
        rows = torch.arange(self.num_envs) * 100 + self.count
        rows = rows.reshape(-1, *[1] * len(self.shape)).expand(-1, *self.shape).clone()
        info["mark"] = rows if isinstance(self.stream.first, torch.Tensor) else rows.numpy()

    def _on_reset(self, obs, info, rows):
        self.count = 0
        self.mark(info)

    def step(self, actions):
        result = self.env.step(actions)
        self.count += 1
        self.mark(result[4])
        return result


@pytest.mark.parametrize("describes_step", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)])
@pytest.mark.parametrize("which", MODES)
def test_a_marker_of_one_number_gets_a_last_dimension_and_others_keep_their_shape(
    which, shape, describes_step
):
    """[E] arrives as [N, 1], [E, 3] as [N, 3]: in collected batches, in rollouts, and before the policy."""

    def env():
        return Marker(make(which), shape, describes_step)

    seen = []

    class Policy(torch.nn.Module):
        in_keys = (("user", "mark"),)
        out_keys = ("action",)

        def forward(self, td):
            seen.append(td["user", "mark"].shape if not describes_step else None)
            return td.set("action", torch.zeros(3, dtype=torch.int64))

    key = ("next", "user", "mark") if describes_step else ("user", "mark")
    collector = Collector(env(), Policy(), frames_per_batch=9, total_frames=18)
    for batch in [*collector, rollout(env(), num_steps=3)]:
        assert batch[key].shape == (9, *(shape or (1,)))
        assert (batch[key] // 100 == batch["observation"][:, :1].reshape(-1, *[1] * len(shape or (1,)))).all()
    assert set(seen) == {None if describes_step else (3, *(shape or (1,)))}
