"""Which columns of an env are not those of a log."""

from math import prod

from flatroll.datasets.replay_log.actions import ActionCode, range_of
from flatroll.datasets.replay_log.replay import Layout
from flatroll.layout.spaces import find_part
from flatroll.rollouts.batch_columns import spec_of_columns
from flatroll.rollouts.env_facts import EnvFacts


def differing_columns(layout: Layout, facts: EnvFacts) -> list[str]:
    """Describe the observations and actions of an env that are missing or of another form in a log, or the reverse.

    Dtypes are not compared: they may be cast, and checksums show what differs.
    """
    return [*_observations(layout, facts), *_actions(layout, facts)]


def _observations(layout: Layout, facts: EnvFacts) -> list[str]:
    spec = spec_of_columns(facts.keys, facts.env)
    forms = {form.key: form.shape for form in layout.made}
    problems = [f"it has no observation {key!r}" for key in layout.obs if key not in spec.keys(True, True)]

    for key in facts.keys.obs:
        shape = tuple(spec[key].shape[1:])
        if key not in forms:
            problems.append(f"its observation {key!r} is not in the log")
        elif shape != forms[key]:
            problems.append(f"its observation {key!r} has shape {list(shape)}, in the log {list(forms[key])}")
    return problems


def _actions(layout: Layout, facts: EnvFacts) -> list[str]:
    codes = {code.key: code for code in layout.actions}
    keys = facts.keys
    if set(codes) != set(keys.actions):
        return [f"its actions are {list(keys.actions)}, in the log {list(codes)}"]

    problems = []
    for key, path in zip(keys.actions, keys.action_paths, strict=True):
        part = find_part(facts.env.single_action_space, path)
        code = codes[key]
        fits = (code.low, code.bits) == range_of(part)
        if part.shape is not None:
            fits = fits and prod(part.shape) == prod(code.shape)
        if not fits:
            problems.append(f"its {key!r} is of {part}, in the log {_text_of(code)}")
    return problems


def _text_of(code: ActionCode) -> str:
    """Describe the actions that a code holds."""
    text = f"{str(code.dtype).removeprefix('torch.')} {list(code.shape)}"
    if code.bits:
        text += f", integers of {code.bits} bits from {code.low} on"
    return text
