"""Reading of sealed datasets as sources, to assign their clips to other buckets or to merge several datasets.

Captions, columns and record keys stay the same, and validation clips stay in the validation split. The bytes of each
clip are verified against the checksum in the index. Only datasets of captions and datasets of copied clips without
conditioning inputs are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from streamvid.dataset.captions import captions_from_json
from streamvid.dataset.index import USER_PREFIX
from streamvid.dataset.manifest import FORMAT
from streamvid.dataset.reader import Dataset
from streamvid.dataset.tabular.reader import blocks_of
from streamvid.dataset.tabular.table import MetadataTable
from streamvid.errors import SourceError, StreamvidError
from streamvid.sharder.source.media import Media, checksum_version, part_path
from streamvid.sharder.source.place import MemberFolder, Place, SealedOrigin
from streamvid.sharder.source.tar_source import CAPTION, MEDIA
from streamvid.storage import StorageOptions, open_store

if TYPE_CHECKING:
    from streamvid.dataset.manifest import ShardInfo

_MAX_MANIFEST_BYTES = 256 * 2**20


def is_manifest(media: Media) -> bool:
    """Return True if a file named manifest.json is the manifest of a streamvid dataset."""
    if media.num_bytes > _MAX_MANIFEST_BYTES:
        return False
    try:
        value = json.loads(media.read())
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("format") == FORMAT


def read_dataset(place: Place, storage: StorageOptions) -> tuple[MemberFolder, MetadataTable, str, str]:
    """Return (place, table, video column, caption column) for a dataset. Raises SourceError if it cannot be read."""
    try:
        dataset = Dataset(open_store(place.url, storage))
        reader = _SealedReader(dataset)
        reader.read()
    except SourceError:
        raise
    except (StreamvidError, ValueError) as error:
        raise SourceError(f"the dataset {place.url} cannot be read as a source: {error}") from error
    names = (MEDIA, CAPTION, *dataset.user_columns)
    table = MetadataTable(blocks_of(reader.rows.values()), f"dataset {place.url}", names)
    return MemberFolder(dataset.url, reader.where, reader.states, reader.origins), table, MEDIA, CAPTION


class _SealedClip(NamedTuple):
    """Values of the index columns for one clip."""

    key: str
    record_key: str
    text: str | None
    captions: str | None
    source: str
    clip_extension: str
    clip_offset: int
    clip_bytes: int
    clip_sha256: bytes
    window_start: object
    window_source_frames: object
    clip_width: int
    clip_height: int


@dataclass
class _SealedReader:
    """Reads a dataset's clips. If several buckets store the same clip, only the largest copy is kept."""

    dataset: Dataset
    where: dict[str, tuple[str, str]] = field(default_factory=dict)
    states: dict[str, tuple[int, str]] = field(default_factory=dict)
    origins: dict[str, SealedOrigin] = field(default_factory=dict)
    rows: dict[str, dict[str, object]] = field(default_factory=dict)
    areas: dict[tuple[object, ...], tuple[int, str]] = field(default_factory=dict)

    def read(self) -> None:
        if self.dataset.manifest.clips == "native":
            raise SourceError(
                f"the dataset {self.dataset.url} has native clips, which are already encoded at the sizes of their "
                "buckets. Encoding them again would lose quality, and the reported PSNR would not show the loss. "
                "Instead, shard the original videos, or copy the dataset unchanged with `streamvid copy`"
            )
        media = self.dataset.manifest.media
        if media:
            raise SourceError(
                f"the dataset {self.dataset.url} has conditioning inputs ({', '.join(media)}), which cannot be read "
                "from sealed datasets; shard the original files instead"
            )
        for shard in self.dataset.shards:
            for clip, columns in self._clips(shard):
                self._take(shard, clip, columns)

    def _clips(self, shard: ShardInfo) -> Iterator[tuple[_SealedClip, dict[str, object]]]:
        names = self.dataset.user_columns
        columns = [*_SealedClip._fields, *(USER_PREFIX + name for name in names)]
        samples = self.dataset.samples(shard, columns)
        for values in zip(*(samples.column(name).to_pylist() for name in columns), strict=True):
            clip = _SealedClip(*values[: len(_SealedClip._fields)])
            yield clip, dict(zip(names, values[len(clip) :], strict=True))

    def _take(self, shard: ShardInfo, clip: _SealedClip, columns: dict[str, object]) -> None:
        # The value is always a list, so that a caption that looks like a list remains a single caption.
        pairs = captions_from_json(clip.captions) if clip.captions else ((clip.text, 1.0),) if clip.text else ()
        caption = [{"text": text, "weight": weight} for text, weight in pairs]
        if self.dataset.manifest.clips == "text":
            self.rows[clip.key] = {**columns, CAPTION: caption}
            return
        name = f"{clip.key}.{clip.clip_extension}"
        if self.dataset.manifest.draws and not self._is_largest(name, clip):
            return
        path = part_path(f"{self.dataset.url}/{shard.path}", clip.clip_offset)
        self.where[name] = (clip.source, path)
        self.states[path] = (clip.clip_bytes, checksum_version(clip.clip_sha256))
        self.origins[path] = SealedOrigin(clip.key, clip.record_key, shard.split == "val")
        self.rows[name] = {**columns, MEDIA: name, CAPTION: caption}

    def _is_largest(self, name: str, clip: _SealedClip) -> bool:
        """Return True if this copy of a clip is the largest so far. The previous largest copy is then discarded."""
        window = (clip.record_key, str(clip.window_start), str(clip.window_source_frames))
        area = clip.clip_width * clip.clip_height
        if window in self.areas and self.areas[window][0] >= area:
            return False
        if window in self.areas:
            del self.rows[self.areas[window][1]]
        self.areas[window] = (area, name)
        return True
