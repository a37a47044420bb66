"""Time limits and shares of the budget in a search."""

from flatout.guard.verdict import MIN_EXACT_STEP

USUAL_PAIRS = 3
MIN_PAIRS = 2
# Of the budget; if three pairs cost more, two are planned, and a third only decides a close result
THREE_PAIRS_SHARE = 0.35
EXACT_TICKS = 1 + MIN_EXACT_STEP  # of each side: two pairs then have the losses for a claim of equal bits
MAX_PAIR_ROUNDS = 6
PAIR_SIDE_S = 6.0  # each side of a pair is measured this long, or for six rounds
CONFIRM_SHARE = 0.6  # of the budget at most is reserved for confirming
COMPILE_S = 75.0  # allowed for a first compilation
OVERRUN_SHARE = 0.1  # of the budget, to finish running measurements
MEMORY_FIT_SHARE = 0.35  # of the budget, for the frontier when memory is limited
SEED_WINDOW_STRIDE = 10**7
JOINT_START_FACTOR = 1.35  # cost of starting two programs together, in single starts
