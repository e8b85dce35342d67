"""Rejections by kind: counts, examples and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NUM_EXAMPLES = 3
OTHER = "other"
"""Name of the group for rejections without a kind."""

NO_BUCKET = frozenset(
    ("no-image-bucket", "no-video-bucket", "too-small", "too-few-frames", "too-short", "too-short-for-its-size")
) | {"max-upscale", "max-crop", "probability"}
"""Rejection kinds for clips that no bucket accepts."""

OF_FILE = frozenset(("missing-file", "unreadable-file", "empty-file", "max-clip-bytes", "not-media"))
"""Rejection kinds for files from which no samples can be made."""

OF_CLIP = frozenset(
    ("codec", "damaged", "timestamps", "picture", "changes-size", "timeout", "memory", "crash", "fault")
)
"""Rejection kinds for clips, each of which may be a part of a file."""

REMEDIES: Mapping[str, str] = {
    "bad-row": "fix the metadata row as the reason describes",
    "bad-path": "fix the path in the metadata; use a relative or absolute path, or a URL such as s3://bucket/key",
    "missing-file": "place the file at the path in its row, or set the base folder for paths: --base-path FOLDER",
    "unreadable-file": "replace the path with the path of a regular file that you have permission to read",
    "empty-file": "download or create the file again: it is empty",
    "no-text": "add a caption to the row, or specify the caption column: --caption-column C",
    "max-clip-bytes": "accept larger files: --max-clip-bytes 4GB",
    "medium": "fix the row's conditioning input, or leave the cell empty and make it optional: --media NAME?=COLUMN",
    "removed": "to add the file again, give it another name",
    "other-file": "rename the file, or pass a folder above it as SOURCE, so that its name contains the folder",
    "stated-facts": "correct the metadata, or omit --trust-metadata, so that files are probed before planning",
    "where": "relax the --where condition, or omit it",
    "duplicate": "to keep all rows and mark near-duplicates in a column, use --dedup mark",
    "no-audio": "to accept clips without audio, build a dataset without --audio require; append keeps this setting",
    "audio": "repair the audio (ffmpeg -i IN -c:v copy -c:a aac OUT.mp4), or leave it out: --audio drop",
    "min-fps": "lower or omit --min-fps; if --fps is set, frames of slower videos are repeated",
    "not-media": "use a video or an image (with --clips audio, an audio file) that FFmpeg can read, or remove the row",
    "codec": "re-encode the file, for example to H.264 in MP4",
    "damaged": "download or create the file again: it is truncated or cannot be decoded",
    "timestamps": "re-encode the file: its frames have no usable timestamps",
    "hdr": "tone-map the video to SDR, or accept HDR video unchanged: --hdr allow",
    "color": "convert the video to BT.709, for example with FFmpeg's zscale",
    "picture": "re-encode the file as the reason describes, for example with square pixels or without rotation",
    "changes-size": "re-encode the video to a single frame size and pixel format",
    "limit": "split or reduce the file; the reason states which limit is exceeded",
    "timeout": "allow more time: --encode-timeout S or --probe-timeout S",
    "memory": "allow workers more memory: --worker-memory SIZE",
    "crash": "re-encode the file: it crashes the decoder",
    "fault": "report this bug in streamvid, and attach the file",
    "no-image-bucket": "to accept images, add 1 to --num-frames, or add buckets with 1 frame to a copy of the preset",
    "no-video-bucket": "to accept videos, add frame counts above 1 to --num-frames, or to buckets in a copy of the "
    "preset",
    "too-small": "lower --min-area (default 0.8) to accept smaller sources, or add a smaller size to the buckets",
    "too-few-frames": "add a smaller count to --num-frames or to the buckets, or raise --fps to read more frames",
    "too-short": "add a shorter duration to --buckets to accept shorter audio",
    "too-short-for-its-size": "add a bucket whose size and frame count are no larger than those of the clip",
    "max-upscale": "raise --max-upscale, or add a smaller size to the buckets",
    "max-crop": "raise --max-crop, or add aspect ratios: --num-ar-buckets N",
    "probability": "raise the probabilities in --bucket-config, or draw a new bucket in each epoch: --assign all",
    "long-text": "shorten the text, or truncate captions: --long-captions truncate",
    "time-range": "correct the times; use seconds or H:MM:SS from the start of the video, within its duration",
    "cut": "encode the clips (--clips native), or convert the file to MP4",
    "min-psnr": "lower --min-psnr to accept lower quality, or lower --crf to store more bytes",
    "max-growth": "raise --max-growth to allow larger clips, or use --codec av1",
}


@dataclass(frozen=True, slots=True)
class RejectedKind:
    """Rejections of one kind.

    remedy: advice for the user.
    examples: (row, source, reason) of the first rejections.
    """

    kind: str
    count: int
    remedy: str
    examples: tuple[tuple[int, str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-serializable values."""
        names = ("row", "source", "reason")
        examples = [dict(zip(names, example, strict=True)) for example in self.examples]
        return {"kind": self.kind, "count": self.count, "remedy": self.remedy, "examples": examples}


def by_kind(rejections: Iterable[tuple[str, int, str, str]]) -> tuple[RejectedKind, ...]:
    """Group (kind, row, source, reason) tuples by kind, with the most frequent kind first (SHARD-3)."""
    counts: dict[str, int] = {}
    examples: dict[str, list[tuple[int, str, str]]] = {}
    for kind, row, source, reason in rejections:
        name = kind or OTHER
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= NUM_EXAMPLES:
            examples.setdefault(name, []).append((row, source, reason))
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    return tuple(
        RejectedKind(name, counts[name], REMEDIES.get(name, "see the reason"), tuple(examples[name]))
        for name in ordered
    )
