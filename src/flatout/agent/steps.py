"""Detects where a step ends, from the order of optimizer steps and backward passes only.

A step is one optimizer cycle. With one optimizer it ends when that optimizer has stepped. With several (a
GAN, one optimizer per layer, a critic that steps five times) it ends with the *anchor*, the last optimizer of
the cycle. Without an optimizer object it ends where the next forward or backward pass begins after a backward
pass.
"""

from __future__ import annotations

MAX_MISSED_EVENTS = 64  # events without the expected optimizer, before the cycle is learned again


class StepBoundaries:
    """Takes events and returns whether a step has just ended; any hashable identifies an optimizer."""

    def __init__(self) -> None:
        self._optimizers: set[int] = set()  # constructed
        self._step_order: list[int] = []  # in the order of their first steps
        self._anchor: int | None = None
        self._since_anchor = 0
        self._repeats = 0
        self._pending_backward = False
        self._backward_steps = 0
        self._optimizer_stepped = False  # an optimizer object has stepped

    @property
    def optimizer_seen(self) -> bool:
        """Whether an optimizer object has stepped; then backward passes no longer mark steps."""
        return self._optimizer_stepped

    @property
    def by_backward(self) -> bool:
        """Whether no optimizer object steps, so that backward passes mark the steps."""
        return not self._optimizer_stepped and (
            not self._optimizers or self._backward_steps >= MAX_MISSED_EVENTS
        )

    @property
    def pending(self) -> bool:
        """Whether a backward pass has ended without a step since."""
        return self._pending_backward

    def optimizer_created(self, key: int) -> None:
        self._optimizers.add(key)

    def optimizer_deleted(self, key: int) -> None:
        self._optimizers.discard(key)
        if key == self._anchor:  # e.g. a new optimizer each epoch: the next cycle shows the new anchor
            self._step_order, self._anchor, self._since_anchor = [], None, 0

    def optimizer_stepped(self, key: int) -> bool:
        self._pending_backward, self._optimizer_stepped = False, True
        self._optimizers.add(key)
        if self._anchor is not None:
            if key == self._anchor:
                self._since_anchor = 0
                return True
            self._since_anchor += 1
            # with one optimizer per parameter, a cycle has hundreds
            if self._since_anchor < max(MAX_MISSED_EVENTS, 2 * len(self._optimizers)):
                return False
            # The anchor no longer steps (a second phase with its own optimizer).
            self._optimizers, self._step_order, self._anchor, self._since_anchor = {key}, [], None, 0
        if key not in self._step_order:
            self._step_order.append(key)
            self._repeats = 0
        else:
            self._repeats += 1
        if self._optimizers <= set(self._step_order) or self._repeats >= MAX_MISSED_EVENTS:
            self._anchor = self._step_order[-1]
            self._since_anchor = 0
            return key == self._anchor
        return False

    def backward_ended(self) -> None:
        self._pending_backward = True

    def forward_or_backward_begins(self) -> bool:
        """Return True if a pending step has ended here (only without optimizer objects)."""
        if not self._pending_backward or self._optimizer_stepped:
            return False
        self._pending_backward = False
        self._backward_steps += 1
        return self.by_backward
