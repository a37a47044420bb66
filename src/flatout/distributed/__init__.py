"""Runs one program on several devices as on one: splits the batches, and combines the gradients of the ranks.

Runs in: each rank of the user's program.
Imports: schema, job.
Start with: data_parallel.py (DataParallelScript), exchange.py, sharding.py.
"""
