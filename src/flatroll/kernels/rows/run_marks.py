"""Compiled kernel that splits a batch by its markers.

Addresses are those of contiguous columns in host memory, 0 for a missing column.

This module imports numba: import it inside the function that needs it.
"""

from flatroll.kernels.compiled import Array, Int, compiled
from flatroll.kernels.rows.raw_memory import compare_bytes, flag_at, number_at


@compiled()
def broken(rows: Int, most: Int, wide: Int, lasts: Array, pairs: Array, source: Array, found: Array) -> Int:
    """Find rows inside fragments whose next observation is not, bit by bit, the observation of the row after.

    Up to ``most`` rows are compared, spread over the batch; of rows with more than ``wide`` bytes of observations at
    least a quarter of these, and one in 32.

    Args:
        rows: rows of the batch.
        lasts: int64 ``[F]``, last row of each fragment, ascending.
        pairs: int64 ``[K, 4]``, of each observation: nothing, bytes per row, and the positions in ``source`` of the
            column and of the next observations.
        source: int64, addresses of columns.
        found: int64 ``[most]``, becomes the rows that were found, ascending.

    Returns:
        how many were found.
    """
    total = 0
    for pair in range(len(pairs)):
        total += pairs[pair, 1]
    if total > wide:
        most = max(most // 4, min(most, rows // 32))

    compared = min(rows - 1, most)
    count = 0
    fragment = 0
    for k in range(compared):
        row = k * (rows - 1) // compared

        while lasts[fragment] < row:
            fragment += 1
        if lasts[fragment] == row:
            continue

        for pair in range(len(pairs)):
            size = pairs[pair, 1]
            now = source[pairs[pair, 2]]
            later = source[pairs[pair, 3]]
            if compare_bytes(later + row * size, now + (row + 1) * size, size):
                found[count] = row
                count += 1
                break

    return count


@compiled()
def fragments(
    rows: Int,
    markers: tuple[Int, Int, Int, Int, Int, Int],
    pairs: tuple[Array, Array, Array],
    in_order: bool,
    whole: Array,
    marks: Array,
) -> Int:
    """Split ``rows`` rows at run ends (as `layout.run_ends` does), ``cuts``, and rows that ``later`` does not repeat.

    Returns the number of pieces, or, with ``in_order``, the negative of the first row whose step count does not go up
    by one.

    Args:
        rows: at least 1.
        markers: ``done, init, ids, step, mask, cuts``, addresses of columns: ``ids`` and ``step`` are int64, the others
            bool.
        pairs: ``now, later, size``, int64 ``[K]`` each: addresses of columns of observations and of next observations,
            and the bytes of a row. Between rows i and i + 1, row i of a ``later`` column must equal row i + 1 of the
            ``now`` column.
        in_order: whether step counts must increase by one within a run.
        whole: int64 ``[5, rows]``, becomes per piece its first and last row, id, first and last step count.
        marks: bool ``[3, rows]``, becomes per piece whether it continues the run of the previous piece, whether its
            first row is ``init``, and whether its last one is ``done``.
    """
    done, init, ids, step, mask, cuts = markers
    now, later, size = pairs

    count = 0
    first = 0
    joined = False

    for i in range(rows):
        end = i == rows - 1
        # the run ends where row i is done, or where row i + 1 starts an episode, has another id, or another mask
        if not end and (
            (done and flag_at(done, i))
            or (init and flag_at(init, i + 1))
            or (ids and number_at(ids, i) != number_at(ids, i + 1))
            or (mask and flag_at(mask, i) != flag_at(mask, i + 1))
        ):
            end = True

        if not end:
            jumps = in_order and step != 0 and number_at(step, i + 1) != number_at(step, i) + 1
            if jumps and not (mask and not flag_at(mask, i)):
                return -(i + 1)

            if not (cuts and flag_at(cuts, i)):
                k = 0
                while k < len(now) and not compare_bytes(
                    later[k] + i * size[k], now[k] + (i + 1) * size[k], size[k]
                ):
                    k += 1
                if k == len(now):  # row i + 1 repeats the next observations of row i
                    continue

        whole[0, count] = first
        whole[1, count] = i
        if ids:
            whole[2, count] = number_at(ids, first)
        if step:
            whole[3, count] = number_at(step, first)
            whole[4, count] = number_at(step, i)

        marks[0, count] = joined
        marks[1, count] = init != 0 and flag_at(init, first)
        marks[2, count] = done != 0 and flag_at(done, i)
        count += 1

        first = i + 1
        joined = not end

    return count
