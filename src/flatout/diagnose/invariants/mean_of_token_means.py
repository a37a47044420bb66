"""A mean over tokens is averaged over micro-batches with different numbers of tokens.

What:
    The loss of a micro-batch is a mean over its valid tokens: the loss ignores padding or masked labels. The loss
    is divided by the number of micro-batches, and the gradients accumulate.
Why it matters:
    Each micro-batch gets the same weight, whatever its number of valid tokens. A token in a short micro-batch
    counts more than one in a long micro-batch. The result is not that of one large batch, and it changes with the
    number of micro-batches.
How to fix it:
    Use the sum over tokens, and divide the gradients by the number of valid tokens of all micro-batches before the
    step. Across devices, sum that number as well.
Example:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - criterion = torch.nn.CrossEntropyLoss(ignore_index=0)
  + criterion = torch.nn.CrossEntropyLoss(ignore_index=0, reduction="sum")
  + valid = 0
    for i in range(100):
        sentences = [torch.randint(1, 9, (length,)) for length in torch.randint(2, 9, (8,)).tolist()]
        tokens = pad_sequence(sentences, batch_first=True)
  -     loss = criterion(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
  -     (loss / 4).backward()  # <-
  +     criterion(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
  +     valid += (tokens[:, 1:] != 0).sum()
        if (i + 1) % 4 == 0:
  +         for p in model.parameters():
  +             p.grad /= valid
            optimizer.step()
            optimizer.zero_grad()
  +         valid = 0
Sources:
    https://huggingface.co/blog/gradient_accumulation
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, argument, line_here, rule
from flatout.diagnose.running_modules import graph_numbers, has_values

MIN_STEPS = 3
UNEQUAL = 1.1  # the largest number of valid tokens to the smallest


class MeanOfTokenMeans(Invariant):
    calls = frozenset({"cross_entropy", "nll_loss"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.means: dict[int, Any] = {}  # number of a node -> line, value, valid and all tokens
        self.window: list[
            Any
        ] = []  # backward passes since the last step: lines, share of the mean, and tokens
        self.unscaled = program.tensor_map()
        self.lines: dict[Line | None, list[Any]] = {}  # -> steps, and the tokens of the most unequal one

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        labels = argument(args, kwargs, 1, "target")
        if (
            result.grad_fn is not None
            and result.ndim == 0
            and not labels.is_floating_point()
            and has_values(result)
        ):
            mean = kwargs.get("reduction") == "mean" and kwargs.get("weight") is None
            valid = int((labels != kwargs.get("ignore_index", -100)).sum())
            mean_of = (line_here(), result.item(), valid, labels.numel()) if mean else None
            self.means[result.grad_fn._sequence_nr()] = mean_of

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        if isinstance(scaled, self.program.torch.Tensor):
            self.unscaled[scaled] = loss

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        if not self.means:
            return
        reached = [self.means[number] for number in graph_numbers(losses) & self.means.keys()]
        self.means.clear()
        if len(reached) == len(losses) == 1 and reached[0] is not None and reached[0][1]:
            line, value, valid, tokens = reached[0]
            loss = self.unscaled.get(losses[0], losses[0])
            self.window.append(((line, line_here()), loss.item() / value, valid, tokens))
        else:
            self.window.append((None, 0.0, 1, 1))

    def step_ends(self, optimizer: Any) -> None:
        window, self.window = self.window, []
        lines, size = {lines for lines, *_ in window}, len(window)
        if (
            size < 2
            or len(lines) > 1
            or None in lines
            or all(valid == tokens for _, _, valid, tokens in window)
        ):
            return
        averaged = all(abs(share * size - 1) < 0.01 for _, share, _, _ in window)
        counts = [valid for _, _, valid, _ in window]
        if averaged and max(counts) > UNEQUAL * min(counts):
            entry = self.lines.setdefault(window[0][0][1], [0, counts])
            entry[0] += 1

    def findings(self) -> Findings:
        for line, (steps, counts) in self.lines.items():
            if steps >= MIN_STEPS:
                yield RULE.finding(
                    f"in {steps} steps, each micro-batch had the same weight with unequal numbers of valid tokens, such as "
                    f"{min(counts)} and {max(counts)}: the loss is a mean of means",
                    line,
                    "sum the losses of tokens, and divide by their number in all micro-batches",
                )


RULE = rule(MeanOfTokenMeans, "FL038", __doc__)
