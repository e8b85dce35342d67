"""Matching of conditioning inputs to a sample's clip, and the form in which they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamvid.dataset.manifest import MediaInfo
from streamvid.dataset.tabular.rows import Rows
from streamvid.errors import ProbeError, Rejected
from streamvid.sharder.media_columns import MediaColumn
from streamvid.sharder.probing import Probes
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.records import Record
from streamvid.sharder.units.probe_unit import Probe
from streamvid.sharder.windows import Clip, Timing

TIME_TOLERANCE = 0.5
"""Maximum time difference between a frame of an input and the corresponding frame of the clip, in frame durations."""


SHAPE_TOLERANCE = 0.02
"""Maximum relative difference between the aspect ratios of an input and the clip."""


@dataclass(frozen=True, slots=True)
class PlannedMedium:
    """File for a conditioning input, as it is stored with a sample's clip.

    is_still: True for one still image per clip; False for a video with as many frames as the clip, and for audio.
    """

    column: MediaColumn
    file: MediaFile
    probe: Probe
    is_still: bool
    clip: Clip

    @property
    def extension(self) -> str:
        """Extension of the file's member in the tar."""
        item = "" if self.file.item is None else f".{self.file.item}"
        return f"{self.column.stem}{item}.{self.clip.extension}"


def still_media(
    records: Rows[Record], probes: Probes, columns: Sequence[MediaColumn], there: Mapping[str, MediaInfo]
) -> frozenset[str]:
    """Return the names of the inputs that are declared as images or have only image files.

    there: conditioning inputs that the dataset already contains. Their kinds do not change.
    """
    found: dict[str, bool] = {}
    for (extra,) in records.tuples("extra") if columns else ():
        for file in extra:
            probe = probes(file)
            if isinstance(probe, Probe):
                found[file.name] = found.get(file.name, True) and probe.is_image
    found |= {name: info.is_still for name, info in there.items()}
    return frozenset(
        medium.name
        for medium in columns
        if not medium.is_audio and (medium.kind == "image" or found.get(medium.name, True))
    )


def fit_media(
    record: Record,
    probe: Probe,
    probes: Probes,
    columns: Sequence[MediaColumn],
    stills: frozenset[str],
) -> tuple[PlannedMedium, ...]:
    """Return a record's conditioning inputs as they will be stored.

    Raises Rejected if one of them does not match the clip.
    """
    of_name = {medium.name: medium for medium in columns}
    found = []
    for file in record.extra:
        medium, own = of_name[file.name], probes(file)
        if isinstance(own, Rejected):
            raise Rejected(f"{file.label}: {own}", kind="medium")
        if medium.is_audio:
            _check_audio(file, own)
            found.append(PlannedMedium(medium, file, own, False, replace(own.copy_of(file), num_frames=0)))
            continue
        if own.is_audio:
            raise Rejected(
                f"{file.label}: {file.source} contains only audio; declare the input as audio:{file.name}",
                kind="medium",
            )
        is_still = file.name in stills and medium.kind != "video"
        if is_still and not own.is_image:
            raise Rejected(f"{file.label}: {file.source} is a video, but must be an image", kind="medium")
        if not is_still:
            _check_frames(file, own, probe)
        if medium.is_mask:
            _check_mask(file, own)
        if not is_still or medium.is_mask:
            _check_shape(file, own, probe)
        found.append(PlannedMedium(medium, file, own, is_still, own.copy_of(file)))
    return tuple(found)


def _check_audio(file: MediaFile, own: Probe) -> None:
    if file.item is not None:
        raise Rejected(
            f"{file.label}: {file.source} is in a list, but an audio input must have one file per row; use one column "
            "per file",
            kind="medium",
        )
    if not own.has_audio:
        reason = f" that can be read ({own.audio_problem})" if own.audio_problem else ""
        raise Rejected(f"{file.label}: {file.source} has no audio{reason}", kind="medium")


def _check_mask(file: MediaFile, own: Probe) -> None:
    from streamvid.video.decode.mask import check_mask_format

    try:
        check_mask_format(own.pixel_format)
    except ProbeError as error:
        raise Rejected(f"{file.label}: {file.source}: {error}", kind="medium") from error


def _check_frames(file: MediaFile, own: Probe, probe: Probe) -> None:
    """Raise Rejected unless an input has as many frames as the clip, at the same times."""
    if file.item is not None:
        raise Rejected(
            f"{file.label}: {file.source} is in a list and is used as a video, but a list must contain only images; "
            f"use one video per row, or list only images and declare the input as image:{file.name}",
            kind="medium",
        )
    if own.num_frames != probe.num_frames or own.is_image != probe.is_image:
        raise Rejected(
            f"{file.label}: {file.source} {_length(own)}, but the clip {_length(probe)}; a video input must have as "
            f"many frames as the clip. For one still image per clip, declare the input as image:{file.name}",
            kind="medium",
        )
    if own.is_image or not (own.timing and probe.timing):
        return
    apart, limit = _apart_seconds(own, probe), TIME_TOLERANCE / probe.fps if probe.fps else 0.0
    if apart > limit:
        raise Rejected(
            f"{file.label}: a frame of {file.source} is {apart:.3f} s away from the corresponding frame of the clip, "
            f"but at most {limit:.3f} s (half a frame) is allowed; convert both files to the same constant frame rate "
            f"(their average rates are {own.fps:.3f} and {probe.fps:.3f})",
            kind="medium",
        )


def _check_shape(file: MediaFile, own: Probe, probe: Probe) -> None:
    """Raise Rejected if the crops of the input and of the clip would show different parts of the frame."""
    share = abs(own.width * probe.height - own.height * probe.width) / (own.height * probe.width)
    if share > SHAPE_TOLERANCE:
        raise Rejected(
            f"{file.label}: {file.source} is {own.width}x{own.height}, but the clip is {probe.width}x{probe.height}; "
            f"their aspect ratios may differ by at most {SHAPE_TOLERANCE:.0%}, so that both crops show the same part; "
            "crop one of the files to the other's aspect ratio",
            kind="medium",
        )


def _length(probe: Probe) -> str:
    return "is a still image" if probe.is_image else f"has {probe.num_frames} frames"


def _apart_seconds(own: Probe, probe: Probe) -> float:
    """Return the largest time difference, in seconds, between corresponding frames. Each file's frame 0 has time 0."""
    import numpy as np

    times: list[Any] = []
    for timing in (Timing.from_text(own.timing), Timing.from_text(probe.timing)):
        ticks = np.asarray(timing.timestamps, np.int64)
        times.append((ticks - ticks[0]) * float(timing.time_base))
    return float(np.abs(times[0] - times[1]).max())
