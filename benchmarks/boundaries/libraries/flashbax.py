"""flashbax' row: its flat buffer (pairs), its trajectory buffer (sequences) and its vault (files).

Both buffers hold one observation for each step, added with the step's own flags, as its examples add them.
"""

import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import PLAN, SLICE, Array, columns, follows, key_of, unmarked_joint

PACKAGE = "flashbax"
RING = 10
DRAWS = 2000
DOCUMENTED = "README, Important Considerations: the algorithm must handle the case of the final timestep"


def library() -> Any:
    return importlib.import_module("flashbax")


def key_for_draws() -> Any:
    return importlib.import_module("jax").random.PRNGKey(0)


def steps(number: int) -> Iterator[dict[str, Array]]:
    """Yield the steps of both envs, one by one: observation, and whether the step ended the episode."""
    for rows in PLAN.rows(number):
        found = columns([rows])
        yield {"observation": found["observation"][0], "done": found["done"][0]}


def filled(buffer: Any, number: int) -> Any:
    """Return the buffer's state after so many steps of both envs."""
    timestep = {"observation": np.zeros(3, np.float32), "done": np.zeros((), np.bool_)}
    state = buffer.init(timestep)
    for step in steps(number):
        batch = {name: array[:, None] for name, array in step.items()}
        state = buffer.add(state, batch)
    return state


def last_observation() -> Cell:
    """The pairs of ``make_flat_buffer``: the second observation of a pair whose first row ended the episode."""
    flat = library().make_flat_buffer(
        max_length=2 * RING, min_length=2, sample_batch_size=DRAWS, add_sequences=True, add_batch_size=PLAN.num_envs
    )
    pair = flat.sample(filled(flat, 2 * RING + 3), key_for_draws()).experience
    seen: dict[Any, Array] = {}
    for first, second in zip(np.asarray(pair.first["observation"]), np.asarray(pair.second["observation"]), strict=True):
        seen[key_of(first)] = second

    tally = Tally()
    for key, after in sorted(seen.items()):
        row = PLAN.row(key)
        if row.done:
            tally.compare(key, after, row.next_observation)
    return tally.cell(
        "the next episode's first observation",
        documented=DOCUMENTED,
        note="its item buffer stores what it is given, a next observation too: 0 wrong",
        script="flashbax_pairs.sh",
    )


def slices() -> Cell:
    """Sequences of ``make_trajectory_buffer``, before and after the ring wraps; the sampled flag marks ends."""
    buffer = library().make_trajectory_buffer(
        max_length_time_axis=RING,
        min_length_time_axis=SLICE,
        sample_batch_size=DRAWS,
        add_batch_size=PLAN.num_envs,
        sample_sequence_length=SLICE,
        period=1,
    )
    tally = Tally()
    for number in range(SLICE, 2 * RING + 1):
        drawn = buffer.sample(filled(buffer, number), key_for_draws()).experience
        frames = np.asarray(drawn["observation"])
        cuts = np.asarray(drawn["done"])
        sequences = {frame.tobytes(): at for at, frame in enumerate(frames)}
        for at in sequences.values():
            joined = unmarked_joint(frames[at], cuts[at])
            tally.check(f"after {number} steps", not joined, f"{frames[at].tolist()}")
    return tally.cell("joins rows that do not follow", note="ends are marked by the flag that is stored with the steps")


def saved_buffer() -> Cell:
    """A trajectory buffer that a `Vault` takes in step by step, read back as a buffer's state."""
    vault_class: Any = importlib.import_module("flashbax.vault").Vault
    number = 2 * RING + 3
    buffer = library().make_trajectory_buffer(
        max_length_time_axis=RING,
        min_length_time_axis=SLICE,
        sample_batch_size=8,
        add_batch_size=PLAN.num_envs,
        sample_sequence_length=SLICE,
        period=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        vault = vault_class("rows", experience_structure=filled(buffer, 1).experience, rel_dir=str(Path(folder)))
        state = filled(buffer, 0)
        for step in steps(number):
            state = buffer.add(state, {name: array[:, None] for name, array in step.items()})
            vault.write(state)
        read = vault.read()

    tally = Tally()
    frames = np.asarray(read.experience["observation"])
    for step, rows in enumerate(PLAN.rows(number)):
        for row in rows:
            seen = frames[row.env, step] if step < frames.shape[1] else np.zeros(0)
            tally.compare(row.key, seen, row.observation)
    return tally.cell("a row is missing or another")


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return the fixtures that flashbax has parts for."""
    return {"last_observation": last_observation, "slices": slices, "saved_buffer": saved_buffer}
