"""Check a flat batch against the layout contract, row by row."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from tensordict import TensorDictBase
from typing_extensions import override

from flatroll.layout.checks import check_key_names, check_rows, check_whole_number
from flatroll.layout.inspect import rules
from flatroll.layout.inspect.rules import WHOLE_BATCH, Severity
from flatroll.layout.keys import DONE, IS_INIT, TRAJ_IDS, NestedKey, observation_keys


@dataclass(frozen=True)
class Finding:
    """One problem that `audit` found: the row, the rule and a sentence.

    Args:
        row: the row, or -1 for the batch as a whole.
        rule: name of the rule, e.g. ``"step_count"``.
        text: what is wrong, in words.
        severity: ``"error"``, the batch breaks the contract; or ``"suspicious"``, it may be right, but most
            batches that look so are not.

    >>> print(Finding(3, "step_count", "step_count is negative"))
    row 3 [step_count] step_count is negative
    """

    row: int
    rule: str
    text: str
    severity: Severity = "error"

    def __str__(self) -> str:
        where = "batch" if self.row == WHOLE_BATCH else f"row {self.row}"
        doubt = " (suspicious)" if self.severity == "suspicious" else ""
        return f"{where} [{self.rule}]{doubt} {self.text}"


class Findings(list[Finding]):
    """The findings of `audit`. When printed, findings of one kind share a line, with their count and first rows.

    >>> print(Findings(Finding(row, "nan", "the reward is NaN") for row in (2, 5, 7, 8)))
    4 rows: 2, 5, 7, ... [nan] the reward is NaN
    """

    @override
    def __repr__(self) -> str:
        if not self:
            return "[]"

        lines = []
        for _, group in groupby(self, lambda one: (one.rule, one.severity, _MORE.sub("", one.text))):
            same = list(group)
            first = same[0]
            line = str(Finding(first.row, first.rule, _MORE.sub("", first.text), first.severity))

            more = _MORE.search(same[-1].text)
            count = len(same)
            if more:
                count += int(more[1])
            if count > 1:
                rows = ", ".join(str(one.row) for one in same[:3]) + ", ..." * (count > 3)
                line = f"{count} rows: {rows} {line[line.index('[') :]}"
            lines.append(line)
        return "\n".join(lines)


_MORE = re.compile(r" \(and (\d+) more rows\)$")


def audit(batch: TensorDictBase, *, keys: Sequence[NestedKey] | None = None, limit: int = 10) -> Findings:
    """Check a batch against all layout rules that apply to its columns; return the findings.

    | rule                    | what must hold |
    |---|---|
    | ``batch_size``          | the batch is ``[N]`` |
    | ``device``              | all entries are on one device |
    | ``shape``, ``dtype``    | markers are as the contract has them, next observations like their roots |
    | ``markers``             | one of ``is_init``, ``("next", "done")``, trajectory ids is there |
    | ``done``                | terminated and truncated rows are done |
    | ``done_without_reason`` | done rows are terminated or truncated |
    | ``step_count``          | up by one along a run, never negative |
    | ``next_step_count``     | one more than ``step_count`` (in n-step rows ``steps_to_next_obs`` more) |
    | ``is_init``             | True at step 0; elsewhere only if every run starts so (slices) |
    | ``after_done``          | a trajectory does not continue after a done row without ``is_init`` |
    | ``silent_reset``        | a trajectory does not start again without done |
    | ``traj_id``             | never negative; one (id, step) is one transition, however often sampled |
    | ``traj_id``             | nothing after the step that terminated; no change in mid-trajectory |
    | ``next_observation``    | in a run, equal to the observation of the row after (NaN equals NaN) |
    | ``nan``, ``delta``      | no NaN in observations and rewards; deltas are finite |
    | ``padding``             | padding follows a row and starts nothing; other rules see real rows only |
    | ``reset_as_next``       | *suspicious*: half of the final observations or more are the next episode's first |
    | ``obs_jump``            | *suspicious*: a leap to a first observation inside a run |
    | ``same_length``         | *suspicious*: all of five or more episodes terminate after one same length |

    The first two guesses are made only if first observations are much rarer inside of episodes than others.

    Audit collected batches and samples before random augmentation: a randomly shifted image does not equal the
    previous row's next image.

    Args:
        batch: any tensordict.
        keys: root keys of the observations. Default: those that `observation_keys` finds.
        limit: maximum number of rows to report per rule; the last finding counts the others.

    Returns:
        the findings, a list in the order of the rules above; empty if nothing is wrong. Printed as a whole, the
        rows of one kind of problem share a line.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> steps = torch.tensor([[0], [1], [3]])
    >>> ids = torch.zeros(3, dtype=torch.int64)
    >>> print(audit(TensorDict({"step_count": steps, "collector": {"traj_ids": ids}}, [3])))
    row 2 [step_count] step_count is not one more than in the row before
    """
    check_rows(batch, values=True)
    check_whole_number("limit", limit)

    named = None if keys is None else check_key_names("keys", keys)
    if batch.batch_dims != 1:
        text = (
            f"the batch must have batch size [N], got {list(batch.batch_size)}: join() concatenates the rows"
        )
        return Findings([Finding(WHOLE_BATCH, "batch_size", text)])
    if batch.shape[0] == 0:
        return Findings()

    places: dict[torch.device, NestedKey] = {}  # devices, each with an entry that is there
    for key, column in batch.items(True, True):
        if isinstance(column, torch.Tensor):
            places.setdefault(column.device, key)
    if len(places) > 1:
        where = ", ".join(f"{key!r} on {device}" for device, key in places.items())
        text = f"the entries must be on one device, got {where}: move the batch, batch.to(...)"
        return Findings([Finding(WHOLE_BATCH, "device", text)])

    observations = observation_keys(batch) if named is None else named
    # A batch whose entries are on a device need not say so itself.
    device = next(iter(places), None)
    unpadded = rules.UnpaddedRows(batch, observations, device)
    breaches = list(rules.shapes_and_dtypes(batch, observations))
    if not unpadded.has_marker:
        text = f"none of {IS_INIT!r}, {DONE!r}, {TRAJ_IDS!r} is there and usable: runs cannot be told apart"
        breaches.append(rules.whole("markers", text))

    breaches += rules.padding(batch)
    for rule in rules.RULES:
        breaches += rule(unpadded)

    findings = Findings()
    for breach in breaches:
        shown = breach.rows[:limit]
        more = len(breach.rows) - limit
        for row in shown:
            text = breach.text
            if more > 0 and row == shown[-1]:
                text += f" (and {more} more rows)"
            findings.append(Finding(row, breach.rule, text, breach.severity))

    return findings
