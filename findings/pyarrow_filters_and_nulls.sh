#!/usr/bin/env bash
# pyarrow 26.0.1: of the two filters of read_table that should say the same, `!=` drops rows without a value, and `not in`
# with the one value keeps them.
#
# Input: a Parquet file with the column 1, 2, null; rows other than 1 are wanted.
#
# Seen:      ('reward', '!=', 1): [2]
#            ('reward', 'not in', [1]): [2, None]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import pyarrow
import pyarrow.parquet as pq

pq.write_table(pyarrow.table({"reward": [1, 2, None]}), "rows.parquet")
seen = []
for wanted in (("reward", "!=", 1), ("reward", "not in", [1])):
    seen.append(pq.read_table("rows.parquet", filters=[wanted])["reward"].to_pylist())
    print(f"{wanted}: {seen[-1]}")
raise SystemExit(seen != [[2], [2, None]])
PROGRAM
