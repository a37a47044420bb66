"""Room 1: one program on several devices as if it were on one. What each rank takes of a batch, what all of them make of their gradients."""
