"""Claims: files by which one of several processes takes a task that only one may have."""

import os

# Tasks of a run: report what was applied; show the summary; write checkpoints; record for exact resume.
REPORT, SUMMARY, CHECKPOINTS, RECORDING = ".reported", ".summary", ".kept", ".exactly"


def claim(path: str) -> bool:
    """Take a task. Return whether this process is the first that does."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:
        return False
    try:
        os.write(handle, str(os.getpid()).encode())
    except OSError:
        pass  # a full disk; the process stays first
    os.close(handle)
    return True


def claim_or_take_over(path: str) -> bool:
    """Take a task, also from a process that has ended."""
    return claim(path) or (_owner_has_ended(path) and claim(path))


def _owner_has_ended(path: str) -> bool:
    """Whether the process that made a claim is dead; then the claim is void."""
    try:
        with open(path, encoding="ascii") as file:
            owner = int(file.read())
        if os.path.exists(f"/proc/{owner}") or not os.path.isdir("/proc/self"):
            return False
        os.unlink(path)
    except (OSError, ValueError):
        return False
    return True
