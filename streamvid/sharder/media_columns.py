"""Metadata columns that contain the file paths of conditioning inputs (videos, images, masks, audio)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from streamvid.errors import ConfigError

MAX_MEDIA = 16
KINDS = ("video", "image", "mask", "audio")
_TAKEN = ("txt", "json")
_SPELLING = re.compile(r"(?:([a-z]+):)?([a-z][a-z0-9_]{0,31})(\?)?")


@dataclass(frozen=True, slots=True)
class MediaColumn:
    """Conditioning input, and the metadata column that contains its file paths.

    kind: "video" for files with as many frames as the clip, at the same times; "image" for one still image per clip;
        "audio" for an audio track; None to select "image" if all files are images, and "video" otherwise.
    is_mask: True for masks, which are never interpolated and which native datasets store losslessly in one channel.
    is_optional: True if rows without the input are accepted.
    """

    name: str
    column: str
    kind: str | None = None
    is_mask: bool = False
    is_optional: bool = False

    @property
    def is_audio(self) -> bool:
        return self.kind == "audio"

    @property
    def stem(self) -> str:
        """Prefix for the extensions of this input's tar members."""
        return self.name.replace("_", "")

    def __str__(self) -> str:
        kind = "mask:" if self.is_mask else f"{self.kind}:" if self.kind else ""
        return f"{kind}{self.name}{'?' if self.is_optional else ''}={self.column}"


def media_columns(given: Mapping[str, str]) -> tuple[MediaColumn, ...]:
    """Parse conditioning inputs such as `{"control": "control_video", "reference?": "ref", "mask:matte": "matte"}`.

    A name is a lowercase letter followed by up to 31 lowercase letters, digits or underscores. "?" after a name makes
    the input optional; "video:", "image:", "mask:" or "audio:" before a name sets its kind. Raises ConfigError for
    anything else.
    """
    found: list[MediaColumn] = []
    for key, column in given.items():
        match = _SPELLING.fullmatch(key) if isinstance(key, str) else None
        if match is None or match[1] not in (None, *KINDS) or not isinstance(column, str) or not column:
            raise ConfigError(
                f"media {key!r}={column!r}: must be [KIND:]NAME[?]=COLUMN, such as control=control_video or "
                f"mask:matte=matte. KIND is one of {', '.join(KINDS)}; NAME is a lowercase letter followed by up to 31 "
                "lowercase letters, digits or underscores"
            )
        is_mask = match[1] == "mask"
        found.append(MediaColumn(match[2], column, None if is_mask else match[1], is_mask, match[3] is not None))
    for taken in ([medium.stem for medium in found], [medium.column for medium in found]):
        twice = sorted({word for word in taken if taken.count(word) > 1 or word in _TAKEN})
        if twice:
            raise ConfigError(
                f"media uses reserved or duplicate names: {', '.join(twice)}; give each input a unique column and a "
                "unique name other than txt or json (underscores in names are ignored)"
            )
    if len(found) > MAX_MEDIA:
        raise ConfigError(f"media has {len(found)} conditioning inputs; use at most {MAX_MEDIA}")
    return tuple(found)


def file_keys(text: str) -> tuple[str, dict[str, str]]:
    """Parse DiffSynth's data_file_keys, such as `video,control_video`.

    Return (clip column, columns of optional inputs).
    """
    clip, *others = (word.strip() for word in text.split(","))
    if not clip or not all(others):
        raise ConfigError(
            f"data_file_keys={text!r} contains an empty column name; list the columns that contain media paths, "
            "starting with the clip's column; for example, 'video,control_video'"
        )
    return clip, {f"{re.sub('[^a-z0-9_]', '_', name.lower())}?": name for name in others}
