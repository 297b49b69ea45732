"""Exported policies act as the policies do; what a file does otherwise is found, and no file is left."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

import flatroll
from flatroll.deploy import PolicyRecord, export_policy, graph_files, proof, read_record
from flatroll.deploy.graph import Entries, StepGraph
from flatroll.modules import (
    GRUModule,
    RunningNorm,
    TransformerModule,
    actor,
    critic,
    q_network,
    update_norms,
)
from flatroll.modules.backends.attention import CachedSteps

BOX = spaces.Box(-3.0, 3.0, (4,))
LENGTHS = (5, 1, 7, 3, 4)
COUNT = sum(LENGTHS)
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="needs the extra onnx")
SUFFIXES = [".pt2", pytest.param(".onnx", marks=needs_onnx)]


def env_of(observation: Any = BOX, action: Any = None) -> Any:
    """What networks read of an env."""
    action = spaces.Discrete(3) if action is None else action
    return SimpleNamespace(single_observation_space=observation, single_action_space=action)


def rows_of(lengths: tuple[int, ...] = LENGTHS, **columns: Any) -> TensorDict:
    """Episodes of these lengths laid end to end."""
    count = sum(lengths)
    is_init = torch.zeros(count, 1, dtype=torch.bool)
    is_init[[sum(lengths[:i]) for i in range(len(lengths))]] = True
    found = {"observation": 2.0 * torch.randn(count, 4) + 1.0, "is_init": is_init, **columns}
    return TensorDict(found, [count])


def learned(policy: Any, rows: TensorDict) -> Any:
    """The policy with statistics that are not those of its beginning, and a head that tells rows apart."""
    update_norms(policy, rows)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return policy


def recurrent(kind: str = "gru") -> Any:
    return learned(actor(env_of(), hidden=(8,), recurrent=kind), rows_of())  # type: ignore[arg-type]


# What is exported ----------------------------------------------------------------------------------------------------


def every_head() -> tuple[Any, TensorDict]:
    """A Dict observation with an image and choices, a Dict action with each kind of part, and masks."""
    observation = spaces.Dict(
        camera=spaces.Box(0, 255, (8, 8, 3), np.uint8),
        gear=spaces.Discrete(4, start=1),
        joints=BOX,
        action_mask=spaces.Dict(jump=spaces.MultiBinary(3)),
    )
    action = spaces.Dict(
        jump=spaces.Discrete(3),
        move=spaces.Box(np.float32([-1, -2]), np.float32([1, 3])),
        push=spaces.Box(-np.inf, np.inf, (2,)),
        pick=spaces.MultiDiscrete([2, 3]),
        flags=spaces.MultiBinary(2),
        level=spaces.Discrete(3, start=2),
    )
    mask = torch.ones(COUNT, 3, dtype=torch.int8)
    mask[::2, 1] = 0
    rows = rows_of(
        camera=torch.randint(256, (COUNT, 8, 8, 3), dtype=torch.uint8),
        gear=torch.randint(1, 5, (COUNT,)),
        joints=torch.randn(COUNT, 4),
        action_mask=TensorDict({"jump": mask}, [COUNT]),
    )
    return learned(actor(env_of(observation, action), hidden=(16,)), rows), rows


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_action_and_observation(suffix: str, tmp_path: Path) -> None:
    policy, rows = every_head()
    done = flatroll.export_policy(policy, tmp_path / f"policy{suffix}", batch=rows)
    assert set(done.inputs) == {"camera", "gear", "joints", "action_mask.jump"}
    parts = ("jump", "move", "push", "pick", "flags", "level")
    assert set(done.outputs) == {f"action.{part}" for part in parts}
    assert done.rows == COUNT
    assert done.largest_difference < 1e-5


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_tuple_of_actions_and_what_they_are_drawn_from(suffix: str, tmp_path: Path) -> None:
    policy = actor(
        env_of(action=spaces.Tuple([spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,))])), hidden=(8,)
    )
    done = export_policy(policy, tmp_path / f"policy{suffix}", batch=rows_of(), sample=True)
    assert done.outputs == ("params.0.logits", "params.1.loc", "params.1.scale")
    record = read_record(done.path)
    assert record.sample
    assert [entry.shape for entry in record.outputs] == [(2,), (2,), (2,)]


MEMORIES = ("gru", "lstm", "mingru", "lru", "s6", "ffm", "deltanet", "transformer")


@pytest.mark.parametrize("kind", MEMORIES)
def test_every_memory(kind: str, tmp_path: Path) -> None:
    done = export_policy(recurrent(kind), tmp_path / "policy.pt2", batch=rows_of())
    states = [name for name in done.inputs if name not in ("observation", "is_init")]
    assert done.outputs == ("action", *(f"next.{name}" for name in states))
    assert done.largest_difference < 1e-5


@needs_onnx
@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("lstm", "ffm") else pytest.param(kind, marks=pytest.mark.long) for kind in MEMORIES],
)
def test_every_memory_as_onnx(kind: str, tmp_path: Path) -> None:
    done = export_policy(recurrent(kind), tmp_path / "policy.onnx", batch=rows_of())
    assert done.outputs[1].startswith("next.")
    assert 0 < done.largest_difference < 1e-5


@pytest.mark.parametrize(("sample", "output"), [(False, "action"), (True, "action_value")])
def test_a_q_network_with_a_mask(sample: bool, output: str, tmp_path: Path) -> None:
    observation = spaces.Dict(observation=BOX, action_mask=spaces.MultiBinary(3))
    mask = torch.ones(COUNT, 3, dtype=torch.int8)
    mask[:, 0] = 0
    rows = rows_of(action_mask=mask)
    net = q_network(env_of(observation), hidden=(8,), epsilon=1.0)
    done = export_policy(net, tmp_path / "q.pt2", batch=rows, sample=sample)
    assert (done.inputs, done.outputs) == (("observation", "action_mask"), (output,))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("make", "output"), [(actor, "logits"), (q_network, "action_value")])
def test_what_actions_are_drawn_from_is_masked(make: Any, output: str, suffix: str, tmp_path: Path) -> None:
    observation = spaces.Dict(observation=BOX, action_mask=spaces.MultiBinary(3))
    mask = torch.rand(COUNT, 3) < 0.5
    mask[:, 1] = True
    rows = rows_of(action_mask=mask.to(torch.int8))
    policy = learned(make(env_of(observation), hidden=(8,)), rows)
    done = export_policy(policy, tmp_path / f"policy{suffix}", batch=rows, sample=True)
    assert done.inputs == ("observation", "action_mask")

    found = run_file(done.path, {name: rows[name] for name in done.inputs})[output]
    assert bool((found[~mask] == torch.finfo(torch.float32).min).all())
    assert bool((found[mask].abs() < 100).all())


def run_file(path: Path, entries: Entries) -> Entries:
    """What a file returns."""
    if path.suffix == ".pt2":
        found: Entries = torch.export.load(path).module()(entries)
        return found
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    columns = session.run(None, {name: column.numpy() for name, column in entries.items()})
    names = [value.name for value in session.get_outputs()]
    return {name: torch.from_numpy(column) for name, column in zip(names, columns, strict=True)}


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [(".pt2", None), (".pt2", "gru"), pytest.param(".onnx", None, marks=needs_onnx)],
)
def test_autocast_of_the_caller_stays_out_of_the_file(suffix: str, kind: Any, tmp_path: Path) -> None:
    policy = actor(env_of(), hidden=(8,), recurrent=kind)
    rows = rows_of()
    with torch.autocast("cpu", torch.bfloat16):
        done = export_policy(policy, tmp_path / f"inside{suffix}", batch=rows, sample=True)
        assert torch.is_autocast_enabled("cpu")
    plain = export_policy(policy, tmp_path / f"outside{suffix}", batch=rows, sample=True)

    entries = {name: rows[name] for name in done.inputs if name in rows}
    if kind == "gru":
        entries = {name: entries.get(name, torch.zeros(COUNT, 1, 8)) for name in done.inputs}
    found = run_file(done.path, entries)
    for name, column in run_file(plain.path, entries).items():
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name], column)


@needs_onnx
def test_an_error_of_onnxruntime_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translate = graph_files._translate

    def broken(*arguments: Any) -> Any:
        model = translate(*arguments)
        model.graph.node[0].op_type = "Nonsense"
        return model

    monkeypatch.setattr(graph_files, "_translate", broken)
    with pytest.raises(ValueError, match=r"onnxruntime cannot run policy\.onnx: .*Nonsense"):
        export_policy(actor(env_of()), tmp_path / "policy.onnx", batch=rows_of())
    assert not list(tmp_path.iterdir())


def test_a_critic_with_a_memory_of_its_own(tmp_path: Path) -> None:
    done = export_policy(critic(env_of(), hidden=(8,), recurrent="gru"), tmp_path / "v.pt2", batch=rows_of())
    assert done.inputs == ("observation", "critic_state", "is_init")
    assert done.outputs == ("state_value", "next.critic_state")


def test_rows_that_begin_within_an_episode_start_from_their_stored_states(tmp_path: Path) -> None:
    rows = rows_of(recurrent_state=torch.randn(COUNT, 1, 8))
    rows = rows[2:]  # type: ignore[assignment]
    assert export_policy(recurrent(), tmp_path / "policy.pt2", batch=rows).rows == COUNT - 2


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_file_steps_any_number_of_rows(count: int, tmp_path: Path, exported: Path) -> None:
    step = torch.export.load(exported).module()
    state = torch.randn(count, 1, 8)
    entries = {
        "is_init": torch.ones(count, 1, dtype=torch.bool),
        "recurrent_state": state,
        "observation": torch.ones(count, 4),
    }
    out = step({name: entries[name] for name in ("observation", "recurrent_state", "is_init")})
    assert out["action"].shape == (count,)
    torch.testing.assert_close(out["next.recurrent_state"], out["next.recurrent_state"][:1].expand_as(state))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "policy.pt2"
    return export_policy(recurrent(), path, batch=rows_of()).path


def test_the_policy_is_as_it_was(tmp_path: Path) -> None:
    policy = recurrent().train()
    weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
    export_policy(policy, tmp_path / "policy.pt2", batch=rows_of())
    assert policy.training
    assert all(weight.requires_grad for weight in policy.parameters())
    assert policy[-1].return_log_prob
    for name, weight in policy.state_dict().items():
        assert torch.equal(weight, weights[name])


# What is found -------------------------------------------------------------------------------------------------------


def without_reset(policy: Any, entries: Entries) -> Entries:
    return {**entries, "is_init": torch.zeros_like(entries["is_init"])}


class NoReset(StepGraph):
    """A graph that overlooks is_init."""

    def forward(self, entries: Any) -> Entries:
        return super().forward(without_reset(self.policy, entries))


class NoNorm(StepGraph):
    """A graph whose normalisation is forgotten."""

    def forward(self, entries: Any) -> Entries:
        norm = next(part for part in self.policy.modules() if isinstance(part, RunningNorm))
        norm.statistics = type(norm.statistics)(norm.shape)
        return super().forward(entries)


class Swapped(StepGraph):
    """A graph that returns an LSTM's states under each other's names."""

    def forward(self, entries: Any) -> Entries:
        out = super().forward(entries)
        hidden, cell = "next.recurrent_state_h", "next.recurrent_state_c"
        if hidden in out:
            out[hidden], out[cell] = out[cell], out[hidden]
        return out


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("graph", "kind", "entry"),
    [(NoReset, "gru", ""), (NoNorm, "gru", ""), (Swapped, "lstm", "next.recurrent_state")],
    ids=["wrong reset", "forgotten norm", "swapped state"],
)
def test_a_file_that_does_otherwise_is_found(
    graph: Any, kind: str, entry: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = recurrent(kind)
    monkeypatch.setattr(graph_files, "StepGraph", graph)
    with pytest.raises(
        ValueError, match=rf"row 0 of batch is the first of \d+ rows that differ, '{entry}.*' by"
    ):
        export_policy(policy, tmp_path / f"policy{suffix}", batch=rows_of())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["choice", "number", "state"])
def test_a_policy_that_is_not_finite_is_refused(kind: str, tmp_path: Path) -> None:
    action = spaces.Box(-1.0, 1.0, (2,)) if kind == "number" else spaces.Discrete(3)
    policy = actor(
        env_of(action=action), hidden=(8,), norm=False, recurrent="gru" if kind == "state" else None
    )
    rows = rows_of()
    rows["observation"][[6, 9]] = torch.nan
    with pytest.raises(ValueError, match=r"policy must return finite numbers, got NaN .* at row 6 of batch"):
        export_policy(policy, tmp_path / "policy.pt2", batch=rows)
    assert not list(tmp_path.iterdir())


def test_a_policy_whose_weights_are_nan_is_refused(tmp_path: Path) -> None:
    policy = actor(env_of(), hidden=(8,))
    with torch.no_grad():
        next(policy.parameters()).fill_(torch.nan)
    with pytest.raises(
        ValueError, match=r"NaN or infinity in 'logits' at row 0 of batch, the first of 20 rows"
    ):
        export_policy(policy, tmp_path / "policy.pt2", batch=rows_of())


def clamp_steps(steps: Tensor, slots: int) -> Tensor:
    return steps.clamp(max=slots - 1)


def skip_a_slot(steps: Tensor, slots: int) -> Tensor:
    return torch.where(steps < slots, steps, steps % slots + 1)


@pytest.mark.parametrize(
    ("wrong", "lengths", "suffix"),
    [
        (clamp_steps, LENGTHS, ".pt2"),
        (clamp_steps, (5, 11), ".pt2"),
        pytest.param(clamp_steps, LENGTHS, ".onnx", marks=needs_onnx),
        (skip_a_slot, LENGTHS, ".pt2"),
    ],
)
def test_a_ring_that_turns_wrongly_is_found(
    wrong: Any, lengths: tuple[int, ...], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = 10
    policy = TransformerModule(4, 8, context=context, in_key="observation", out_key="action")
    begin = CachedSteps.__init__

    def planted(self: CachedSteps, cache: Tensor, steps: Tensor) -> None:
        if torch.compiler.is_exporting():
            steps = wrong(steps, cache.shape[4])
        begin(self, cache, steps)

    monkeypatch.setattr(CachedSteps, "__init__", planted)
    with pytest.raises(ValueError, match=r"row \d+ of batch is the first of \d+ rows that differ"):
        export_policy(policy, tmp_path / f"policy{suffix}", batch=rows_of(lengths))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("context", "calls"), [(7, 2), (6, 1)])
def test_a_ring_turns_in_each_proof(
    context: int, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[int] = []
    compare = proof.compare

    def counted(policy: Any, step: Any, rows: Any, interface: Any) -> Any:
        played.append(len(rows.starts))
        return compare(policy, step, rows, interface)

    monkeypatch.setattr(proof, "compare", counted)
    policy = TransformerModule(4, 8, context=context, in_key="observation", out_key="action")
    done = export_policy(policy, tmp_path / "policy.pt2", batch=rows_of())
    assert played == [COUNT, context + 2][:calls]
    assert done.rows == COUNT
    assert done.largest_difference < 1e-5


class Turned(StepGraph):
    """A graph that chooses the last of three options."""

    def forward(self, entries: Any) -> Entries:
        out = super().forward(entries)
        if "action" in out:
            out["action"] = torch.full_like(out["action"], 2)
        return out


@pytest.mark.parametrize("tied", [True, False])
def test_options_of_one_score_are_a_tie(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = actor(env_of(), hidden=(8,))
    if tied:
        nn.init.zeros_(policy[-2].module.weight)
    monkeypatch.setattr(graph_files, "StepGraph", Turned)
    if tied:
        assert export_policy(policy, tmp_path / "policy.pt2", batch=rows_of()).largest_difference == 0
        return
    with pytest.raises(
        ValueError, match=r"row \d+ of batch is the first of \d+ rows that differ, 'action' by"
    ):
        export_policy(policy, tmp_path / "policy.pt2", batch=rows_of())


def test_the_first_row_is_named_by_its_number_in_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(StepGraph):
        def forward(self, entries: Any) -> Entries:
            out = super().forward(entries)
            return {"state_value": torch.where(entries["observation"][:, :1] > 100, 0.5, out["state_value"])}

    rows = rows_of()
    rows["observation"][6] = 1000.0
    rows["observation"][9] = 1000.0
    rows["collector", "mask"] = torch.arange(COUNT) >= 2  # padding
    monkeypatch.setattr(graph_files, "StepGraph", Late)
    with pytest.raises(
        ValueError, match="row 6 of batch is the first of 2 rows that differ, 'state_value' by"
    ):
        export_policy(critic(env_of(), hidden=(8,)), tmp_path / "v.pt2", batch=rows)


def test_an_older_file_is_replaced_after_a_proof_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.pt2"
    path.write_text("older")
    with monkeypatch.context() as patch:
        patch.setattr(graph_files, "StepGraph", NoNorm)
        with pytest.raises(ValueError, match="No file was written"):
            export_policy(recurrent(), path, batch=rows_of())
    assert path.read_text() == "older"

    export_policy(recurrent(), str(path), batch=rows_of())
    assert read_record(path).rows == COUNT
    assert list(tmp_path.iterdir()) == [path]


# What cannot be exported ---------------------------------------------------------------------------------------------


class OnNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.max() > 1 else -x


class OnRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x[:, :, None] * x[:, None]).real


def with_part(part: nn.Module) -> Any:
    return TensorDictSequential(
        TensorDictModule(part, ["observation"], ["features"]),
        TensorDictModule(nn.Linear(4, 2), ["features"], ["action"]),
    )


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            OnNumbers(),
            r"its part 'module\.0\.module' \(OnNumbers\) does something that depends on the numbers",
        ),
        (OnRows(), r"its part 'module\.0\.module' \(OnRows\) makes a constant of the number of rows"),
        pytest.param(
            Unknown(),
            r"aten\.linalg_eig\w* of its part 'module\.0\.module' \(Unknown\) has no form",
            marks=needs_onnx,
        ),
    ],
    ids=["numbers", "rows", "no form"],
)
def test_a_part_that_cannot_be_exported_is_named(part: nn.Module, text: str, tmp_path: Path) -> None:
    suffix = ".onnx" if isinstance(part, Unknown) else ".pt2"
    with pytest.raises(ValueError, match=text):
        export_policy(with_part(part), tmp_path / f"policy{suffix}", batch=rows_of())
    assert not list(tmp_path.iterdir())


def test_a_cache_without_a_limit_is_refused(tmp_path: Path) -> None:
    memory = TransformerModule(4, 8, in_key="observation", out_key="action")
    with pytest.raises(ValueError, match=r"TransformerModule must have context= to be exported"):
        export_policy(memory, tmp_path / "policy.pt2", batch=rows_of())


class Bare(nn.Module):
    """A memory that says nothing about what its state begins with."""

    def __init__(self, written: list[Any]) -> None:
        super().__init__()
        self.in_keys = ["observation", "h"]
        self.out_keys = written

    def forward(self, batch: TensorDict) -> TensorDict:
        batch["action"] = batch["observation"] + batch["h"]
        batch["next", "h"] = 0.5 * batch["h"] + batch["observation"]
        return batch


@pytest.mark.parametrize("written", [["action", ("next", "h")], ["action"]], ids=["declared", "undeclared"])
def test_a_state_without_a_first_value_is_refused(written: list[Any], tmp_path: Path) -> None:
    rows = rows_of(h=torch.zeros(COUNT, 4))
    with pytest.raises(
        ValueError, match=r"reads 'h' and writes \('next', 'h'\).*give it make_tensordict_primer"
    ):
        export_policy(Bare(written), tmp_path / "policy.pt2", batch=rows)
    assert not list(tmp_path.iterdir())


def test_a_policy_that_reads_the_next_row_has_no_state(tmp_path: Path) -> None:
    policy = TensorDictModule(lambda a, b: a - b, ["observation", ("next", "observation")], ["action"])
    rows = rows_of(next=TensorDict({"observation": torch.randn(COUNT, 4)}, [COUNT]))
    done = export_policy(policy, tmp_path / "policy.pt2", batch=rows)
    assert done.inputs == ("observation", "next.observation")


@pytest.mark.parametrize("second", ["is_init", "second"])
def test_memories_are_reset_by_one_entry(second: str, tmp_path: Path) -> None:
    policy = TensorDictSequential(
        GRUModule(4, 8, in_key="observation", out_key="features"),
        GRUModule(8, 2, in_keys=["features", "h", second], out_keys=["action", ("next", "h")]),
    )
    rows = rows_of()
    rows["second"] = torch.zeros_like(rows["is_init"])
    if second == "is_init":
        done = export_policy(policy, tmp_path / "policy.pt2", batch=rows)
        assert done.outputs == ("action", "next.recurrent_state", "next.h")
        return
    with pytest.raises(ValueError, match="must be reset by one entry, got 'is_init' and 'second'"):
        export_policy(policy, tmp_path / "policy.pt2", batch=rows)


def gru() -> Any:
    return GRUModule(4, 8, in_key="observation", out_key="action")


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"policy": nn.Linear(4, 2)}, TypeError, "policy must be a tensordict module, got Linear"),
        ({"policy": torch.tanh}, TypeError, "policy must be a tensordict module"),
        (
            {"policy": actor(env_of()).half()},
            ValueError,
            "weights of float32 or float64.*export policy.float",
        ),
        ({"policy": gru(), "sample": True}, ValueError, "sample=True needs a policy that draws its action"),
        ({"sample": "yes"}, TypeError, "sample must be"),
        ({"path": "policy.pt"}, ValueError, "path must end with .onnx or .pt2, got 'policy.pt'"),
        ({"path": 3}, TypeError, "path must be a path"),
        ({"path": "none/policy.pt2"}, FileNotFoundError, "none is not a folder"),
        ({"batch": {}}, TypeError, "batch must be"),
        ({"batch": rows_of()[:0]}, ValueError, "batch must have at least one row, got none"),
        ({"batch": rows_of().reshape(4, 5)}, ValueError, r"got batch size \[4, 5\]: flatten it"),
        ({"batch": rows_of().exclude("observation")}, KeyError, "no entry 'observation'"),
        ({"policy": gru(), "batch": rows_of().exclude("is_init")}, KeyError, "no entry 'is_init'"),
        ({"policy": gru(), "batch": rows_of()[1:5]}, ValueError, "must hold a first row of an episode"),
        (
            {"policy": gru(), "batch": rows_of((1, 1))},
            ValueError,
            "must hold two adjacent rows of an episode",
        ),
    ],
)
def test_wrong_arguments(
    arguments: dict[str, Any],
    kind: type[Exception],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"policy": actor(env_of()), "path": "policy.pt2", "batch": rows_of(), **arguments}
    with pytest.raises(kind, match=text):
        export_policy(given.pop("policy"), given.pop("path"), **given)
    assert not list(tmp_path.iterdir())


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    policy = TensorDictModule(lambda a, b: a + b, ["joints.left", ("joints", "left")], ["action"])
    rows = TensorDict({"joints.left": torch.zeros(3, 2), "joints": {"left": torch.zeros(3, 2)}}, [3])
    with pytest.raises(
        ValueError, match=r"'joints.left' and \('joints', 'left'\), read by the policy, would both be"
    ):
        export_policy(policy, tmp_path / "policy.pt2", batch=rows)


def test_an_entry_that_is_read_and_written_is_refused(tmp_path: Path) -> None:
    policy = TensorDictModule(nn.Linear(4, 4), ["observation"], ["observation"])
    with pytest.raises(ValueError, match="policy reads and writes 'observation'"):
        export_policy(policy, tmp_path / "policy.pt2", batch=rows_of())


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ImportError, match=rf'needs {missing}, which is not installed: pip install "flatroll\[onnx\]"'
    ):
        export_policy(actor(env_of()), tmp_path / "policy.onnx", batch=rows_of())


def test_importing_flatroll_imports_no_room() -> None:
    program = "import flatroll, sys; print('torch' in sys.modules, hasattr(flatroll, 'none'))"
    path = str(Path(flatroll.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "False"]


# What a file says about itself ---------------------------------------------------------------------------------------


def test_the_record_of_a_file(exported: Path) -> None:
    record = read_record(exported)
    assert record.flatroll == flatroll.__version__
    assert [tuple(entry) for entry in record.inputs] == [
        ("observation", "float32", (4,)),
        ("recurrent_state", "float32", (1, 8)),
        ("is_init", "bool", (1,)),
    ]
    assert [entry.name for entry in record.outputs] == ["action", "next.recurrent_state"]
    assert record.states == {"recurrent_state": "next.recurrent_state"}
    assert [tuple(norm) for norm in record.norms] == [("observation", COUNT)]
    assert (record.rows, record.episodes, record.sample) == (COUNT, len(LENGTHS), False)
    assert PolicyRecord.from_json(record.as_json()) == record


def inspect(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    from flatroll.__main__ import main

    code = main(["inspect", str(path)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_inspect_prints_the_record(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = inspect(exported, capsys)
    assert code == 0
    assert text.startswith(
        f"a policy exported by flatroll {flatroll.__version__}, deterministic actions\ninputs:\n"
    )
    assert "\n  recurrent_state: float32 [batch, 1, 8]\n" in text
    assert (
        f"\nnorm:\n  observation, by mean and deviation of {COUNT} rows\nproof: {COUNT} rows (5 begin an"
        in text
    )


@needs_onnx
def test_inspect_prints_the_record_of_an_onnx_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = export_policy(actor(env_of(), norm=False), tmp_path / "policy.onnx", batch=rows_of()).path
    code, text = inspect(path, capsys)
    assert code == 0
    assert (
        "outputs:\n  action: int64 [batch]\nnorm: none\nproof: 20 rows were replayed through the file" in text
    )


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("none.pt2", None, "is not a file"),
        ("text.pt2", b"text", "is no .pt2 file"),
        pytest.param("text.onnx", b"\x08text", "is no ONNX file", marks=needs_onnx),
        pytest.param("empty.onnx", b"", "has no record of flatroll.export_policy", marks=needs_onnx),
    ],
)
def test_inspect_refuses_other_files(
    name: str, content: bytes | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, printed = inspect(tmp_path / name, capsys)
    assert code == 2
    assert text in printed


@pytest.mark.parametrize("change", [lambda text: text[1:], lambda text: text.replace('"rows"', '"others"')])
def test_another_record_is_refused(change: Callable[[str], str], exported: Path) -> None:
    with pytest.raises(ValueError, match="the record in the file must be one that export_policy writes"):
        PolicyRecord.from_json(change(read_record(exported).as_json()))
