"""Layout, specs, text and export: functions of batches on a device return what they return on the CPU."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from chip_cases import Cases, Sim, rows
from tensordict import TensorDict

from flatroll import export, layout, specs, text

CASES = Cases()


@CASES.add("boundaries", drives="run_ends run_starts mark_cuts split_trajectories join step_mdp")
def _(d: str) -> Any:
    batch = rows(d)
    padded = layout.split_trajectories(batch)
    ends = layout.run_ends(batch), layout.run_starts(batch)
    return ends, layout.mark_cuts(batch), padded, layout.join(padded), layout.step_mdp(batch)


@CASES.add("reports", drives="audit describe explain timeline timeline_svg Finding")
def _(d: str) -> Any:
    batch = rows(d)
    broken = batch.clone()
    broken["is_init"][5] = True
    broken["next", "done"][3] = ~broken["next", "done"][3]
    texts = (
        layout.describe(batch),
        layout.explain(batch, 7),
        layout.timeline(batch),
        layout.timeline_svg(batch),
    )
    found = [(one.rule, one.row, one.severity) for one in layout.audit(broken)]
    return layout.audit(batch), found, [str(one) for one in texts]


@CASES.add("differences", drives="encode_delta decode_delta check_delta NextObservationDelta")
def _(d: str) -> Any:
    batch = rows(d)
    delta = layout.encode_delta(batch["observation"], batch["next", "observation"])
    return delta, layout.decode_delta(batch["observation"], delta)


@CASES.add("other layouts", drives="Flat2TED TED2Flat Nested2TED TED2Nested")
def _(d: str) -> Any:
    batch = rows(d)
    flat = layout.TED2Flat()(batch)
    nested = layout.TED2Nested()(batch)
    return flat, layout.Flat2TED()(flat), layout.Nested2TED()(nested)


@CASES.add("files", drives="export to_numpy from_numpy to_arrow to_pandas read_h5 read_parquet")
def _(d: str) -> Any:
    batch = rows(d)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rows.h5", "rows.parquet", "rows.arrow", "rows.npz"):
            path = Path(folder) / name
            try:
                export.export(batch, path)
            except ValueError as error:
                found.append(str(error)[:20])
                continue
            found.append(path.stat().st_size > 0)
    return found, export.to_numpy(batch), len(export.to_pandas(batch)), export.to_arrow(batch).num_rows


@CASES.add("specs", drives="Composite Bounded")
def _(d: str) -> Any:
    env = Sim(4, d, box=True)
    spec = specs.as_spec(env.single_observation_space, (4,), d)
    action = specs.as_spec(env.single_action_space, (4,), d)
    drawn = action.rand(generator=torch.Generator(d).manual_seed(0))
    return spec.zero(), drawn, action.is_in(drawn), action.project(drawn * 3), spec.to("cpu").zero()


@CASES.add("divergence of policies", drives="kl_estimate KLEstimator")
def _(d: str) -> Any:
    log_prob = torch.linspace(-2, -0.1, 12, device=d)
    return [text.kl_estimate(log_prob - log_prob.flip(0), kind) for kind in ("k1", "k2", "k3")]


@CASES.add("runs in groups", drives="H5Split H5Combine agents_of")
def _(d: str) -> Any:
    split = layout.H5Split()(layout.TED2Nested()(rows(d)))
    steps = {"agent": [0, 0, 1, 2, 0], "game_step": [7, 8, 7, 8, 9], "num_agents": [2, 2, 2, 2, 2]}
    games = TensorDict(
        {"collector": {key: torch.tensor(value, device=d) for key, value in steps.items()}}, [5]
    )
    return split["traj_00"], layout.Nested2TED()(layout.H5Combine()(split)), layout.agents_of(games)


@CASES.add("tokens", drives="Sequences RewardData PairwiseDataset")
def _(d: str) -> Any:
    table = text.Sequences()
    table.add(torch.tensor([5, 6, 7, 8, 9], device=d), lengths=torch.tensor([3, 2], device=d))
    ids = torch.arange(8, device=d).view(2, 4)
    data = text.RewardData(input_ids=ids, attention_mask=torch.ones_like(ids), batch_size=[2])
    pairs = text.PairwiseDataset(chosen_data=data, rejected_data=data, batch_size=[2])
    return table[0], table.padded(torch.tensor([1, 0], device=d)), pairs.chosen_data.input_ids


@CASES.add("rows of texts", drives="")
def _(d: str) -> Any:
    table = text.Sequences()
    own = torch.tensor([[0, 1, 0, 1], [0, 1, 1, 0]], device=d).bool()
    options: Any = {"lengths": torch.tensor([4, 3], device=d), "groups": torch.zeros(2, device=d).long()}
    options["truncated"] = torch.tensor([True, False], device=d)
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]], device=d)
    log_probs = -torch.rand(2, 4, generator=torch.Generator().manual_seed(0)).to(d)
    found = []
    for rewards in (torch.tensor([1.0, 2.0], device=d), own.float()):
        found.append(text.rows_of_texts(table, tokens, own, log_probs, rewards, step="turn", **options))
    return found, text.merge_prefixes(found[1], table)


@CASES.parametrized
def test_equal(name: str) -> None:
    CASES.check(name)
