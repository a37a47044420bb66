"""Claims: files by which one of several processes of a run takes a task that only one may have."""

from __future__ import annotations

import os


def speaks_first(path: str) -> bool:
    """Whether this process tells the user what was applied: the first process of a run that asks."""
    return _is_first(f"{path}.reported")


def sums_up_first(path: str) -> bool:
    """Whether this process shows the summary of a run: the first of it that ends after training."""
    return _is_first(f"{path}.summary")


def keeps_first(path: str) -> bool:
    """Whether this process saves its training: the first of a run that asks, or its successor."""
    return _is_first_alive(f"{path}.kept")


def records_first(path: str) -> bool:
    """Whether this process is recorded for exact resume; processes that the script starts are not."""
    return _is_first_alive(f"{path}.exactly")


def _is_first_alive(claim: str) -> bool:
    return _is_first(claim) or (_owner_has_ended(claim) and _is_first(claim))


def _is_first(claim: str) -> bool:
    try:
        handle = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:
        return False
    try:
        os.write(handle, str(os.getpid()).encode())
    except OSError:
        pass  # a full disk; the process stays first
    os.close(handle)
    return True


def _owner_has_ended(claim: str) -> bool:
    """Whether the process that made a claim is dead; then the claim is void."""
    try:
        with open(claim, encoding="ascii") as file:
            owner = int(file.read())
        if os.path.exists(f"/proc/{owner}") or not os.path.isdir("/proc/self"):
            return False
        os.unlink(claim)
    except (OSError, ValueError):
        return False
    return True
