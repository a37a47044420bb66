"""Room 1: what autograd keeps for the backward pass, and other ways to have it there: derived again, computed again, fetched from the host."""
