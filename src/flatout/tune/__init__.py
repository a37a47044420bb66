"""Searches for the best plan: measures levers and chooses between plans."""
