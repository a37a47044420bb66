"""Progress output of `flatout tune` and `flatout profile`: the stage, the ratios so far, the time left."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flatout.measure.clock import seconds
from flatout.schema.records import Ratio
from flatout.trial.blocks import Watcher

MAX_ROWS = 12


class LiveProgress(Watcher):
    """A table that is redrawn in a terminal, or plain lines in a file."""

    def __init__(self, console: Console, budget_s: float) -> None:
        self.console = console
        self.end_s = seconds() + budget_s
        self.current = ""
        self.detail = ""
        self.expected = ""
        self.rows: dict[str, tuple[Ratio | None, str]] = {}
        self.live = (
            Live(
                self._draw(), console=console, refresh_per_second=4, transient=True, get_renderable=self._draw
            )
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LiveProgress:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def stage(self, name: str, detail: str = "") -> None:
        if self.live is None and (name, detail) != (self.current, self.detail):
            self.console.print(Text(f"{self._time_left()}  {name}: {detail}"), soft_wrap=True)
        self.current, self.detail = name, detail

    def set_end(self, end_s: float) -> None:
        self.end_s = end_s

    def report(self, sentence: str) -> None:
        self.expected = sentence
        if self.live is None:
            self.console.print(Text(sentence), soft_wrap=True)

    def comparison(self, plan: str, ratio: Ratio | None, note: str = "") -> None:
        self.rows.pop(plan, None)
        self.rows[plan] = (ratio, note)

    def _time_left(self) -> str:
        seconds_left = max(0, int(self.end_s - seconds()))
        return f"{seconds_left // 60}:{seconds_left % 60:02d} left"

    def _draw(self) -> Group:
        table = Table(box=None, padding=(0, 2), show_header=False)
        table.add_column(ratio=3, overflow="ellipsis", no_wrap=True)
        table.add_column(ratio=2, overflow="ellipsis", no_wrap=True)
        for plan, (ratio, note) in list(self.rows.items())[-MAX_ROWS:]:
            style = "" if ratio is None else "green" if ratio.significant else "red" if ratio.high < 1 else ""
            table.add_row(Text(plan), Text(ratio.sentence() if ratio else note or "failed", style=style))
        expected = [Text(self.expected)] if self.expected else []
        return Group(
            Text(f"{self._time_left()}  {self.current}: {self.detail}", style="bold"), *expected, table
        )
