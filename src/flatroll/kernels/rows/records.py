"""The record types of the trajectory index's tables: plain NumPy arrays that processes can map.

Terms. A *row number* counts every row ever written (64 bits); its *slot* in the ring is ``row % capacity``. A
*fragment* is a range of consecutive row numbers of one trajectory; together the live fragments cover the live
rows, in row order. A *chain* is a trajectory: its fragments, linked in time order. ``offset`` counts rows from
the chain's first row ever, and does not change when the ring drops the head of the chain.

Fragments are stored in their own ring, a table of any length (`flatroll.kernels.slices.links.place`); links are
distances between fragment numbers. A fragment ends where the next one begins. Besides ``prev``, each has a ``jump``
far back, by the rule of Myers, "An applicative random-access stack" (1983), so any offset of a chain of d fragments is
found in O(log d) hops.
"""

from typing import Any, TypeAlias

import numpy as np

# What kernels take as one argument; `flatroll.kernels.compiled` says why these are plain tuples.

#: The tables of a trajectory index, as kernels take them: ``state`` (one `STATE`), the ``capacity`` of the ring,
#: ``fragments`` (`FRAGMENT`) and ``chains`` (`CHAIN`).
Index: TypeAlias = tuple[Any, Any, Any, Any]
#: What the first rows of new fragments are compared with (`flatroll.kernels.slices.publishing.link`).
Compare: TypeAlias = tuple[Any, Any, int, bool]
#: A way of drawing, which decides the weights of trajectories (`flatroll.kernels.slices.publishing.weigh`).
Way: TypeAlias = tuple[int, bool, bool, int]
#: Where the rows of a step writer are (`flatroll.kernels.slices.steps.locate`).
Where: TypeAlias = tuple[Any, int, int, int, int, int]

_COUNTERS = [
    ("head", "i8"),  # oldest row that may be read
    ("written", "i8"),  # rows ever published
    ("first", "i8"),  # number of the oldest live fragment
    ("end", "i8"),  # number the next fragment will get
    ("created", "i8"),  # trajectories ever begun
    ("live", "i8"),  # trajectories with a live row
    ("open", "i8"),  # of them, those whose last row is not done
    ("slots", "i8"),  # chain slots ever used
    ("free", "i8"),  # 1 + first free chain slot (a list through chain.last), 0 if none
    ("newest", "i8"),  # 1 + chain of the newest row, 0 if none
    ("ids", "i8"),  # entries of the id table in use
    ("spare", "i8"),  # free pool entries: spare[:state.spare]
    ("taken", "i8"),  # pool entries ever handed out; readers compare it before and after
]
#: The counters as they are saved: where fragments are in a table is left to the one that loads them.
SAVED_STATE = np.dtype(_COUNTERS)
STATE = np.dtype(
    [
        *_COUNTERS,
        ("base", "i8"),  # number of the fragment at index 0 of the table on the lap of fragment ``first``
    ]
)
FRAGMENT = np.dtype(
    [
        ("first", "i8"),  # row number of its first row
        ("offset", "i8"),  # offset of that row in its chain
        ("chain", "i4"),
        ("prev", "i4"),  # distance back to the previous fragment of the chain, 0 if none
        ("jump", "i4"),  # distance back to an earlier fragment of the chain, 0 from the first
        ("span", "i4"),  # fragments of the chain that the jump goes back
        ("next", "i4"),  # distance to the fragment that continues the trajectory, 0 if none
        ("pool", "i4"),  # pool entry with the next observation of its last row, -1 if none
    ]
)
CHAIN = np.dtype(
    [
        ("id", "i8"),
        ("total", "i8"),  # rows ever written
        ("dropped", "i8"),  # rows lost to the ring: live rows have offsets dropped ... total - 1
        ("last", "i8"),  # number of the newest fragment
        ("step", "i8"),  # step count that the next row must have
        ("open", "i8"),  # 1 if the last row is not done
    ]
)
ENTRY = np.dtype([("id", "i8"), ("chain", "i8")])  # chain + 1; 0 marks an unused entry
SLICE = np.dtype(  # a slice whose rows are listed (`flatroll.kernels.slices.drawing.walk`)
    [
        ("number", "i8"),  # a fragment of its chain: at first the newest one, at last that of its last row
        ("offset", "i8"),  # offset in its chain of the first row that is not listed yet
        ("left", "i8"),  # rows that are not listed yet
        ("at", "i8"),  # position of the first of them in the list
    ]
)
