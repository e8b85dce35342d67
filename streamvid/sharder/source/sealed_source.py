"""Sealed datasets of ours as a source: to give clips other buckets, or to put several into one.

Captions, columns and record keys stay, and a clip that was kept for validation stays so. Each clip's bytes are proved
by the checksum that the index has of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from streamvid.dataset.captions import captions_from_json
from streamvid.dataset.index import USER_PREFIX
from streamvid.dataset.manifest import FORMAT
from streamvid.dataset.reader import Dataset
from streamvid.errors import SourceError, StreamvidError
from streamvid.sharder.source.media import Media, part_path, proved_version
from streamvid.sharder.source.metadata import Metadata, Row
from streamvid.sharder.source.place import Kept, Members, Place
from streamvid.sharder.source.tar_source import CAPTION, MEDIA
from streamvid.storage import StorageOptions, open_store

if TYPE_CHECKING:
    from streamvid.dataset.manifest import ShardInfo

_MAX_LOOK_BYTES = 256 * 2**20
_WANTED = (
    *("key", "record_key", "text", "captions", "source", "clip_extension", "clip_offset", "clip_bytes", "clip_sha256"),
    *("window_start", "window_source_frames", "clip_width", "clip_height"),
)


def is_manifest(media: Media) -> bool:
    """Whether a file named manifest.json is one of ours."""
    if media.num_bytes > _MAX_LOOK_BYTES:
        return False
    try:
        value = json.loads(media.read())
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("format") == FORMAT


def read_dataset(place: Place, storage: StorageOptions) -> tuple[Members, Metadata]:
    """(where its clips lie, a row each clip). Raises SourceError where it cannot be a source."""
    try:
        dataset = Dataset(open_store(place.url, storage))
        return _Reader(dataset).read()
    except SourceError:
        raise
    except (StreamvidError, ValueError) as error:
        raise SourceError(f"the dataset {place.url} cannot be read as a source: {error}") from error


class _Reader:
    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._where: dict[str, tuple[str, str]] = {}
        self._states: dict[str, tuple[int, str]] = {}
        self._kept: dict[str, Kept] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._areas: dict[tuple[str, ...], tuple[int, str]] = {}

    def read(self) -> tuple[Members, Metadata]:
        dataset = self._dataset
        if dataset.manifest.media:
            raise SourceError(
                f"the dataset {dataset.url} has further media ({', '.join(dataset.manifest.media)}), which are not "
                "taken from datasets; shard it again from what it was made of"
            )
        for shard in dataset.shards:
            columns = [USER_PREFIX + name for name in dataset.user_columns]
            for row in dataset.samples(shard, [*_WANTED, *columns]).to_pylist():
                self._take(shard, row)
        names = list(dict.fromkeys((MEDIA, CAPTION, *dataset.user_columns)))
        rows: list[Row] = list(self._rows.values())
        members = Members(dataset.url, self._where, self._states, self._kept)
        return members, Metadata(rows, names, MEDIA, CAPTION)

    def _take(self, shard: ShardInfo, row: dict[str, Any]) -> None:
        several = captions_from_json(row["captions"]) if row["captions"] else ()
        texts = [{"text": text, "weight": weight} for text, weight in several]
        own = {key.removeprefix(USER_PREFIX): value for key, value in row.items() if key.startswith(USER_PREFIX)}
        if self._dataset.manifest.clips == "text":
            self._rows[row["key"]] = {**own, CAPTION: texts or row["text"]}
            return
        name = f"{row['key']}.{row['clip_extension']}"
        if self._dataset.manifest.draws and not self._is_best(name, row):
            return
        path = part_path(f"{self._dataset.url}/{shard.path}", row["clip_offset"])
        self._where[name] = (row["source"], path)
        self._states[path] = (row["clip_bytes"], proved_version(row["clip_sha256"]))
        self._kept[path] = Kept(row["key"], row["record_key"], shard.split == "val")
        self._rows[name] = {**own, MEDIA: name, CAPTION: texts or row["text"]}

    def _is_best(self, name: str, row: dict[str, Any]) -> bool:
        """Of a clip that several buckets store, the largest is taken, once."""
        clip = tuple(str(row.get(key)) for key in ("record_key", "window_start", "window_source_frames"))
        area = row["clip_width"] * row["clip_height"]
        if clip in self._areas and self._areas[clip][0] >= area:
            return False
        if clip in self._areas:
            del self._rows[self._areas[clip][1]]
        self._areas[clip] = (area, name)
        return True
