"""Source layouts. Each is recognized by its files, and provides a table of rows and a place that contains the files.

To add a layout, write a function that recognizes it and one that reads it, add a line to `_LAYOUTS`, and add
its name to `SourceLayout` in source_options.py. Access files through `source.place`, so that object stores work. A
source is read by the layout that recognizes it, unless the option `layout` specifies another layout. Tars and sealed
datasets have their own modules; all other layouts are in this module. To support more column names, extend
VIDEO_COLUMNS or CAPTION_COLUMNS instead of adding a layout.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from streamvid.dataset.tabular.reader import (
    METADATA_SUFFIXES,
    RowBlock,
    blocks_of,
    is_metadata_name,
    value_column,
)
from streamvid.dataset.tabular.table import MetadataTable, read_file
from streamvid.errors import ConfigError, Rejected, SourceError
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.source.embedded import EmbeddedFiles
from streamvid.sharder.source.folder import is_audio_name, is_media_name
from streamvid.sharder.source.media import Media, is_remote, split_url
from streamvid.sharder.source.place import BucketFolder, LocalFolder, ObjectStates, Place
from streamvid.sharder.source.sealed_source import is_manifest, read_dataset
from streamvid.sharder.source.tar_source import read_tars
from streamvid.sharder.source_options import SourceLayout
from streamvid.storage import LocalStore, StorageOptions, open_store

PROMPT_LISTS = ("prompt.txt", "prompts.txt", "caption.txt", "captions.txt")
VIDEO_LISTS = ("videos.txt", "video.txt", "images.txt")
_OTHER_NAMES = ("videos2caption.json", "captions.json")
_VIDEOS_OF = {"videos2caption.json": "videos"}
_FILE_NAME = "file_name"


@dataclass(frozen=True)
class SourceInput:
    """Rows and media files of one source.

    place: location of the media files.
    table: metadata rows; None for media files without metadata.
    video_column, caption_column: column names if the layout defines them; otherwise None.
    metadata: names of the files that contain the rows.
    unread_metadata: names of other metadata files in the source's folder.
    layout: name of the layout.
    is_folder: True if the source is a folder that also contains the files.
    """

    place: Place
    table: MetadataTable | None = None
    video_column: str | None = None
    caption_column: str | None = None
    metadata: tuple[str, ...] = ()
    unread_metadata: tuple[str, ...] = ()
    layout: str = ""
    is_folder: bool = False


@dataclass(frozen=True)
class _Source:
    """Source to read. file: name of the file in `place` if the source is a single file; otherwise None."""

    place: Place
    options: ShardOptions
    embedded: EmbeddedFiles
    file: str | None = None

    @cached_property
    def paths(self) -> list[str]:
        return self.place.paths() if self.file is None else [self.file]

    @property
    def shown(self) -> str:
        return self.place.url if self.file is None else f"{self.place.url}/{self.file}"

    def media(self, path: str) -> Media:
        try:
            return self.place.media(path)
        except Rejected as error:
            raise SourceError(f"the file {self.place.url}/{path} {error}") from None

    def table(self, names: Sequence[str]) -> MetadataTable:
        """Return a table with the rows of these metadata files, in the order of the files."""
        blocks = (block for name in names for block in self.blocks(name))
        return MetadataTable(blocks, f"metadata {self.place.url}/{names[0]}")

    def blocks(self, name: str) -> Iterator[RowBlock]:
        return self.embedded.extract(name, read_file(f"{self.place.url}/{name}", self.options.storage))

    def first(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if self.place.is_file(name)), None)


@dataclass(frozen=True)
class _Layout:
    """Source layout: how to recognize and read one kind of source.

    recognise: function that returns a true value if a source has the layout.
    read: function that reads such a source.
    is_certain: True if no other layout is tried after this layout has recognized a source.
    takes_base_path: True if paths in rows may be relative to a folder other than the source.
    takes_file: True if the source may be a single file.
    """

    recognise: Callable[[_Source], object]
    read: Callable[[_Source], SourceInput]
    is_certain: bool = False
    takes_base_path: bool = False
    takes_file: bool = False


def find_input(source: str | Path, options: ShardOptions, embedded: EmbeddedFiles) -> SourceInput:
    """Read the rows of a source, and find its files.

    Raises SourceError or StorageError if reading fails, and ConfigError if a sealed dataset is read without buckets.
    """
    found = _open_source(source, options, embedded)
    name = options.source.layout or _detect(found)
    layout = _LAYOUTS[name]
    if found.file is not None and not layout.takes_file:
        raise SourceError(
            f"source {found.shown} is a file, but source.layout={name!r} (--layout) requires a folder; pass a folder, "
            "or omit --layout"
        )
    read = layout.read(found)
    unread = _unread_metadata(found, read) if name not in ("tars", "dataset") else ()
    read = replace(read, layout=name, unread_metadata=unread, is_folder=found.file is None)
    if options.source.base_path is None:
        return _with_embedded(replace(read, place=_within_buckets(read.place, found, options)), embedded)
    if not layout.takes_base_path:
        allowed = ", ".join(name for name, layout in _LAYOUTS.items() if layout.takes_base_path)
        raise SourceError(
            f"source.base_path={str(options.source.base_path)!r} (--base-path) cannot be combined with layout {name}, "
            "because such a source contains its own files; omit --base-path, or choose a layout that accepts it: "
            f"{allowed}"
        )
    place = _open_base(options.source.base_path, options.storage)
    place = _within_buckets(place, found, options)
    return _with_embedded(replace(read, place=place, is_folder=False), embedded)


def _with_embedded(read: SourceInput, embedded: EmbeddedFiles) -> SourceInput:
    if not embedded.where:
        return read
    column = embedded.video_column or read.video_column
    return replace(read, place=embedded.place(read.place), video_column=column, is_folder=False)


def _within_buckets(place: Place, source: _Source, options: ShardOptions) -> Place:
    """Restrict paths in remote metadata to the buckets of the input, unless `source.other_buckets` is set."""
    metadata = options.source.metadata
    tells = source.place.url if metadata is None else open_store(metadata, options.storage).url
    if options.source.other_buckets or not is_remote(tells) or not isinstance(place, LocalFolder | BucketFolder):
        return place
    buckets = frozenset(split_url(url)[0] for url in (tells, source.place.url, place.url) if is_remote(url))
    return replace(place, objects=replace(place.objects, buckets=buckets))


def _detect(source: _Source) -> str:
    if source.file is not None:
        return "tars" if source.file.lower().endswith(".tar") else "metadata"
    there = []
    for name, layout in _LAYOUTS.items():
        if layout.recognise(source):
            if layout.is_certain:
                return name
            there.append(name)
    if len(there) > 1:
        raise SourceError(
            f"source {source.place.url} matches several layouts ({', '.join(there)}), each of which would ignore some "
            "files; choose one with --layout (source.layout)"
        )
    return there[0] if there else "folder"


# -------------------------------------------------------------------------------------------------- opening a source


def _open_source(source: str | Path, options: ShardOptions, embedded: EmbeddedFiles) -> _Source:
    storage = options.storage
    store = open_store(source, storage)
    if not isinstance(store, LocalStore):
        return _open_prefix(store.url, options, embedded)
    root = Path(os.path.abspath(store.root))  # noqa: PTH100 — resolve() would replace links with their targets
    if root.is_file():
        if is_media_name(root.name) or is_audio_name(root.name):
            raise SourceError(f"source {root} is a single media file; pass its folder, {root.parent}")
        return _one_file(LocalFolder(root.parent, ObjectStates(storage)), root.name, options, embedded)
    if not root.is_dir():
        raise SourceError(f"source {root} does not exist, or is neither a folder nor a file; check the path")
    return _Source(LocalFolder(root, ObjectStates(storage)), options, embedded)


def _open_prefix(url: str, options: ShardOptions, embedded: EmbeddedFiles) -> _Source:
    storage = options.storage
    if url.startswith("memory:"):
        raise SourceError(f"source {url}: workers cannot access this process's memory; use a folder or an object store")
    parent, name = posixpath.split(url)
    if is_metadata_name(name) or name.lower().endswith(".tar"):
        return _one_file(BucketFolder.listed(open_store(parent, storage), storage), name, options, embedded)
    place = BucketFolder.listed(open_store(url, storage), storage)
    if place.files:
        return _Source(place, options, embedded)
    if "/" in url.removeprefix("s3://") and open_store(parent, storage).state(name) is not None:
        raise SourceError(
            f"source {url} is a single object, but is neither a metadata file ({', '.join(METADATA_SUFFIXES)}) nor a "
            f".tar file; pass its folder, {parent}"
        )
    raise SourceError(f"source {url} contains no objects; check the URL")


def _one_file(place: Place, name: str, options: ShardOptions, embedded: EmbeddedFiles) -> _Source:
    if options.source.metadata is not None:
        raise SourceError(
            f"source {place.url}/{name} is a file, so it cannot be combined with "
            f"source.metadata={str(options.source.metadata)!r} (--metadata); pass the folder that contains the media "
            "as the source, or omit --metadata"
        )
    return _Source(place, options, embedded, name)


def _open_base(folder: str | Path, storage: StorageOptions) -> Place:
    store = open_store(folder, storage)
    if not isinstance(store, LocalStore):
        return BucketFolder.listed(store, storage)
    root = Path(os.path.abspath(store.root))  # noqa: PTH100
    if not root.is_dir():
        raise SourceError(f"{str(folder)!r} is not an existing folder; check source.base_path (--base-path)")
    return LocalFolder(root, ObjectStates(storage))


# ----------------------------------------------------------------------------------------------------- metadata files


def _is_folder(source: _Source) -> bool:
    return any(map(is_audio_name if source.options.clips.is_audio else is_media_name, source.paths))


def _unread_metadata(source: _Source, read: SourceInput) -> tuple[str, ...]:
    """Return the names of the metadata files that are directly in the source's folder and were not read.

    Files that are named after a media file, such as clip.json next to clip.mp4, are omitted, because they describe only
    that media file.
    """
    if source.file is not None:
        return ()
    asked = source.options.source.metadata
    own = {*read.metadata, *(() if asked is None else (os.path.relpath(asked, source.place.url),))}
    there = source.place.files_in({""})
    stems = {posixpath.splitext(path)[0] for path in there if is_media_name(path)}
    return tuple(
        path
        for path in there
        if is_metadata_name(path) and path not in own and posixpath.splitext(path)[0] not in stems
    )


def _read_metadata(source: _Source) -> SourceInput:
    place, options = source.place, source.options
    if options.source.metadata is not None:
        name, blocks = str(options.source.metadata), read_file(options.source.metadata, options.storage)
        table = MetadataTable(source.embedded.extract(posixpath.basename(name), blocks), f"metadata {name}")
        return SourceInput(place, table, metadata=(str(options.source.metadata),))
    names = _root_metadata(place) if source.file is None else [source.file]
    if not names:
        usual = ", ".join((*(f"metadata{suffix}" for suffix in METADATA_SUFFIXES), *_OTHER_NAMES))
        raise SourceError(
            f"source {place.url} contains no metadata file with one of the usual names ({usual}); specify the file "
            "with --metadata"
        )
    if len(names) > 1:
        listed = ", ".join(names)
        raise SourceError(f"source {place.url} contains several metadata files; choose one with --metadata: {listed}")
    videos = _VIDEOS_OF.get(names[0])
    if videos is not None and place.is_folder(videos):  # In FastVideo's layout, paths are relative to this folder.
        place = _open_base(f"{place.url}/{videos}", options.storage)
    return SourceInput(place, source.table(names[:1]), metadata=(names[0],))


def _root_metadata(place: Place) -> list[str]:
    usual = [name for suffix in METADATA_SUFFIXES if place.is_file(name := f"metadata{suffix}")]
    return usual or [name for name in _OTHER_NAMES if place.is_file(name)]


# -------------------------------------------------------------------- two lists: one of captions and one of file names


def _is_lists(source: _Source) -> bool:
    return source.first(PROMPT_LISTS) is not None and source.first(VIDEO_LISTS) is not None


def _read_lists(source: _Source) -> SourceInput:
    prompts, videos = source.first(PROMPT_LISTS), source.first(VIDEO_LISTS)
    if prompts is None or videos is None:
        raise SourceError(
            f"source {source.place.url}: layout 'lists' requires a list of captions ({', '.join(PROMPT_LISTS)}) and "
            f"a list of files ({', '.join(VIDEO_LISTS)}); add the missing list, or choose another layout with --layout"
        )
    captions, files = _lines(source.media(prompts)), _lines(source.media(videos))
    while files and not files[-1].strip():
        files.pop()
    while len(captions) > len(files) and not captions[-1].strip():
        captions.pop()
    if len(captions) != len(files):
        raise SourceError(
            f"source {source.place.url}: {prompts} has {len(captions)} lines, but {videos} has {len(files)}; both must "
            "have one line per sample"
        )
    rows: Iterable[Mapping[str, object]] = (
        {"path": file.strip() or None, "caption": caption.strip() or None}
        for file, caption in zip(files, captions, strict=True)
    )
    table = MetadataTable(blocks_of(rows), f"metadata {source.place.url}/{prompts}", ("path", "caption"))
    return SourceInput(source.place, table, "path", "caption", (prompts, videos))


def _lines(media: Media) -> list[str]:
    text = media.read().decode("utf-8-sig", "surrogateescape").replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n") if text else []


# ------------------------------------------- imagefolder: a metadata file per folder, with paths relative to the folder


def _read_imagefolder(source: _Source) -> SourceInput:
    names = (*_root_metadata(source.place), *_nested_metadata(source))
    if not names:
        raise SourceError(
            f"source {source.place.url} contains no metadata.csv, metadata.jsonl or metadata.parquet; "
            "add one, or choose another layout with --layout"
        )
    blocks = (block for name in names for block in _imagefolder_blocks(source, name))
    table = MetadataTable(blocks, f"metadata {source.place.url}/{names[0]}")
    return SourceInput(source.place, table, _FILE_NAME, metadata=names)


def _imagefolder_blocks(source: _Source, name: str) -> Iterator[RowBlock]:
    has_names = False
    for block in source.blocks(name):
        has_names |= _FILE_NAME in block.columns
        yield _below(block, posixpath.dirname(name))
    if not has_names:
        raise SourceError(
            f"metadata {source.place.url}/{name} has no {_FILE_NAME!r} column; add this column with the names of the "
            "files, or use --layout folder to read the files without metadata"
        )


def _nested_metadata(source: _Source) -> list[str]:
    names = {"metadata.csv", "metadata.jsonl", "metadata.parquet"}
    return [path for path in source.paths if "/" in path and posixpath.basename(path) in names]


def _below(block: RowBlock, folder: str) -> RowBlock:
    def joined() -> Iterator[object]:
        for value in block.column(_FILE_NAME).values():
            yield posixpath.join(folder, value) if isinstance(value, str) and not is_remote(value) else value

    return replace(block, columns={**block.columns, _FILE_NAME: value_column(list(joined()))})


# --------------------------------------------------------------------------- parquet files, tars, sealed datasets


def _is_parquet(source: _Source) -> bool:
    # Parquet files next to tars describe the tars.
    return bool(_outside_datasets(source, ".parquet")) and not _tars(source)


def _read_parquet(source: _Source) -> SourceInput:
    names = _outside_datasets(source, ".parquet")
    if not names:
        raise SourceError(
            f"source {source.place.url} contains no .parquet file outside streamvid datasets; choose another layout "
            "with --layout"
        )
    return SourceInput(source.place, source.table(names), metadata=tuple(names))


def _tars(source: _Source) -> list[str]:
    return _outside_datasets(source, ".tar")


def _read_tars(source: _Source) -> SourceInput:
    names = _tars(source)
    if not names:
        raise SourceError(
            f"source {source.shown} contains no .tar file outside streamvid datasets; choose another layout with "
            "--layout"
        )
    wanted = {source.options.source.video_column or "", *source.options.source.media.values()}
    return SourceInput(*read_tars(source.place, names, wanted), metadata=tuple(names))


def _is_dataset(source: _Source) -> bool:
    if source.options.source.metadata is not None:
        return False
    return source.place.is_file("manifest.json") and is_manifest(source.media("manifest.json"))


def _read_dataset(source: _Source) -> SourceInput:
    if source.options.buckets is None and source.options.clips.kind != "text":
        raise ConfigError(
            f"source {source.place.url} is a sealed dataset. To assign its clips to new buckets, set the buckets with "
            "--buckets, --resolution or --preset; to copy the dataset unchanged, use `streamvid copy`"
        )
    return SourceInput(*read_dataset(source.place, source.options.storage))


def _outside_datasets(source: _Source, suffix: str) -> list[str]:
    """Return the paths with this suffix that are not inside finished or unfinished streamvid datasets."""
    names = [path for path in source.paths if path.lower().endswith(suffix)]
    known: dict[str, bool] = {}

    def is_dataset(folder: str) -> bool:
        if folder not in known:
            manifest = posixpath.join(folder, "manifest.json")
            known[folder] = source.place.is_folder(posixpath.join(folder, ".staging")) or (
                source.place.is_file(manifest) and is_manifest(source.media(manifest))
            )
        return known[folder]

    return [name for name in names if not any(is_dataset(folder) for folder in _dataset_folders(name))]


def _dataset_folders(name: str) -> list[str]:
    """Return the folders that could be the root of a dataset that contains the file `name`."""
    parts = name.split("/")
    return ["/".join(parts[:at]) for at, part in enumerate(parts) if part in ("shards", "index")]


# Layouts are tried in this order.
_LAYOUTS: dict[str, _Layout] = {
    "dataset": _Layout(_is_dataset, _read_dataset, is_certain=True),
    "metadata": _Layout(
        lambda source: source.options.source.metadata is not None or _root_metadata(source.place),
        _read_metadata,
        is_certain=True,
        takes_base_path=True,
        takes_file=True,
    ),
    "lists": _Layout(_is_lists, _read_lists, is_certain=True, takes_base_path=True),
    "imagefolder": _Layout(_nested_metadata, _read_imagefolder, is_certain=True, takes_base_path=True),
    "folder": _Layout(_is_folder, lambda source: SourceInput(source.place)),
    "tars": _Layout(_tars, _read_tars, takes_file=True),
    "parquet": _Layout(_is_parquet, _read_parquet, takes_base_path=True),
}
assert set(_LAYOUTS) == set(get_args(SourceLayout))
