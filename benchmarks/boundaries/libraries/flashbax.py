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
from benchmarks.boundaries.fixtures import PLAN, SLICE, Array, Key, columns, key_of, unmarked_joint

PACKAGE = "flashbax"
RING = 10
STEPS = 23
DRAWS = 64  # of a full batch each: every pair and every sequence is among them
DOCUMENTED = "README, Important Considerations: the algorithm must handle the case of the final timestep"


def library() -> Any:
    return importlib.import_module("flashbax")


def drawn(buffer: Any, state: Any) -> Iterator[Any]:
    """Yield the experience of `DRAWS` samples."""
    random = importlib.import_module("jax").random
    for number in range(DRAWS):
        yield buffer.sample(state, random.PRNGKey(number)).experience


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
        max_length=2 * RING,
        min_length=2,
        sample_batch_size=RING,
        add_sequences=True,
        add_batch_size=PLAN.num_envs,
    )
    seen: dict[Key, Array] = {}
    for pair in drawn(flat, filled(flat, STEPS)):
        firsts = np.asarray(pair.first["observation"])
        seconds = np.asarray(pair.second["observation"])
        seen.update(zip(map(key_of, firsts), seconds, strict=True))

    tally = Tally()
    for key, after in sorted(seen.items()):
        row = PLAN.row(key)
        if row.done:
            tally.compare(key, after, row.next_observation)
    return tally.cell(
        "the next episode's first observation",
        documented=DOCUMENTED,
        note="its README names the item buffer as the way out, which stores what it is given (not run)",
        script="flashbax_pairs.sh",
    )


def slices() -> Cell:
    """Sequences of ``make_trajectory_buffer``, before and after the ring wraps; the sampled flag marks ends."""
    buffer = library().make_trajectory_buffer(
        max_length_time_axis=RING,
        min_length_time_axis=SLICE,
        sample_batch_size=RING,
        add_batch_size=PLAN.num_envs,
        sample_sequence_length=SLICE,
        period=1,
    )
    tally = Tally()
    for number in (SLICE, RING, RING + 1, STEPS):
        sequences: dict[bytes, tuple[Array, Array]] = {}
        for batch in drawn(buffer, filled(buffer, number)):
            for frames, cuts in zip(np.asarray(batch["observation"]), np.asarray(batch["done"]), strict=True):
                sequences[frames.tobytes()] = (frames, cuts)
        for frames, cuts in sequences.values():
            tally.check(f"after {number} steps", not unmarked_joint(frames, cuts), f"{frames.tolist()}")
    return tally.cell(
        "joins rows that do not follow", note="ends are marked by the flag that is stored with the steps"
    )


def saved_buffer() -> Cell:
    """A trajectory buffer that a `Vault` takes in step by step, read back as a buffer's state."""
    vault_class: Any = importlib.import_module("flashbax.vault").Vault
    buffer = library().make_trajectory_buffer(
        max_length_time_axis=RING,
        min_length_time_axis=SLICE,
        sample_batch_size=8,
        add_batch_size=PLAN.num_envs,
        sample_sequence_length=SLICE,
        period=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        vault = vault_class(
            "rows", experience_structure=filled(buffer, 1).experience, rel_dir=str(Path(folder))
        )
        state = filled(buffer, 0)
        for step in steps(STEPS):
            state = buffer.add(state, {name: array[:, None] for name, array in step.items()})
            vault.write(state)
        read = vault.read()

    tally = Tally()
    frames = np.asarray(read.experience["observation"])
    for number, rows in enumerate(PLAN.rows(STEPS)):
        for row in rows:
            tally.compare(row.key, frames[row.env, number : number + 1], row.observation[None])
    return tally.cell("a row is missing or another")


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return the fixtures that flashbax has parts for."""
    return {"last_observation": last_observation, "slices": slices, "saved_buffer": saved_buffer}
