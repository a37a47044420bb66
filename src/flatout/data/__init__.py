"""The data pipeline: batched torchvision transforms, cached samples, and batches prepared ahead of time.

Runs in: the user's program, in its main process and its loader workers, and flatout.Loop.
Imports: torch, and no other package of flatout.
Start with: feed.py (Feed), lowering.py (which transforms run on batches), operation.py (BatchOperation).
"""
