"""One measured run of a program: its folder, its worker inside the program, and its parent outside.

Runs in: the user's program (worker*.py, probes/, memory_prediction.py), the flatout command (parent.py), and
flatout.Loop (blocks.py).
Imports: schema, job, agent, data, distributed, guard, launch, measure.
Start with: parent.py (Trial), worker.py (events and ticks), worker_record.py (fills the TrialRecord of
schema/records.py), worker_commands.py, monitor.py (for profiles), probes/.
"""
