"""Measures how long flatout's own code runs before a program's first line after `import torch`.

Prints one JSON line. `python -I` starts it in the environment of `flatout run`, which disables flatout. The
program then loads flatout with the same file, and times it. Modules that flatout imports count as flatout's,
even if torch would import them anyway.
"""

import os
import sys
import time

SITE = os.environ["PYTHONPATH"].split(os.pathsep)[0]


def main():
    start = time.perf_counter()
    sys.path.insert(0, SITE)
    sys.modules.pop("sitecustomize", None)
    import sitecustomize

    took = time.perf_counter() - start
    if os.path.dirname(sitecustomize.__file__) != SITE:
        raise SystemExit(f"{sitecustomize.__file__} is not flatout's")
    from flatout.agent import bootstrap

    entry, entries = bootstrap._call_entry, []

    def timed(*args):
        start = time.perf_counter()
        entry(*args)
        entries.append(time.perf_counter() - start)

    bootstrap._call_entry = timed
    import torch  # noqa: F401

    if len(entries) != 1:
        raise SystemExit(f"flatout came in {len(entries)} times")
    import json

    print(json.dumps({"seconds": took + entries[0]}))


main()
