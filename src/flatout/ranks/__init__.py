"""Run one program on several devices as on one: split the batches, and combine the gradients of the ranks."""
