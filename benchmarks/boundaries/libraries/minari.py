"""Minari: what its DataCollector stores, and what its data sets give back."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.boundaries import fixtures as given
from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import PLAN, STEPS, Row

PACKAGE = "minari"


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return a function for each fixture; Minari samples whole episodes and estimates nothing."""
    return {
        "truncated_end": lambda: one_step_targets(lambda row: row.truncated and not row.terminated),
        "both_ends": lambda: one_step_targets(lambda row: row.truncated and row.terminated),
        "last_observation": last_observation,
        "dead_rows": dead_rows,
        "saved_buffer": saved_buffer,
        "passes": passes,
        "last_info": last_info,
    }


@contextmanager
def stored() -> Iterator[Any]:
    """Give a data set of both envs that was written within an episode, continued and read again."""
    import minari

    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("MINARI_DATASETS_PATH")
        os.environ["MINARI_DATASETS_PATH"] = folder  # Minari's own way to say where data sets lie
        try:
            for env in range(PLAN.num_envs):
                collector = minari.DataCollector(given.ScriptedEnv(PLAN, env), record_infos=True)
                dataset = play(collector, STEPS // 2)
                written = dataset.create_dataset(
                    f"script/env{env}-v0",
                    algorithm_name="none",
                    author="none",
                    author_email="none@none.none",
                    code_permalink="none",
                )
                play(collector, STEPS // 2).add_to_dataset(written)
                collector.close()
            yield [minari.load_dataset(f"script/env{env}-v0") for env in range(PLAN.num_envs)]
        finally:
            del os.environ["MINARI_DATASETS_PATH"]
            if before is not None:
                os.environ["MINARI_DATASETS_PATH"] = before


def play(collector: Any, steps: int) -> Any:
    """Make steps, the first and those after an end after a reset."""
    done = True
    for _ in range(steps):
        if done:
            collector.reset()
        _, _, terminated, truncated, _ = collector.step(0)
        done = terminated or truncated
    return collector


def episodes() -> Iterator[Any]:
    with stored() as datasets:
        for dataset in datasets:
            yield from dataset.iterate_episodes()


def stored_rows() -> Iterator[tuple[Row, Any, int]]:
    """Give each stored row: the script's, its episode, and its place in it."""
    for episode in episodes():
        for t in range(len(episode.rewards)):
            yield PLAN.row(given.key_of(episode.observations[t])), episode, t


def one_step_targets(chosen: Callable[[Row], bool]) -> Cell:
    """Targets made of what is stored: rewards, terminations, and the next observation in the episode."""
    tally = Tally()
    for row, episode, t in stored_rows():
        if chosen(row):
            going = not episode.terminations[t]
            after = float(given.value(episode.observations[t + 1]))
            tally.compare(row.key, episode.rewards[t] + given.GAMMA * going * after, PLAN.target(row))
    return tally.cell("target differs")


def last_observation() -> Cell:
    tally = Tally()
    for row, episode, t in stored_rows():
        if row.done:
            tally.compare(row.key, episode.observations[t + 1], row.next_observation)
    return tally.cell("not the last observation")


def dead_rows() -> Cell:
    tally = Tally()
    for row, episode, t in stored_rows():
        tally.check(row.key, given.follows(episode.observations[t], episode.observations[t + 1]))
    return tally.cell("no transition")


def saved_buffer() -> Cell:
    """Rows and flags of a data set that was written within an episode, and added to."""
    tally = Tally()
    for row, episode, t in stored_rows():
        told = [*episode.observations[t + 1], episode.rewards[t], episode.terminations[t]]
        tally.compare(row.key, told, [*row.next_observation, row.reward, row.terminated])
    return tally.cell("rows at the seam differ")


def passes() -> Cell:
    tally = Tally()
    drawn = [row.key for row, _, _ in stored_rows()]
    for key in set(drawn):
        tally.check(key, drawn.count(key) == 1)
    return tally.cell("not once in a pass")


def last_info() -> Cell:
    tally = Tally()
    for row, episode, t in stored_rows():
        if row.done:
            tally.compare(row.key, episode.infos["row"][t + 1], row.reward)
    return tally.cell("not the last step's")
