"""Counts wrong rows and values at the edges of episodes, in flatroll and in the libraries that are installed here.

``python -m flatroll bench boundaries [--libraries NAME ...] [--json FILE]``; ``make boundaries`` runs each library in
an environment of its own and writes the page docs/benchmarks/boundaries.md. Without flatroll, in the folder of the
repository: ``python -m benchmarks.bench_boundaries --libraries NAME``.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.boundaries.rows import packages, run_rows
from benchmarks.boundaries.text import as_text


def main() -> int:
    """Run the rows, print the table, and write the JSON file that was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--libraries", nargs="+", metavar="NAME", help="packages (default: those installed)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    arguments = parser.parse_args()

    known = packages()
    names = arguments.libraries or list(known)
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no library named {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that it starts: the networks are tiny
    rows = run_rows(names, named=arguments.libraries is not None)
    print(as_text(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")

    ours = rows.get("flatroll", {"fixtures": {}})["fixtures"].values()
    return int(any(cell["wrong"] for cell in ours))


if __name__ == "__main__":
    sys.exit(main())
