"""The loop of attention of single steps to a cache: it reads the slots in use and no others.

A call of torch for all heads of all envs reads every slot, and takes half as long again where all are in use.
"""

import numpy as np

from flatroll.kernels.scan import Array


def step_loop(heads: Array, steps: Array, bias: Array, layer: int, cache: Array, out: Array) -> None:
    """Put each env's key and value into their slot, and add up the values of its episode as its query weighs them.

    Args:
        heads: queries, keys and values, ``[E, 3, heads, size]``.
        steps: rows of the episode before this one, int64 ``[E]``.
        bias: added to the scores by the number of rows between query and key, ``[heads, P]``, or ``[heads, 0]``.
        layer: number of the layer.
        cache: ``[E, layers, 2, heads, P, size]``; written.
        out: ``[E, heads, size]``; filled.
    """
    envs, _, count, size = heads.shape
    slots = cache.shape[4]
    zero = heads.dtype.type(0)
    scale = heads.dtype.type(1 / size**0.5)
    score = np.empty(slots, heads.dtype)
    for e in range(envs):
        slot = steps[e] % slots
        used = min(steps[e] + 1, slots)
        for h in range(count):
            query = heads[e, 0, h]
            keys = cache[e, layer, 0, h]
            values = cache[e, layer, 1, h]
            for d in range(size):
                keys[slot, d] = heads[e, 1, h, d]
                values[slot, d] = heads[e, 2, h, d]

            largest = -np.inf
            for p in range(used):
                total = zero
                for d in range(size):
                    total += query[d] * keys[p, d]
                total *= scale
                if bias.shape[1]:
                    total += bias[h, (slot - p) % slots]
                score[p] = total
                largest = max(largest, total)

            gathered = out[e, h]
            gathered[:] = zero
            whole = zero
            for p in range(used):
                weight = np.exp(score[p] - heads.dtype.type(largest))
                whole += weight
                for d in range(size):
                    gathered[d] += weight * values[p, d]
            for d in range(size):
                gathered[d] /= whole
