"""`step_mdp`: turns the result of a step into the next row."""

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from tensordict import TensorDictBase

from flatroll.layout.checks import check_flags, check_key_names, check_type
from flatroll.layout.keys import IS_INIT, NEXT, OBSERVATION, NestedKey, next_key, require

TD = TypeVar("TD", bound=TensorDictBase)


def step_mdp(
    tensordict: TD,
    next_tensordict: TensorDictBase | None = None,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
    reward_keys: NestedKey | Sequence[NestedKey] = "reward",
    done_keys: NestedKey | Sequence[NestedKey] = "done",
    action_keys: NestedKey | Sequence[NestedKey] = "action",
) -> TD:
    """Move one step ahead in time: the entries under ``"next"`` become root entries.

    ``is_init``, which collectors write at the root only, becomes False: the next row of a trajectory is not a first
    row. Tensors are shared with the input, which is not modified.

    Args:
        tensordict: rows ``[*B]`` with ``"next"``.
        next_tensordict: receives the result. Default: a new tensordict.
        keep_other: keep the root entries that ``"next"`` does not replace. Default True.
        exclude_reward: leave the reward out. Default True.
        exclude_done: leave done out. Default False.
        exclude_action: leave the action out. Default True; False keeps it even with ``keep_other=False``.
        reward_keys: the key of the reward, or a list of keys. Default ``"reward"``.
        done_keys: of done. Default ``"done"``.
        action_keys: of the action. Default ``"action"``.

    Raises:
        KeyError: there is no ``"next"``, or no next observation in it (a compact batch).

    >>> from tensordict import TensorDict
    >>> after = {"observation": torch.tensor([1.0]), "reward": torch.tensor([5.0]), "done": torch.tensor([False])}
    >>> row = TensorDict({"observation": torch.tensor([0.0]), "action": torch.tensor([2]), "next": after})
    >>> ahead = step_mdp(row)
    >>> sorted(ahead.keys()), ahead["observation"]
    (['done', 'observation'], tensor([1.]))
    """
    check_type("tensordict", tensordict, TensorDictBase, "a tensordict of rows")
    if next_tensordict is not None:
        check_type("next_tensordict", next_tensordict, TensorDictBase, "a tensordict or None")
    check_flags(
        keep_other=keep_other,
        exclude_reward=exclude_reward,
        exclude_done=exclude_done,
        exclude_action=exclude_action,
    )

    rewards = check_key_names("reward_keys", reward_keys, one=True)
    dones = check_key_names("done_keys", done_keys, one=True)
    actions = check_key_names("action_keys", action_keys, one=True)

    require(tensordict, NEXT)
    if tensordict.get(OBSERVATION, None) is not None:
        require(tensordict, next_key(OBSERVATION))

    ahead = tensordict.clone(recurse=False)  # its nested tensordicts are new as well
    following = ahead.pop(NEXT)
    is_init = ahead.get(IS_INIT, None)
    if keep_other and is_init is not None:
        ahead.set(IS_INIT, torch.zeros_like(is_init))
    if not keep_other:
        kept = [] if exclude_action else actions
        ahead = ahead.select(*kept)
    ahead.update(following)

    left_out = rewards * exclude_reward + dones * exclude_done + actions * exclude_action
    ahead = ahead.exclude(*left_out).filter_empty_()
    if next_tensordict is not None:
        return cast(TD, next_tensordict.update(ahead))
    return cast(TD, ahead)
