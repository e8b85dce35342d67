"""Rejections by kind: counts, examples and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NUM_EXAMPLES = 3
OTHER = "other"
"""Kind of rejections without a kind of their own."""

REMEDIES: Mapping[str, str] = {
    "bad-row": "fix the row of the metadata as its reason says",
    "bad-path": "fix the path in the metadata: relative to the source, absolute, or s3://bucket/key",
    "missing-file": "put the file where its row says, or set the base of paths: --base-path FOLDER",
    "unreadable-file": "make the file readable for your user",
    "empty-file": "download or create the file again: it is empty",
    "no-text": "add a caption to the row, or name the caption column: --caption-column C",
    "max-clip-bytes": "accept larger files: --max-clip-bytes 4GB",
    "medium": "fix the row's conditioning input, or make it optional: --media NAME?=COLUMN",
    "where": "relax the condition of --where, or omit it",
    "not-media": "use a video or an image that FFmpeg reads, or remove the row",
    "codec": "re-encode it, for example to H.264 in mp4",
    "damaged": "download or create the file again; it ends early or does not decode",
    "timestamps": "remux or re-encode it: its frames have no times of their own",
    "hdr": "tone-map it to SDR, or accept it unchanged: --hdr allow",
    "color": "convert it to BT.709, for example with FFmpeg's zscale",
    "picture": "re-encode it with square pixels and at most a quarter turn",
    "changes-size": "re-encode it to one size and pixel format",
    "limit": "cut it into shorter files; the reason names the limit that it exceeds",
    "timeout": "allow more time: --encode-timeout S, or --probe-timeout S",
    "memory": "allow workers more memory: --worker-memory SIZE",
    "crash": "re-encode it: the decoder crashes on it",
    "fault": "report it with the file: it is a bug in streamvid",
    "no-image-bucket": "accept images: add 1 to --num-frames, or buckets of 1 frame to a copy of the preset",
    "no-video-bucket": "accept videos: add longer counts to --num-frames, or to the configuration's buckets",
    "too-small": "allow smaller sources: --min-area below 0.8, or add a smaller size to the buckets",
    "too-few-frames": "add a shorter count to --num-frames, or to the buckets; or take more frames per second: --fps",
    "too-short-for-its-size": "add a longer count of its size, or a smaller size with short counts, to the buckets",
    "max-upscale": "allow more: --max-upscale, or add a smaller size",
    "max-crop": "allow more: --max-crop, or add ratios: --num-ar-buckets N",
    "probability": "raise the probabilities of --bucket-config, or draw anew each epoch: --assign all",
    "min-psnr": "accept a lower quality: --min-psnr DB, or spend more bytes: a lower --crf",
}


@dataclass(frozen=True, slots=True)
class RejectedKind:
    """Rejections of one kind. remedy: how to get them accepted. examples: (row, source, reason) of the first ones."""

    kind: str
    count: int
    remedy: str
    examples: tuple[tuple[int, str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON-serializable values."""
        names = ("row", "source", "reason")
        examples = [dict(zip(names, example, strict=True)) for example in self.examples]
        return {"kind": self.kind, "count": self.count, "remedy": self.remedy, "examples": examples}


def by_kind(rejections: Iterable[tuple[str, int, str, str]]) -> tuple[RejectedKind, ...]:
    """Group rejections (kind, row, source, reason) by kind, the most frequent first. Counts add up (SHARD-3)."""
    counts: dict[str, int] = {}
    examples: dict[str, list[tuple[int, str, str]]] = {}
    for kind, row, source, reason in rejections:
        name = kind or OTHER
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= NUM_EXAMPLES:
            examples.setdefault(name, []).append((row, source, reason))
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    return tuple(
        RejectedKind(name, counts[name], REMEDIES.get(name, "see its reason"), tuple(examples[name]))
        for name in ordered
    )
