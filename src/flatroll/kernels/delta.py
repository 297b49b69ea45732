"""The loops of the gated delta rule, row by row: a memory of some thousand numbers stays in the nearest cache.

That takes a tenth of the time of the form by products of matrices on the CPU. The memories before the first row of
each block are kept, and those within a block are computed once more on the way back.
"""

from typing import Any

import numpy as np

from flatroll.kernels.scan import Array

#: Rows of a block.
BLOCK = 16


def forward_loop(
    columns: Any, first: Array, starts: Array, kept: Array, off: Array, read: Array, final: Array
) -> None:
    """Write and read memories ``[heads, d, d]`` (key, value), row by row.

    Args:
        columns: query, key and value ``[N, heads, d]``, and how much is kept and written, ``[N, heads]``.
        first, final: memories that runs begin and end with, ``[R, heads, d, d]``.
        starts: bool ``[N]``, True at the first row of each run, row 0 among them.
        kept: memories before the first row of each block; filled.
        off: by how much a row's value differs from what the memory had under its key, ``[N, heads, d]``; filled.
        read: ``[N, heads, d]``; filled.
    """
    query, key, value, fade, write = columns
    rows, heads, size = query.shape
    memory = np.empty((heads, size, size), query.dtype)
    run = -1
    for i in range(rows):
        if starts[i]:
            run += 1
            memory[:] = first[run]
        if i % BLOCK == 0:
            kept[i // BLOCK] = memory

        for h in range(heads):
            keeps = fade[i, h]
            puts = write[i, h]
            wrong = off[i, h]
            seen = read[i, h]
            wrong[:] = value[i, h]
            seen[:] = 0
            for r in range(size):
                at_key = keeps * key[i, h, r]
                held = memory[h, r]
                for c in range(size):
                    wrong[c] -= at_key * held[c]

            for r in range(size):
                at_key = puts * key[i, h, r]
                at_query = query[i, h, r]
                held = memory[h, r]
                for c in range(size):
                    now = keeps * held[c] + at_key * wrong[c]
                    held[c] = now
                    seen[c] += at_query * now

        if i + 1 == rows or starts[i + 1]:
            final[run] = memory


def gradient_loop(
    columns: Any,
    first: Array,
    starts: Array,
    states: Any,
    of_read: Array,
    of_final: Array,
    results: Any,
    of_first: Array,
) -> None:
    """Fill the gradients of the columns and of the first memories, from the last row to the first.

    Args:
        columns, first, starts: as in :func:`forward_loop`.
        states: what that filled, ``kept`` and ``off``.
        of_read, of_final: gradients of ``read`` and ``final``.
        results: gradients of the columns; filled.
        of_first: gradient of ``first``; filled.
    """
    query, key, _, fade, write = columns
    kept, off = states
    of_query, of_key, of_value, of_fade, of_write = results

    rows, heads, size = query.shape
    zero = query.dtype.type(0)
    flow = np.zeros((heads, size, size), query.dtype)  # the gradient of the memory after a row
    before = np.empty((BLOCK, size, size), query.dtype)
    of_new = np.empty(size, query.dtype)
    new = np.empty(size, query.dtype)
    run_after_block = first.shape[0] - 1
    for block in range(kept.shape[0] - 1, -1, -1):
        begin = block * BLOCK
        stop = min(begin + BLOCK, rows)
        runs_begun = 0
        for i in range(begin, stop):
            runs_begun += starts[i]

        for h in range(heads):
            # the memories before the rows of the block, once more
            run = run_after_block - runs_begun
            before[0] = kept[block, h]
            for i in range(begin, stop):
                memory = before[i - begin]
                if starts[i]:
                    run += 1
                    memory[:] = first[run, h]
                if i + 1 < stop:
                    following = before[i - begin + 1]
                    for r in range(size):
                        at_key = write[i, h] * key[i, h, r]
                        for c in range(size):
                            following[r, c] = fade[i, h] * memory[r, c] + at_key * off[i, h, c]

            through = flow[h]
            for i in range(stop - 1, begin - 1, -1):
                if i + 1 == rows or starts[i + 1]:
                    through += of_final[run, h]

                memory = before[i - begin]
                keeps = fade[i, h]
                puts = write[i, h]
                incoming = of_read[i, h]
                wrong = off[i, h]
                for c in range(size):
                    new[c] = puts * wrong[c]
                    of_new[c] = zero

                # through the reading and the writing of the new value
                for r in range(size):
                    at_key = key[i, h, r]
                    at_query = query[i, h, r]
                    slope = through[r]
                    held = memory[r]
                    to_query = zero
                    to_key = zero
                    for c in range(size):
                        total = slope[c] + at_query * incoming[c]
                        slope[c] = total
                        of_new[c] += at_key * total
                        to_query += (keeps * held[c] + at_key * new[c]) * incoming[c]
                        to_key += total * new[c]
                    of_query[i, h, r] = to_query
                    of_key[i, h, r] = to_key

                to_write = zero
                for c in range(size):
                    to_write += of_new[c] * wrong[c]
                    of_new[c] *= puts
                    of_value[i, h, c] = of_new[c]
                of_write[i, h] = to_write

                # through what the memory had under the key, and the fading
                to_fade = zero
                for r in range(size):
                    at_key = key[i, h, r]
                    slope = through[r]
                    held = memory[r]
                    to_key = zero
                    for c in range(size):
                        total = slope[c] - at_key * of_new[c]
                        to_key += held[c] * of_new[c]
                        to_fade += total * held[c]
                        slope[c] = keeps * total
                    of_key[i, h, r] -= keeps * to_key
                of_fade[i, h] = to_fade

                if starts[i]:
                    of_first[run, h] = through
                    through[:] = 0
                    run -= 1

        run_after_block -= runs_begun
