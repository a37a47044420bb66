"""Room 1: batched transforms with torchvision's meaning, samples that are kept, batches that are ready ahead of time."""
