"""Turns source, profiles and exceptions into Findings.

To add a rule, write one file in rules/ and add one line to its table.
"""
