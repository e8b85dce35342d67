"""Output of the verbs: progress, tables, sizes and JSON. The package rich is imported only when needed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Report(Protocol):
    """Result of a verb that can also be printed as JSON."""

    def to_json(self) -> object: ...


AnyReport = TypeVar("AnyReport", bound=Report)
_PLAIN_SECONDS = 5.0
_PIPED_WIDTH = 10_000  # no line is wrapped or cut in a file or a pipe
_NO_RULE = "    \n"
_RULES = _NO_RULE * 2 + " -  \n" + _NO_RULE * 5  # one line of dashes, below the headers


class ProgressBar:
    """Progress display on standard error: one bar per phase on a terminal, otherwise a line every few seconds.

    Call it with (phase, done, total). A phase ends with done == total. Bars stay visible after exit.
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def pause(self) -> None:
        """Stop drawing, so that text can be printed. The next phase draws a new bar below the text."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._draw(phase, done, total)
        elif total and (done == total or phase != self._phase or time.monotonic() - self._shown_at > _PLAIN_SECONDS):
            click.echo(f"{phase} {done}/{total}", err=True)
            self._shown_at = time.monotonic()
        self._phase = phase

    def _draw(self, phase: str, done: int, total: int) -> None:
        if self._bar is None or self._task is None or phase != self._phase:
            self._bar = self._bar or _start_bar()
            self._task = self._bar.add_task(phase, total=total)
        self._bar.update(self._task, completed=done, total=total)


def _start_bar() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Standard output may go to a file, so only text on standard error is moved above the bar.
    bar = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), redirect_stdout=False
    )
    bar.start()
    return bar


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, err: bool = False) -> None:
    """Print a table with right-aligned numbers and left-aligned text. Cells wrap only on a narrow terminal."""
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=Box(_RULES, ascii=True), show_edge=False, pad_edge=False)
    for number, header in enumerate(headers):
        is_number = bool(rows) and all(isinstance(row[number], int | float) for row in rows)
        table.add_column(Text(header), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    is_terminal = (sys.stderr if err else sys.stdout).isatty()
    console = Console(stderr=err, width=None if is_terminal else _PIPED_WIDTH)
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():
        click.echo(line.rstrip(), err=err)


def printable(text: str) -> str:
    """Return `text` as one line, with control characters and line breaks escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(num_bytes: int) -> str:
    """Format a number of bytes with decimal units, such as 12.3 MB."""
    from rich.filesize import decimal

    return decimal(int(num_bytes))


def run_and_print(
    work: Callable[[ProgressBar], AnyReport], as_json: bool, print_text: Callable[[AnyReport], None]
) -> AnyReport:
    """Call `work` with a progress bar, print its report as JSON or with `print_text`, and return the report."""
    with ProgressBar() as progress:
        report = work(progress)
    if as_json:
        print_json(report.to_json())
    else:
        print_text(report)
    return report


def print_json(value: object) -> None:
    """Print one JSON document on standard output."""
    click.echo(json.dumps(value, indent=2))  # ASCII is valid in any output encoding
