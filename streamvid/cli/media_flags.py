"""Flags for further media of a sample: control videos, reference images, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def _media(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values:
        name, _, column = value.partition("=")
        if not name or not column:
            raise click.BadParameter(f"{value!r} names no column; write it as control=control_video", ctx, param)
        if name in found:
            raise click.BadParameter(f"{name!r} is given twice", ctx, param)
        found[name] = column
    return found


def media_flags(command: Command) -> Command:
    """The flags; `media_options` makes options of what was given."""
    keys = click.option(
        "--data-file-keys",
        metavar="LIST",
        help="DiffSynth's way of naming them: the clip's column first, as 'video,control_video'; rows may lack media.",
    )
    media = click.option(
        "--media",
        "media_columns",
        metavar="NAME=COLUMN",
        multiple=True,
        callback=_media,
        help="A further file of each row, as control=control_video; NAME?= takes rows without one, image:NAME, "
        "video:NAME or mask:NAME says what it is. May be repeated.",
    )
    return media(keys(command))


def media_options(given: dict[str, Any]) -> None:
    """Turn the flags in `given` into fields of ShardOptions, in place. ConfigError for two ways of naming one thing."""
    from streamvid.errors import ConfigError
    from streamvid.sharder.source.extra_media import file_keys

    keys = given.pop("data_file_keys")
    if keys is None:
        return
    if given["media_columns"] or given["video_column"]:
        raise ConfigError(
            f"data_file_keys={keys!r} stands beside media or video_column, which say the same; leave one out"
        )
    given["video_column"], given["media_columns"] = file_keys(keys)
