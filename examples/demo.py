"""The demo of `make demo`: tunes an example on real data, runs it under the plan, prints the report's path.

The example is a common starting point: a small CNN on patches of photographs, PIL transforms in a Dataset, Adam, `.item()` in the loop.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
JOB = [sys.executable, str(HERE / "cnn.py"), "--epochs", "12"]


def flatout(*words: str) -> None:
    """Prints a command and runs it; stops the demo if it fails."""
    print(f"\n$ flatout {' '.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "flatout", *words], check=False).returncode
    if code:
        sys.exit(code)


def main() -> None:
    flatout("tune", "--budget", "100s", "--no-write", *JOB)
    flatout("run", *JOB)
    newest = max(Path(".flatout").glob("*/report.html"), key=lambda path: path.stat().st_mtime)
    print(
        f"\nThe report with charts: {newest.resolve()}\nThe plan, and the same by hand: flatout plan {' '.join(JOB)}"
    )


if __name__ == "__main__":
    main()
