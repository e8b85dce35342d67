"""Options for the sharder's input: where rows and captions come from, and which rows are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.sharder.media_columns import MediaColumn, media_columns

SourceLayout = Literal["metadata", "folder", "lists", "imagefolder", "parquet", "tars", "dataset"]


@dataclass(frozen=True)
class CaptionOptions:
    """Options for reading captions."""

    column: str | tuple[str, ...] | None = option(
        None,
        help="Metadata column with captions (text or lists); '' disables captions; repeatable.",
        metavar="C",
        group="",
        flag="--caption-column",
        shown_default="caption, text, …",
    )
    weight_column: str | None = option(
        None,
        help="Metadata column with a list of caption weights.",
        metavar="C",
        flag="--caption-weight-column",
    )
    lines: bool = option(
        False, help="Read each line of a video's .txt file as a separate caption.", flag="--caption-lines"
    )
    too_long: Literal["reject", "truncate"] = option(
        "reject",
        help="Handling of captions over 64 KiB: reject the row, or truncate the caption.",
        flag="--long-captions",
    )

    def __post_init__(self) -> None:
        if isinstance(self.column, list):
            object.__setattr__(self, "column", tuple(self.column))
        check_options(self)
        several = self.column if isinstance(self.column, tuple) else (self.column,)
        if not several or not all(isinstance(name, str | None) for name in several):
            raise ConfigError(f"column={self.column!r}: must be a column name or a list of column names")
        if len(set(several)) < len(several) or (len(several) > 1 and not all(several)):
            raise ConfigError(
                f"column={self.column!r} contains a duplicate or empty name; list each column only once, or pass "
                "only '' to disable captions"
            )
        if self.weight_column is not None and self.column == "":
            raise ConfigError(
                f"weight_column={self.weight_column!r} cannot be combined with source.captions.column='', which "
                "disables captions; omit one of them"
            )
        if self.weight_column is not None and self.weight_column in several:
            raise ConfigError(
                f"weight_column={self.weight_column!r}: must differ from the caption columns; set "
                "source.captions.weight_column to the column that contains the weights, or omit it"
            )


@dataclass(frozen=True)
class SourceOptions:
    """Options for the sharder's input and the selection of rows.

    media: maps the name of each conditioning input to the metadata column that contains its file paths, as in
        {"control": "control_video"}. "?" after a name makes the input optional; "image:", "video:", "mask:" or
        "audio:" before a name sets its kind.
    where: condition in the syntax of the loader's `where=`. The condition can use metadata columns, text (the caption),
        source (the file name), and the width, height, num_frames, fps, duration_seconds, aspect_ratio, has_audio and
        audio_start_seconds of the file.
        Rows for which the condition is false or unknown are rejected. A condition on metadata alone is evaluated
        before probing.
    """

    metadata: str | Path | None = option(
        None, help="CSV, JSON, JSONL or Parquet file with one row per video.", metavar="FILE", group=""
    )
    captions: CaptionOptions = option(default_factory=CaptionOptions, group="Captions")
    layout: SourceLayout | None = option(None, help="Layout of SOURCE.", shown_default="detected")
    base_path: str | Path | None = option(
        None, help="Base folder for relative paths in the metadata.", metavar="FOLDER", shown_default="SOURCE"
    )
    video_column: str | None = option(
        None, help="Metadata column that holds media paths.", metavar="C", shown_default="path, video, file_name, …"
    )
    time_columns: tuple[str, ...] = option(
        (), help="Metadata columns with each clip's start and end in seconds.", metavar="LIST"
    )
    whole_files: bool = option(
        False, help="Use the whole file for each row, even if rows share a file or have time ranges."
    )
    other_buckets: bool = option(
        False,
        help="Allow metadata in a storage bucket to refer to other buckets, which are read with your credentials.",
    )
    where: str | None = option(
        None, help="Keep only rows that match a condition, such as 'aesthetic > 5 and fps >= 24'.", metavar="TEXT"
    )
    min_fps: float | None = option(
        None,
        help="Minimum frame rate, with a tolerance of 1%; videos with a lower rate are rejected.",
        metavar="RATE",
        above=0,
    )
    media: Mapping[str, str] = option(
        default_factory=dict,
        help="Conditioning input: KIND:NAME=COLUMN, or KIND:NAME?=COLUMN for an optional input. Repeatable.",
        metavar="NAME=COLUMN",
    )
    max_clip_bytes: int = option(
        2 * 2**30,
        help="Maximum file size; larger files are rejected.",
        metavar="SIZE",
        minimum=1,
        maximum=8 * 2**30 - 1,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.where is not None and not self.where.strip():
            raise ConfigError(f"where={self.where!r}: must be a condition, such as 'aesthetic > 5 and motion > 0.2'")
        if len(self.time_columns) > 2 or len(set(self.time_columns)) < len(self.time_columns):
            raise ConfigError(
                f"time_columns={self.time_columns!r}: must be two different columns, one for starts and one for "
                "ends, or a single column that contains both"
            )
        if self.time_columns and self.whole_files:
            raise ConfigError(
                f"time_columns={self.time_columns!r} cannot be combined with source.whole_files=True; omit one of them"
            )
        _ = self.media_columns

    @cached_property
    def media_columns(self) -> tuple[MediaColumn, ...]:
        """Conditioning inputs parsed from `media`."""
        return media_columns(self.media)
