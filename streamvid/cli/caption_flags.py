"""The flags of `streamvid shard` that say where captions come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def caption_flags(command: _Command) -> _Command:
    """Adds the ShardOptions caption_column, caption_weight_column and caption_lines to a command's arguments."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _columns(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if len(value) > 1:
        return value
    return value[0] if value else None


_OPTIONS = (
    click.option(
        "--caption-column",
        metavar="C",
        multiple=True,
        callback=_columns,
        help="Its column with captions, one or a list of them; '' for none. Given again: captions of the same sample.  "
        "[default: caption, text, …]",
    ),
    click.option(
        "--caption-weight-column",
        metavar="C",
        help="Its column with a list of numbers: how often to draw each caption.",
    ),
    click.option("--caption-lines", is_flag=True, help="A .txt beside a video holds one caption a line."),
)
