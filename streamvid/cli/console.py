"""What a terminal shows: progress, sizes, tables, JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

_PLAIN_SECONDS = 5.0


class Progress:
    """Progress of phases on standard error: a bar on a terminal, else a plain line now and then.

    Call it with (phase, done, total); a phase ends when done == total.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._phase = ""
        self._shown = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._draw(phase, done, total)
        elif total and (done == total or phase != self._phase or time.monotonic() - self._shown > _PLAIN_SECONDS):
            click.echo(f"{phase} {done}/{total}", err=True)
            self._shown = time.monotonic()
        self._phase = phase

    def _draw(self, phase: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None or phase != self._phase:
            self.close()
            # Terminals that nobody gave a size say that they have 0 columns and rows, where tqdm shows nothing.
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            self._bar = tqdm(total=total, desc=phase, file=sys.stderr, leave=True, ncols=min(width, 120), nrows=20)
        self._bar.update(done - self._bar.n)
        if done == total:
            self.close()

    def close(self) -> None:
        """End the bar that is drawn, if any."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns: numbers to the right, text to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(len(headers[i]), *(len(row[i]) for row in cells)) if cells else len(headers[i]) for i in range(len(headers))
    ]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(aligned).rstrip()

    return "\n".join([line(list(headers)), line(["-" * width for width in widths]), *(line(row) for row in cells)])


def printable(text: str) -> str:
    """`text` as one line that cannot move a cursor: control characters and line breaks as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(num_bytes: int) -> str:
    """12.3 MB, in powers of ten as disks and --shard-size count."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError  # pragma: no cover


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(value, indent=2))  # ASCII: valid whatever the encoding of the output
