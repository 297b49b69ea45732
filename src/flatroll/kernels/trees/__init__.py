"""Trees over slots: a sum tree for prioritized draws, a heap for the highest-ranked rows."""
