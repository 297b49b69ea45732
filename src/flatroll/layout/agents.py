"""`agents_of`: groups a batch's rows by game step, for losses and critics that see all agents."""

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.layout.keys import AGENT, GAME_STEP, NUM_AGENTS, flat_column, require


def agents_of(
    batch: TensorDictBase,
    t: int | Tensor | None = None,
    *,
    max_num_agents: int | None = None,
    partial: bool = False,
) -> Tensor:
    """Find the rows of the agents that acted in one game at one time.

    They share ``("collector", "game_step")``; ``("collector", "agent")`` is a row's agent. An absent agent has no
    row: its index is -1, which selects *some* row and must be masked. With ``there = rows >= 0`` a value ``v``
    ``[N]`` is summed over the agents (VDN) by ``(v[rows] * there).sum(-1)``, and a central critic's output per agent,
    ``u`` ``[J, A]``, is written back by ``v[rows[there]] = u[there]``.

    A batch of exactly ``frames_per_batch`` rows may end between the agents of one game: the rows of the others are in
    the next batch. Such a game step is *partial*: ``("collector", "num_agents")`` exceeds its number of rows.

    Args:
        batch: a flat batch ``[N]`` of agents' rows, in any order.
        t: a game step, or several, int64 ``[J]``, in any order. Default None: all in the batch, ascending.
        max_num_agents: A. Default: one more than the highest agent's number in the batch.
        partial: include game steps with missing rows. Default False: they are left out, or an error if ``t`` names
            them.

    Returns:
        With one ``t`` the row numbers of its agents, int64 ``[k]``, ascending by agent; else the index int64
        ``[J, A]`` of the row of each agent at each game step, -1 where it has none.

    Raises:
        KeyError: a column is missing: the rows are not those of agents.
        ValueError: an agent has two rows at one game step (samples may repeat rows), a game step of ``t`` is missing
            or incomplete, or an agent's number is not below ``max_num_agents``.

    >>> from tensordict import TensorDict
    >>> at = {"agent": [0, 0, 1, 2, 0], "game_step": [7, 8, 7, 8, 9], "num_agents": [2, 2, 2, 2, 2]}
    >>> batch = TensorDict({"collector": {name: torch.tensor(values) for name, values in at.items()}}, [5])
    >>> agents_of(batch)
    tensor([[ 0,  2, -1],
            [ 1, -1,  3]])
    >>> agents_of(batch, 8), agents_of(batch, 9, partial=True)
    (tensor([1, 3]), tensor([4]))
    """
    agent, steps, acted = (
        flat_column(require(batch, key), batch, key) for key in (AGENT, GAME_STEP, NUM_AGENTS)
    )
    highest = int(agent.max()) + 1 if len(agent) else 0
    width = max_num_agents
    if width is None:
        width = highest
    if highest > width:
        raise ValueError(
            f"max_num_agents must be at least {highest}, as the batch has agent {highest - 1}, got {width}"
        )

    # The game steps in ascending order, and each row's index among them.
    numbers, group = torch.unique(steps, return_inverse=True)
    index: Tensor = group.new_full((len(numbers), width), -1)
    index[group, agent] = torch.arange(len(steps), device=steps.device)

    here = (index >= 0).sum(-1)
    if int(here.sum()) < len(steps):
        raise ValueError(
            "an agent must have one row at one game step, but the batch has some twice: draw samples without "
            "replacement, or slices that do not overlap"
        )

    whole = here == torch.zeros_like(here).index_copy_(0, group, acted)
    if t is None:
        if partial:
            return index
        return index[whole]

    wanted = torch.as_tensor(t, dtype=torch.int64, device=steps.device)
    places = torch.searchsorted(numbers, wanted).clamp_(max=max(len(numbers) - 1, 0))
    if not len(numbers) or not bool((numbers[places] == wanted).all()):
        raise ValueError(f"t must be game steps of the batch, batch['collector', 'game_step'], got {t}")
    if not partial and not bool(whole[places].all()):
        raise ValueError(
            f"the batch has some of the agents of game step t={t}, and another batch the rest: pass partial=True, or "
            "collect batches of whole steps"
        )

    found: Tensor = index[places]
    if found.ndim == 1:
        return found[found >= 0]
    return found
