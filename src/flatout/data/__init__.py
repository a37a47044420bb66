"""The data pipeline: batched torchvision transforms, cached samples, and batches prepared ahead of time.

Runs in: the user's program, in its main process and its loader workers, and flatout.Loop.
Imports: torch, and no other package of flatout.
Start with: feed.py (Feed), lowering.py (the longest run of transforms that works on
a batch), operation.py (BatchOperation). A transform is read by the `READERS` of the file that implements it:
readers.py, color.py, resample.py.
"""
