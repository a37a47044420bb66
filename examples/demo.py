"""What `make demo` runs: tune a real example on real data, run the job under the plan it found, say where the report is.

The example is the program that people start from: torchvision's ResNet-18, PIL transforms, SGD, `.item()` in the loop.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
JOB = [sys.executable, str(HERE / "resnet18.py"), "--epochs", "12"]


def flatout(*words: str) -> None:
    """Show a command, run it, and stop the demo where it fails."""
    print(f"\n$ flatout {' '.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "flatout", *words], check=False).returncode
    if code:
        sys.exit(code)


def main() -> None:
    flatout("tune", "--budget", "3m", "--no-write", *JOB)
    flatout("run", *JOB)
    newest = max(Path(".flatout").glob("*/report.html"), key=lambda path: path.stat().st_mtime)
    print(f"\nThe report with pictures: {newest.resolve()}\nThe plan, and the same by hand: flatout plan {' '.join(JOB)}")


if __name__ == "__main__":
    main()
