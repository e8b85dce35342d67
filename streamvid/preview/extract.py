"""Extraction of samples to files: the stored clip, the frames that the model gets, the caption and the metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamvid.dataset.passes import Progress, no_progress
from streamvid.dataset.reader import Dataset
from streamvid.preview.deliver import DeliveredSample, Deliverer, Frames, ViewSettings
from streamvid.preview.find import find_keys
from streamvid.preview.sample import SampleFacts, clip_range, media_ranges, read_verified_clip, sample_facts
from streamvid.storage import LocalStore
from streamvid.video.encode.showing import png

_EXTENSION = re.compile(r"[a-z0-9]{1,8}")
_MAX_NAME = 80


@dataclass(frozen=True, slots=True)
class ExtractedSample:
    """Files extracted for one sample.

    folder: path of the sample's folder, relative to the output folder.
    files: paths of the files, relative to `folder`.
    """

    key: str
    folder: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """Result of `extract`: the output folder, and the samples that were written to it."""

    output: Path
    samples: tuple[ExtractedSample, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-serializable values."""
        return {"output": str(self.output), "samples": [asdict(one) for one in self.samples]}


def extract(
    dataset: Dataset,
    keys: Sequence[str],
    output: Path,
    settings: ViewSettings | None = None,
    visit: int = 0,
    progress: Progress = no_progress,
) -> ExtractReport:
    """Write each sample to a separate folder in `output`. Existing files with the same names are replaced.

    settings: loader settings that determine the frames and the caption.
    visit: visit number, which determines the random choices.
    Raises ConfigError for unknown keys, and SampleError or IntegrityError for bad samples.
    """
    places, deliverer = find_keys(dataset, keys), Deliverer(dataset)
    found: list[ExtractedSample] = []
    try:
        for done, place in enumerate(places):
            progress("extract", done, len(places))
            facts, shown = sample_facts(dataset, place), deliverer.deliver(place, visit, settings or ViewSettings())
            files = _files(dataset, facts, shown, visit)
            name = _folder(facts.key, {one.folder for one in found})
            store = LocalStore(output / name)
            for file, data in files.items():
                store.put(file, data)
            found.append(ExtractedSample(facts.key, name, tuple(files)))
    finally:
        deliverer.close()
    progress("extract", len(places), len(places))
    return ExtractReport(output, tuple(found))


def _folder(key: str, taken: set[str]) -> str:
    """Return a safe folder name for a key. In a damaged index, a key can be any text (SAFE-1)."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", key)[:_MAX_NAME].lstrip("-") or "sample"
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}-{number}", number + 1
    return name


def _files(dataset: Dataset, facts: SampleFacts, shown: DeliveredSample, visit: int) -> dict[str, bytes]:
    """Return a sample's files, as a mapping from name to contents."""
    part = clip_range(facts)
    files = {f"clip.{_extension(part.extension)}": read_verified_clip(dataset, part)}
    for name, items in media_ranges(facts).items():
        for number, item in enumerate(items):
            file = f"media-{_folder(name, set())}-{number}.{_extension(item.extension)}"
            files[file] = read_verified_clip(dataset, item)
    files |= _pictures("frame", shown.frames)
    for name, several in shown.media.items():
        for number, frames in enumerate(several):
            files |= _pictures(f"{_folder(name, set())}-{number}-frame", frames)
    files["caption.txt"] = shown.delivery.caption.encode()
    about = {"sample": facts.to_json(), "delivery": _about(shown, visit)}
    files["sample.json"] = (json.dumps(about, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _extension(extension: str) -> str:
    return extension if _EXTENSION.fullmatch(extension) else "bin"


def _pictures(stem: str, frames: Frames | None) -> dict[str, bytes]:
    return {} if frames is None else {f"{stem}-{number:04d}.png": png(one) for number, one in enumerate(frames)}


def _about(shown: DeliveredSample, visit: int) -> dict[str, Any]:
    delivery = shown.delivery
    numbers, crop = delivery.part.numbers, delivery.view.crop
    return {
        "visit": visit,
        "frame_numbers": None if numbers is None else list(map(int, numbers)),
        "crop": None if crop is None else asdict(crop),
        "fps": delivery.fps,
        "caption": delivery.caption,
        "seed": delivery.seed,
    }
