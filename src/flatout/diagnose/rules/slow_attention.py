"""Attention runs as separate operators.

What:
    scaled_dot_product_attention took the kernel `math`: it multiplies, masks and normalises one after the other.
Why it matters:
    The matrix of all pairs of positions is written and read several times. Flash attention keeps it in fast memory.
How to fix it:
    Remove what the finding names: on a CPU it is often dropout of the attention or a mask that is trained, on a GPU
    the dtype or a mask. A mask that only hides later positions is `is_causal=True`.
Example:
  - y = F.scaled_dot_product_attention(q, k, v, attn_mask=tril)
  + y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from collections.abc import Iterable

from flatout.diagnose.gains import event_of, note_of
from flatout.diagnose.rule import Rule
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check(profile: ProfileRecord) -> Iterable[Finding]:
    kinds, _, places = event_of(profile, "slow_attention")
    if kinds:
        note = note_of(profile, "slow_attention")
        yield RULE.profile_finding(f"attention runs as separate operators: {note}", places)


RULE = Rule("FL172", "slow_attention", Severity.TIME, __doc__, check_profile=check)
