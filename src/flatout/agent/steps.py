"""Detects where a step ends, from the order of optimizer steps and backward passes only.

A step is one optimizer cycle. With one optimizer it ends when that optimizer has stepped. With several (a
GAN, one optimizer per layer, a critic that steps five times) it ends with the *anchor*, the last optimizer of
the cycle. Without an optimizer object it ends where the next forward or backward pass begins after a backward
pass.
"""

from __future__ import annotations

PATIENCE = 64  # events without the expected optimizer, before the cycle is learned again


class StepBoundaries:
    """Takes events and returns whether a step has just ended; any hashable identifies an optimizer."""

    def __init__(self) -> None:
        self._known: set[int] = set()  # constructed
        self._first_seen: list[int] = []  # in the order of their first steps
        self._anchor: int | None = None
        self._since_anchor = 0
        self._repeats = 0
        self._pending_backward = False
        self._lonely_backwards = 0
        self._stepped = False  # an optimizer object has stepped

    @property
    def optimizer_seen(self) -> bool:
        """Whether an optimizer object has stepped; then backward passes no longer mark steps."""
        return self._stepped

    @property
    def by_backward(self) -> bool:
        """Whether no optimizer object steps, so that backward passes mark the steps."""
        return not self._stepped and (not self._known or self._lonely_backwards >= PATIENCE)

    @property
    def pending(self) -> bool:
        """Whether a backward pass has ended without a step since."""
        return self._pending_backward

    def optimizer_made(self, key: int) -> None:
        self._known.add(key)

    def optimizer_gone(self, key: int) -> None:
        self._known.discard(key)
        if key == self._anchor:  # e.g. a new optimizer each epoch: the next cycle shows the new anchor
            self._first_seen, self._anchor, self._since_anchor = [], None, 0

    def optimizer_stepped(self, key: int) -> bool:
        self._pending_backward, self._stepped = False, True
        self._known.add(key)
        if self._anchor is not None:
            if key == self._anchor:
                self._since_anchor = 0
                return True
            self._since_anchor += 1
            # with one optimizer per parameter, a cycle has hundreds
            if self._since_anchor < max(PATIENCE, 2 * len(self._known)):
                return False
            # The anchor no longer steps (a second phase with its own optimizer).
            self._known, self._first_seen, self._anchor, self._since_anchor = {key}, [], None, 0
        if key not in self._first_seen:
            self._first_seen.append(key)
            self._repeats = 0
        else:
            self._repeats += 1
        if self._known <= set(self._first_seen) or self._repeats >= PATIENCE:
            self._anchor = self._first_seen[-1]
            self._since_anchor = 0
            return key == self._anchor
        return False

    def backward_ended(self) -> None:
        self._pending_backward = True

    def forward_or_backward_begins(self) -> bool:
        """Return True if a pending step has ended here (only without optimizer objects)."""
        if not self._pending_backward or self._stepped:
            return False
        self._pending_backward = False
        self._lonely_backwards += 1
        return self.by_backward
