"""Everything that enters the user's program: start-up hook, training context, ledger, applier, crash report.

Importing this package patches nothing; only the ledger patches, on request.

Runs in: the user's program, in each of its Python processes, and flatout.Loop.
Imports: schema, job, distributed, levers, measure, render.
Start with: site/sitecustomize.py and bootstrap.py (start), entry.py and run_listener.py (a real run),
training_context.py and program_view.py (what is known of the program), applier.py, ledger.py.
"""
