"""A language model sees its answer.

What:
    The label of each position is the next token of the input, and the scores of a position depend on later inputs. Or the
    scores depend on no later input, and the label of each position is the token that stands there.
Why it matters:
    The model copies the answer. The loss falls quickly, and generated text is useless.
How to fix it:
    Mask later positions: `is_causal=True`, or `-inf` above the diagonal. Shift the labels by one:
    `loss(logits[:, :-1], tokens[:, 1:])`.
Example:
    import torch
    import torch.nn.functional as F

    embedding, head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
    optimizer = torch.optim.SGD([*embedding.parameters(), *head.parameters()], lr=0.1)
    for tokens in torch.randint(0, 50, (9, 4, 17)):
        x = embedding(tokens[:, :-1])
  -     x = F.scaled_dot_product_attention(x, x, x)
  +     x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
  -     loss = F.cross_entropy(head(x).flatten(0, 1), tokens[:, 1:].flatten())  # <-
  +     loss = F.cross_entropy(head(x).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, argument, line_here, rule
from flatout.diagnose.running_modules import sensitivity

MIN_LABELS, MIN_SHARE = 24, 0.95  # labels that are compared, and of them those that are equal
MIN_LOOKS, MAX_LOOKS = 2, 4
# How far the labels are ahead of the tokens; 0 and 1: one row, or one column
SAME, TWICE = 2, 3


class AnswerVisible(Invariant):
    calls = frozenset({"embedding", "cross_entropy", "nll_loss"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.embedded: list[tuple[Any, Any]] = []  # tokens and their vectors, since the last loss
        self.looks = 0
        self.next_tokens = False  # labels were one token ahead; further ones are more tasks, then
        self.lines: dict[tuple[Line | None, int], int] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if name == "embedding":
            tokens = args[0]
            if tokens.ndim == 2 and result.requires_grad and len(self.embedded) < 8:
                self.embedded.append((tokens.detach().clone(), result))
            return
        embedded, self.embedded = self.embedded, []
        if not result.requires_grad or self.looks >= MAX_LOOKS:
            return
        scores, labels = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "target")
        classes = scores.movedim(1, -1).flatten(0, -2) if scores.ndim > 2 else scores
        if labels.is_floating_point() or len(classes) != labels.numel():
            return
        for tokens, vectors in embedded:
            rows, columns = tokens.shape
            for shape in ((rows, columns), (rows, columns - 1), (rows - 1, columns)):
                if labels.numel() == shape[0] * shape[1] and min(shape) > 3:
                    valid = labels.flatten() != kwargs.get("ignore_index", -100)
                    grid = [
                        value.reshape(*shape, *value.shape[1:])
                        for value in (classes, labels.flatten(), valid)
                    ]
                    self._look(tokens, vectors, *grid)

    def _look(self, tokens: Any, vectors: Any, scores: Any, labels: Any, valid: Any) -> None:
        """Compare labels with tokens, and the scores of one position with the vectors in its row and its column."""
        row, column = (size // 2 for size in labels.shape)
        expected = (tokens[1:], tokens[:, 1:], tokens, tokens[2:], tokens[:, 2:])
        kind = next((kind for kind, right in enumerate(expected) if _equal(labels, right, valid)), None)
        if kind is None or (gradient := sensitivity(scores[row, column], vectors)) is None:
            return
        self.looks += 1
        used = gradient.abs().sum(-1) != 0
        later = [bool(used[row + 1 :, column].any()), bool(used[row, column + 1 :].any())]
        earlier = [bool(used[:row, column].any()), bool(used[row, :column].any())]
        if kind >= SAME:
            wrong = not any(later) and any(earlier)
        else:
            self.next_tokens = True
            wrong = later[kind] and not (later[1 - kind] or earlier[1 - kind])
        if wrong:
            key = line_here(), min(kind, TWICE)
            self.lines[key] = self.lines.get(key, 0) + 1

    def findings(self) -> Findings:
        for (line, kind), looks in self.lines.items():
            if looks < MIN_LOOKS or (kind == TWICE and self.next_tokens):
                continue
            if kind < SAME:
                yield RULE.finding(
                    "the label of each position is the next token of the input, and the scores of a position depend "
                    "on later inputs: the model sees the answer",
                    line,
                    "mask later positions, such as is_causal=True",
                )
            elif kind == SAME:
                yield RULE.finding(
                    "the label of each position is the token that the model gets there, not the next one: it "
                    "learns to copy",
                    line,
                    "shift the labels: loss(logits[:, :-1], tokens[:, 1:])",
                )
            else:
                yield RULE.finding(
                    "the label of each position is the token after the next one: the labels are shifted twice",
                    line,
                    "shift the labels once, in the data or before the loss",
                )


def _equal(labels: Any, expected: Any, valid: Any) -> bool:
    rows, columns = (min(sizes) for sizes in zip(labels.shape, expected.shape, strict=True))
    seen, right = labels[:rows, :columns], expected[:rows, :columns]
    valid = valid[:rows, :columns]
    enough = valid.sum() >= max(MIN_LABELS, valid.numel() / 4) and len(right.unique()) >= 4
    return bool(enough and ((seen == right) & valid).sum() >= MIN_SHARE * valid.sum())


RULE = rule(AnswerVisible, "FL092", __doc__)
