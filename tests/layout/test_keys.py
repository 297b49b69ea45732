import sys

import interpreters
import pytest
import torch
from tensordict import TensorDict

import flatroll.layout
from flatroll.layout import (
    IS_INIT,
    TRAJ_IDS,
    as_tuple,
    flat_column,
    marker,
    missing_marker,
    next_key,
    observation_keys,
    require,
)
from flatroll.layout.keys import optional_marker, plain_key, renamed, under_next, without_next


def test_next_of_a_key():
    assert next_key("observation") == ("next", "observation")
    assert next_key(("agents", "pos")) == ("next", "agents", "pos")
    assert as_tuple("x") == ("x",)


@pytest.mark.parametrize(
    ("key", "writer"),
    [
        ("is_init", "flatroll.wrappers.InitTracker"),
        ("step_count", "flatroll.wrappers.StepCounter"),
        (("collector", "traj_ids"), "flatroll.wrappers.TrajId"),
        (("next", "observation"), "NextStateReconstructor"),
        ("action", "the policy"),
        ("advantage", "flatroll.estimators.GAE"),
        ("action_log_prob", "return_log_prob=True"),
        ("foo", "nothing in this batch wrote it"),
    ],
)
def test_a_missing_marker_names_its_writer(key, writer):
    batch = TensorDict({"reward": torch.zeros(2)}, [2])
    with pytest.raises(KeyError) as error:
        require(batch, key)
    assert writer in error.value.args[0]
    assert f"batch has no entry {key!r}" in error.value.args[0]
    assert "Entries present: 'reward'" in error.value.args[0]
    assert "none" in missing_marker(key, []).args[0]
    assert "did you mean" not in error.value.args[0]
    with pytest.raises(KeyError) as error:
        require(batch, "renamed", default=key)
    assert "no entry 'renamed'" in error.value.args[0] and writer in error.value.args[0]


def test_a_marker_is_seen_in_the_batch_shape():
    for shape in ((2, 3), (2, 3, 1)):
        batch = TensorDict({IS_INIT: torch.ones(shape, dtype=torch.bool)}, [2, 3])
        assert marker(batch, IS_INIT).shape == (2, 3)


def test_a_marker_is_bool_and_one_per_row():
    batch = TensorDict({IS_INIT: torch.zeros(3, 1), "wide": torch.zeros(3, 2, dtype=torch.bool)}, [3])
    with pytest.raises(TypeError, match=r"batch\['is_init'\] must be bool, got torch.float32: cast it with"):
        marker(batch, IS_INIT)
    with pytest.raises(ValueError, match=r"must have shape \(3,\) or \(3, 1\), got \(3, 2\)"):
        marker(batch, "wide")
    with pytest.raises(ValueError, match="traj_ids"):
        flat_column(torch.zeros(3, 2), batch, TRAJ_IDS)


def test_observation_keys(batch):
    assert observation_keys(batch) == ["observation"]
    assert observation_keys(batch.exclude(("next", "observation"))) == ["observation"]
    batch["recurrent_state"] = batch["next", "recurrent_state"] = torch.zeros(14, 2)
    batch["goal"] = {"x": torch.zeros(14)}
    assert observation_keys(batch) == ["observation"]
    batch["next", "goal"] = {"x": torch.zeros(14)}
    assert observation_keys(batch) == ["observation", ("goal", "x")]
    assert observation_keys(TensorDict({"action": torch.zeros(2)}, [2])) == []


def test_public_names_are_sorted_and_there():
    names = flatroll.layout.__all__
    assert all(hasattr(flatroll.layout, name) for name in names)
    constants, classes, functions = (
        [n for n in names if n.isupper()],
        [n for n in names if n[0].isupper() and not n.isupper()],
        [n for n in names if n[0].islower()],
    )
    assert names == [*sorted(constants), *sorted(classes), *sorted(functions)]


def test_importing_the_room_imports_no_heavy_package():
    heavy = "matplotlib numba triton envpool gymnasium ray torchrl scipy"
    # torch imports triton by itself where it is installed
    code = (
        "import sys, tensordict; theirs = set(sys.modules); import flatroll.layout; "
        f"print([m for m in {heavy.split()} if m in set(sys.modules) - theirs])"
    )
    path = str(__import__("pathlib").Path(__file__).parents[2] / "src")
    shown = interpreters.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        check=True,
        kind=interpreters.OfLibraries,
    )
    assert shown.stdout.strip() == "[]"


def test_a_key_moves_under_next_and_back_once():
    for key in ("reward", ("reward",), ("next", "reward")):
        assert under_next(key) == ("next", "reward")
        assert without_next(key) == "reward"
    assert without_next(("next", "agents", "pos")) == without_next(("agents", "pos")) == ("agents", "pos")
    assert under_next(under_next(("agents", "pos"))) == ("next", "agents", "pos")


def test_a_key_of_one_name_is_plain():
    assert plain_key("x") == plain_key(("x",)) == "x"
    assert plain_key(("next", "x")) == ("next", "x")


def test_keys_are_renamed_by_name():
    keys = {"reward": "reward", "done": ("next", "done")}
    assert renamed(keys, {"reward": "score", "done": None}) == {"reward": "score", "done": ("next", "done")}
    assert keys["reward"] == "reward"
    with pytest.raises(ValueError, match="no key is called rewards; the keys are done, reward"):
        renamed(keys, {"rewards": "score"})


def test_an_optional_marker_may_be_missing_but_not_wrong():
    batch = TensorDict({IS_INIT: torch.ones(3, 1, dtype=torch.bool), "next": {"done": torch.ones(3)}}, [3])
    assert optional_marker(batch, TRAJ_IDS) is None
    is_init = optional_marker(batch, IS_INIT)
    assert is_init is not None and is_init.tolist() == [True] * 3
    with pytest.raises(TypeError, match="must be bool, got"):
        optional_marker(batch, ("next", "done"))


def test_a_missing_entry_names_the_nearest_of_those_that_are_there():
    batch = TensorDict({"observation": torch.zeros(2), "next": {"reward": torch.zeros(2)}}, [2])
    with pytest.raises(
        KeyError, match=r"no entry 'obsevation'.* did you mean 'observation'\? Entries present"
    ):
        require(batch, "obsevation")
    with pytest.raises(KeyError, match=r"did you mean \('next', 'reward'\)\?"):
        require(batch, ("next", "rewards"))
    with pytest.raises(ValueError, match=r"no key is called rewards; .*: did you mean 'reward'\?"):
        renamed({"reward": "reward", "done": "done"}, {"rewards": "score"})
