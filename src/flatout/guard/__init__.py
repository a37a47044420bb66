"""Does the tuned program learn the same? Replays steps, compares distributions and curves, gives a verdict.

Imports no lever.

Runs in: the user's program, and flatout.Loop; the verdict in the flatout command.
Imports: schema, agent, measure.
Start with: verdict.py (judge), replica.py (StepReplica), rounding.py (the limits).
"""
