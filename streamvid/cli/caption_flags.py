"""The flags of `streamvid shard` that say where captions come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from streamvid.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., Any])


def caption_flags(command: _Command) -> _Command:
    """Adds to a command's arguments the ShardOptions caption_column, caption_weight_column and caption_lines; and
    text_only, which stands for clips="text"."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _columns(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if len(value) > 1:
        return value
    return value[0] if value else None


def text_option(given: dict[str, Any]) -> None:
    """Puts text_only under the name that ShardOptions has for it."""
    if given.pop("text_only"):
        if given["clips"] == "native":
            raise ConfigError(
                "--text-only stands beside --clips native, and texts are not encoded; leave one of them out"
            )
        given["clips"] = "text"


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
    click.option("--text-only", is_flag=True, help="Rows are texts without videos: a dataset of prompts."),
)
