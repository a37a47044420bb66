"""Types that all packages share: plans, levers, facts, records, requests, errors. Data alone, JSON in and out.

Runs in: every process.
Imports: the standard library only; writing a Plan also imports tomlkit.
Start with: plan.py (Plan, Choice), lever.py (Lever), session.py (the record of a search), run_request.py.
"""
