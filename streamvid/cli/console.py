"""Output of the verbs: progress, tables, sizes and JSON. The package rich is imported only when needed."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import click

from streamvid.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Report(Protocol):
    """Result of a verb that can also be printed as JSON."""

    def to_json(self) -> object: ...


AnyReport = TypeVar("AnyReport", bound=Report)
_PLAIN_SECONDS = 5.0
_LEAST_TEXT = 24  # minimum width of wrapped text, in terminal columns
_GAP = "   "


class ProgressBar:
    """Progress display on standard error: one bar per phase on a terminal, otherwise a line every few seconds.

    Call this object with (phase, done, total). A phase ends when done == total. Bars stay visible after exit.
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
        """Stop drawing, so that the caller can print text. The next phase draws a new bar below the text."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        if is_quiet():
            return
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


def is_quiet() -> bool:
    """Return True if --quiet was given."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get("quiet"))


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
    # Standard output may go to a file. Therefore, only text on standard error is redirected to appear above the bar.
    bar = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), redirect_stdout=False
    )
    bar.start()
    return bar


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, max_rows: int = 100, err: bool = False
) -> None:
    """Print a table with right-aligned numbers and left-aligned text.

    On a terminal, columns that do not fit the width are printed in additional tables below the first, and long text is
    wrapped between words. When the output goes to a file or a pipe, lines can have any length.
    err: True to print to standard error.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows[:max_rows]]
    columns = [
        _TableColumn(header, [row[number] for row in cells], _are_numbers([row[number] for row in rows]))
        for number, header in enumerate(headers)
    ]
    is_terminal = (sys.stderr if err else sys.stdout).isatty()
    width = shutil.get_terminal_size().columns if is_terminal else sys.maxsize
    for number, part in enumerate(_parts(columns, width)):
        lines = _table_lines(part, width)
        click.echo("\n".join(["", *lines] if number else lines), err=err)
    if len(rows) > len(cells):
        click.echo(f"and {len(rows) - len(cells)} more rows; --json lists all", err=err)


@dataclass(frozen=True)
class _TableColumn:
    """Column of a table. width: width of the widest cell, in terminal columns."""

    header: str
    cells: list[str]
    is_number: bool

    @cached_property
    def width(self) -> int:
        return max(map(_width, (self.header, *self.cells)))

    def drawn(self, text: str) -> str:
        filler = " " * (self.width - _width(text))
        return filler + text if self.is_number else text + filler


def _are_numbers(cells: Sequence[object]) -> bool:
    return bool(cells) and all(isinstance(cell, int | float) for cell in cells)


def _width(text: str) -> int:
    """Return the width of a line in terminal columns. East Asian wide characters occupy two columns."""
    return len(text) + (0 if text.isascii() else sum(unicodedata.east_asian_width(char) in "WF" for char in text))


def _parts(columns: list[_TableColumn], width: int) -> Iterator[list[_TableColumn]]:
    """Divide columns among tables that fit the width. Each table begins with the first column, which identifies rows.

    Only the last column of a table may be wider than the remaining space. The text in this column is then wrapped.
    """
    part = columns[:1]
    for column in columns[1:]:
        room = width - sum(each.width + len(_GAP) for each in part)
        is_text = column.width > _LEAST_TEXT and any(" " in cell for cell in column.cells)
        if len(part) > 1 and room < (_LEAST_TEXT if is_text else column.width):
            yield part
            part = columns[:1]
        part.append(column)
    yield part


def _table_lines(columns: list[_TableColumn], width: int) -> list[str]:
    used = sum(column.width + len(_GAP) for column in columns[:-1])
    room = max(_LEAST_TEXT, width - used)
    wrapped = [textwrap.wrap(cell, room, break_long_words=False, break_on_hyphens=False) for cell in columns[-1].cells]
    columns = [*columns[:-1], replace(columns[-1], cells=[line for lines in wrapped for line in lines or [""]])]
    first_lines = [row for row, lines in enumerate(wrapped) for _ in lines or [""]]
    rows = [
        [column.cells[row] if not at or first_lines[at - 1] != row else "" for column in columns[:-1]]
        for at, row in enumerate(first_lines)
    ]
    full = [[*row, last] for row, last in zip(rows, columns[-1].cells, strict=True)]
    drawn = [
        _GAP.join(column.drawn(cell) for column, cell in zip(columns, row, strict=True)).rstrip()
        for row in [[column.header for column in columns], *full]
    ]
    rule = " ".join("-" * (column.width + 2) for column in columns)[1:-1]
    return [drawn[0], rule, *drawn[1:]]


def size(num_bytes: int) -> str:
    """Format a number of bytes in decimal units, for example as 12.3 MB."""
    from rich.filesize import decimal

    return decimal(int(num_bytes))


def run_and_print(
    work: Callable[[ProgressBar], AnyReport], as_json: bool, print_text: Callable[[AnyReport], None]
) -> AnyReport:
    """Call `work` with a progress bar. Print its report as JSON or with `print_text`, and return the report."""
    with ProgressBar() as progress:
        report = work(progress)
    if as_json:
        print_json(report.to_json())
    else:
        print_text(report)
    return report


def print_json(value: object) -> None:
    """Print one JSON document to standard output."""
    click.echo(json.dumps(value, indent=2))  # ASCII is valid in any output encoding
