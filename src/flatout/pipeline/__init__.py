"""The data pipeline: batched torchvision transforms, cached samples, and batches prepared ahead of time."""
