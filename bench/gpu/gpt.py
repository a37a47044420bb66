"""Measures tokens/s of GPT-2 124M in float32 (1,024 tokens, AdamW): plain, one-liners, flatout.

The attention is written by hand. FLOPs of a token follow nanoGPT's formula (estimate_mfu): 6 N + 12 L H Q T,
with N the parameters without the position embedding, L layers, H heads, Q the width of a head, T tokens of
context: 855 MFLOP for 124M at 1,024.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from three_way import Theme, options, run


@dataclass(frozen=True)
class Size:
    width: int = 768
    heads: int = 12
    layers: int = 12
    context: int = 1024
    vocabulary: int = 50257
    tokens: int = 10_000_000

    @property
    def parameters(self) -> int:
        """Returns the parameters without position embedding; the output layer shares the token embedding."""
        block = (
            4 * (self.width + 1) * self.width
            + (self.width + 1) * 4 * self.width
            + (4 * self.width + 1) * self.width
            + 4 * self.width
        )
        return self.vocabulary * self.width + self.layers * block + 2 * self.width

    @property
    def flop_per_token(self) -> float:
        return 6 * self.parameters + 12 * self.layers * self.width * self.context

    def arguments(self, batch: int) -> tuple[str, ...]:
        named = {
            "batch-size": batch,
            "width": self.width,
            "heads": self.heads,
            "layers": self.layers,
            "context": self.context,
            "vocabulary": self.vocabulary,
            "tokens": self.tokens,
        }
        return tuple(word for name, value in named.items() for word in (f"--{name}", str(value)))


TINY = Size(width=64, heads=4, layers=2, context=64, vocabulary=512, tokens=200_000)


def theme(smoke: bool, args: argparse.Namespace) -> Theme:
    size = TINY if smoke else Size()
    return Theme(
        name="gpt",
        title="GPT-2 124M, 1,024 tokens, float32: plain, the one-liners, flatout",
        plain="gpt.py",
        one_liners="gpt_one_liners.py",
        unit="tokens",
        per_sample=size.context,
        batch=args.batch_size,
        flop_per_unit=size.flop_per_token,
        formula=f"{size.flop_per_token / 1e6:.1f} MFLOP a token (6 N + 12 L H Q T, N = {size.parameters / 1e6:.2f} M)",
        arguments=size.arguments(args.batch_size),
        one_liner_arguments=("--backend", "aot_eager") if smoke else (),
    )


def main() -> int:
    parser = options(__doc__)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=4,
        help="sequences a step (default 4; the interleaved programs share the GPU's memory)",
    )
    return run(theme, parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
