"""How a source is laid out: each layout ends as a place where files lie, and rows that name them.

`find_input` tells layouts apart by what is there; the user's `layout` says it. Tars and sealed datasets have files of
their own; the rest are here.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import get_args

from streamvid.errors import Rejected, SourceError
from streamvid.sharder.options import Layout, ShardOptions
from streamvid.sharder.source.folder import is_media_name
from streamvid.sharder.source.media import Media, is_remote
from streamvid.sharder.source.metadata import READERS, Cell, Metadata, Row, is_metadata_name, read_metadata
from streamvid.sharder.source.place import BucketFolder, Folder, Objects, Place
from streamvid.sharder.source.sealed_source import is_manifest, read_dataset
from streamvid.sharder.source.tar_source import read_tars
from streamvid.storage import LocalStore, StorageOptions, open_store

PROMPT_LISTS = ("prompt.txt", "prompts.txt", "caption.txt", "captions.txt")
VIDEO_LISTS = ("videos.txt", "video.txt", "images.txt")
_NAMED_OTHERWISE = ("videos2caption.json", "captions.json")
_VIDEOS_OF = {"videos2caption.json": "videos"}
_FILE_NAME = "file_name"


@dataclass(frozen=True)
class Input:
    """One source: where its files lie, and its rows; None: the files themselves, captions beside them."""

    place: Place
    metadata: Metadata | None


@dataclass(frozen=True)
class _Found:
    """What a layout is read from. file: of the place, where the source is one file."""

    place: Place
    options: ShardOptions
    file: str | None
    paths: Callable[[], list[str]]


def find_input(source: str | Path, options: ShardOptions) -> Input:
    """A source as its rows. Raises SourceError, StorageError where a store fails."""
    storage = options.storage
    store = open_store(source, storage)
    if isinstance(store, LocalStore):
        # resolve() would follow links, and rename what lies behind them.
        found = _find_folder(Path(os.path.abspath(store.root)), options)  # noqa: PTH100
    else:
        found = _find_prefix(store.url, storage, options)
    layout = options.source.layout or _detect(found)
    if found.file is not None and layout not in ("metadata", "tars"):
        raise SourceError(f"source {_shown(found)} is one file, and layout={layout!r} is of folders; give the folder")
    read = _READ[layout](found)
    if options.source.base_path is None:
        return read
    if layout not in _WITH_BASE:
        raise SourceError(
            f"base_path={str(options.source.base_path)!r} cannot be combined with a source of layout {layout}, which "
            f"contains its files; leave it out, or give another layout: {', '.join(_WITH_BASE)} take one"
        )
    return replace(read, place=_place(options.source.base_path, storage))


_WITH_BASE = ("metadata", "lists", "parquet", "imagefolder")


def _place(folder: str | Path, storage: StorageOptions) -> Place:
    store = open_store(folder, storage)
    if not isinstance(store, LocalStore):
        return BucketFolder.listed(store, storage)
    root = Path(os.path.abspath(store.root))  # noqa: PTH100
    if not root.is_dir():
        raise SourceError(f"base_path={str(folder)!r} is no folder")
    return Folder(root, Objects(storage))


def _find_folder(root: Path, options: ShardOptions) -> _Found:
    if root.is_file():
        folder = Folder(root.parent, Objects(options.storage))
        return _one_file(folder, root.name, options)
    if not root.is_dir():
        raise SourceError(f"source {root} is neither a folder nor a metadata file")
    return _of_folder(Folder(root, Objects(options.storage)), options)


def _find_prefix(url: str, storage: StorageOptions, options: ShardOptions) -> _Found:
    if url.startswith("memory:"):
        raise SourceError(f"source {url} is in this process alone, and workers are others; give another place")
    parent, name = posixpath.split(url)
    if is_metadata_name(name) or name.lower().endswith(".tar"):
        return _one_file(BucketFolder.listed(open_store(parent, storage), storage), name, options)
    place = BucketFolder.listed(open_store(url, storage), storage)
    if not place.files:
        if "/" in url.removeprefix("s3://") and open_store(parent, storage).state(name) is not None:
            raise SourceError(
                f"source {url} is one file, and no metadata file ({', '.join(READERS)}) and no tar; "
                f"give its folder, {parent}"
            )
        raise SourceError(f"source {url} is neither a folder nor a metadata file: no object lies below it")
    return _of_folder(place, options)


def _one_file(place: Place, name: str, options: ShardOptions) -> _Found:
    if options.source.metadata is not None:
        raise SourceError(
            f"source {place.url}/{name} is a file, and metadata={str(options.source.metadata)!r} is given too; give "
            "the folder"
        )
    return _Found(place, options, name, lambda: [name])


def _of_folder(place: Place, options: ShardOptions) -> _Found:
    known: list[str] = []

    def paths() -> list[str]:
        if not known:
            known.extend(place.paths())
        return known

    return _Found(place, options, None, paths)


def _detect(found: _Found) -> str:
    place, options = found.place, found.options
    if found.file is not None:
        return "tars" if found.file.lower().endswith(".tar") else "metadata"
    if options.source.metadata is not None:
        return "metadata"
    if place.is_file("manifest.json") and is_manifest(_media(place, "manifest.json")):
        return "dataset"
    if _root_metadata(place):
        return "metadata"
    if _first(place, PROMPT_LISTS) and _first(place, VIDEO_LISTS):
        return "lists"
    if _nested_metadata(found):
        return "imagefolder"
    kinds = {
        "folder": any(is_media_name(path) for path in found.paths()),
        "tars": bool(_tars(found)),
        "parquet": bool(_parquets(found)) and not _tars(found),  # beside tars they are the tars'
    }
    there = [name for name, is_there in kinds.items() if is_there]
    if len(there) > 1:
        raise SourceError(
            f"source {place.url} can be read in several ways, of which each would leave something out: "
            f"{', '.join(there)}; say which with --layout"
        )
    return there[0] if there else "folder"


def _read_metadata(found: _Found) -> Input:
    place, options = found.place, found.options
    name = found.file
    if options.source.metadata is not None:
        return Input(place, read_metadata(options.source.metadata, options.storage))
    if name is None:
        names = _root_metadata(place)
        if not names:
            raise SourceError(f"source {place.url} holds no metadata file; name it with --metadata")
        if len(names) > 1:
            raise SourceError(f"source {place.url} holds {' and '.join(names)}; say which with --metadata")
        name = names[0]
    metadata = _table(found, name)
    videos = _VIDEOS_OF.get(name)
    if videos is not None and place.is_folder(videos):
        # FastVideo: paths are of the folder beside.
        return Input(_place(f"{place.url}/{videos}", options.storage), metadata)
    return Input(place, metadata)


def _read_folder(found: _Found) -> Input:
    return Input(found.place, None)


def _read_lists(found: _Found) -> Input:
    """Two text files, line by line: captions, and the files that they are of."""
    prompts, videos = _first(found.place, PROMPT_LISTS), _first(found.place, VIDEO_LISTS)
    if not prompts or not videos:
        raise SourceError(
            f"source {found.place.url}: layout 'lists' needs a list of captions ({', '.join(PROMPT_LISTS)}) and one "
            f"of files ({', '.join(VIDEO_LISTS)})"
        )
    captions, files = _lines(found.place, prompts), _lines(found.place, videos)
    while files and not files[-1].strip():
        files.pop()
    while len(captions) > len(files) and not captions[-1].strip():
        captions.pop()
    if len(captions) != len(files):
        raise SourceError(
            f"source {found.place.url}: {prompts} has {len(captions)} lines and {videos} has {len(files)}; line by "
            "line they belong together, so that no caption can be told to be that of any file: mend the one that is "
            "wrong"
        )
    rows: list[Row] = [
        {"path": file.strip() or None, "caption": caption.strip() or None}
        for file, caption in zip(files, captions, strict=True)
    ]
    return Input(found.place, Metadata(rows, ["path", "caption"], "path", "caption"))


def _lines(place: Place, name: str) -> list[str]:
    data = _media(place, name).read()
    text = data.decode("utf-8-sig", "surrogateescape").replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n") if text else []


def _read_imagefolder(found: _Found) -> Input:
    """A metadata file for each folder, whose column file_name is relative to that folder."""
    names = [*_root_metadata(found.place), *_nested_metadata(found)]
    parts = []
    for name in names:
        part = _table(found, name)
        if _FILE_NAME not in part.names:
            raise SourceError(
                f"metadata {found.place.url}/{name} has no column {_FILE_NAME}, by which the files of its folder are "
                "named; add it, or read the files alone with --layout folder"
            )
        parts.append(_below(part, posixpath.dirname(name)))
    if not parts:
        raise SourceError(f"source {found.place.url} holds no metadata.csv, .jsonl or .parquet in any folder")
    return Input(found.place, _joined(parts, video_column=_FILE_NAME))


def _below(metadata: Metadata, folder: str) -> Metadata:
    for row in metadata.rows:
        if isinstance(row, dict):
            value = row.get(_FILE_NAME)
            text = value.text if isinstance(value, Cell) else value
            if isinstance(text, str) and text and not is_remote(text):
                row[_FILE_NAME] = posixpath.join(folder, text)
    return metadata


def _read_parquet(found: _Found) -> Input:
    """Parquet files as one table, in the order of their names."""
    names = _parquets(found)
    if not names:
        raise SourceError(f"source {found.place.url} holds no .parquet file")
    return Input(found.place, _joined([_table(found, name) for name in names]))


def _read_tars(found: _Found) -> Input:
    names = _tars(found)
    if not names:
        raise SourceError(f"source {_shown(found)} holds no .tar file")
    return Input(*read_tars(found.place, names, _wanted(found.options)))


def _read_dataset(found: _Found) -> Input:
    return Input(*read_dataset(found.place, found.options.storage))


def _wanted(options: ShardOptions) -> frozenset[str]:
    return frozenset({options.source.video_column or "", *options.source.media.values()})


_READ: dict[str, Callable[[_Found], Input]] = {
    "metadata": _read_metadata,
    "folder": _read_folder,
    "lists": _read_lists,
    "imagefolder": _read_imagefolder,
    "parquet": _read_parquet,
    "tars": _read_tars,
    "dataset": _read_dataset,
}
assert tuple(_READ) == get_args(Layout)


def _joined(parts: Sequence[Metadata], video_column: str | None = None) -> Metadata:
    names = list(dict.fromkeys(chain.from_iterable(part.names for part in parts)))
    rows: list[Row] = []
    for part in parts:
        rows += part.rows
        part.rows.clear()
    return Metadata(rows, names, video_column)


def _root_metadata(place: Place) -> list[str]:
    usual = [name for suffix in READERS if place.is_file(name := f"metadata{suffix}")]
    return usual or [name for name in _NAMED_OTHERWISE if place.is_file(name)]


def _nested_metadata(found: _Found) -> list[str]:
    names = {"metadata.csv", "metadata.jsonl", "metadata.parquet"}
    return [path for path in found.paths() if "/" in path and posixpath.basename(path) in names]


def _tars(found: _Found) -> list[str]:
    return _outside_datasets(found, ".tar")


def _parquets(found: _Found) -> list[str]:
    return _outside_datasets(found, ".parquet")


def _outside_datasets(found: _Found, suffix: str) -> list[str]:
    """Files of that kind, but for those of a dataset of ours that lies below the source, finished or not."""
    names = [path for path in found.paths() if path.lower().endswith(suffix)]
    known: dict[str, bool] = {}

    def is_dataset(folder: str) -> bool:
        if folder not in known:
            manifest = posixpath.join(folder, "manifest.json")
            known[folder] = found.place.is_folder(posixpath.join(folder, ".staging")) or (
                found.place.is_file(manifest) and is_manifest(_media(found.place, manifest))
            )
        return known[folder]

    return [name for name in names if not any(is_dataset(folder) for folder in _dataset_folders(name))]


def _dataset_folders(name: str) -> list[str]:
    """Folders that would be a dataset, if `name` were one of its files."""
    parts = name.split("/")
    return ["/".join(parts[:at]) for at, part in enumerate(parts) if part in ("shards", "index")]


def _table(found: _Found, name: str) -> Metadata:
    return read_metadata(f"{found.place.url}/{name}", found.options.storage)


def _first(place: Place, names: Sequence[str]) -> str | None:
    return next((name for name in names if place.is_file(name)), None)


def _media(place: Place, path: str) -> Media:
    try:
        return place.media(path)
    except Rejected as error:
        raise SourceError(f"cannot read {place.url}/{path}: it {error}") from None


def _shown(found: _Found) -> str:
    return found.place.url if found.file is None else f"{found.place.url}/{found.file}"
