"""Locations of input files (folders, prefixes of object stores, tars), and the states of these files."""

from __future__ import annotations

import posixpath
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from streamvid.credentials import hide_credentials
from streamvid.dataset.tabular.columns import MAX_TEXT_BYTES
from streamvid.errors import Rejected
from streamvid.sharder.source.folder import check_path, file_paths, folder_files, is_object, locate, relative_source
from streamvid.sharder.source.media import MISSING, Media, file_state, is_remote, object_state, split_url
from streamvid.storage import FileState, StorageOptions, Store

# Up to four bytes more than allowed are read, so that a longer text exceeds the limit even if its last character is
# incomplete and is dropped.
MAX_CAPTION_BYTES = MAX_TEXT_BYTES + 4
_CONCURRENT_READS = 32
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class CaptionFile:
    """Caption file (.txt) next to the media file `path`. The caption file might not exist."""

    path: str


@dataclass(frozen=True, slots=True)
class SealedOrigin:
    """Facts that a clip from a sealed dataset keeps in a new dataset.

    name: old key of the clip, from which its new key is derived.
    record_key: key shared by all clips of one file.
    is_val: True if the clip is in the validation split.
    """

    name: str
    record_key: str
    is_val: bool


class Place:
    """Location of input files.

    Methods raise Rejected if a row is invalid, and other errors if the location is invalid.
    """

    @property
    def url(self) -> str:
        raise NotImplementedError

    def paths(self) -> list[str]:
        """Return the relative paths of all files except hidden files, sorted by path components."""
        raise NotImplementedError

    def files_in(self, folders: Collection[str]) -> list[str]:
        """Return the sorted relative paths of the files directly in these folders, except hidden files."""
        return sorted(path for path in self.paths() if posixpath.dirname(path) in folders)

    def is_file(self, path: str) -> bool:
        """Return True if a file exists. Hidden files are included."""
        raise NotImplementedError

    def locate(self, value: object) -> tuple[str, str]:
        """Return (source name, path or URL) of the file to which a value in a row refers."""
        raise NotImplementedError

    def locate_typed(self, value: object) -> tuple[str, str]:
        """Call `locate`, but raise Rejected if the value contains credentials.

        A value that is the name of an existing file is accepted.
        """
        path = check_path(value)
        if hide_credentials(path) != path and not self.is_file(path):
            raise Rejected(
                "the path contains credentials; use a URL such as s3://bucket/clip.mp4, without credentials",
                kind="bad-path",
            )
        return self.locate(path)

    def state(self, path: str) -> tuple[int, str]:
        """Return (size in bytes, version) of a file that `locate` found."""
        raise NotImplementedError

    @property
    def storage(self) -> StorageOptions:
        """Storage options that workers use to access the files."""
        return StorageOptions()

    def media(self, path: str) -> Media:
        """Return a Media that reads the file. Raises Rejected if `path` is not a file."""
        source, found = self.locate(path)
        return Media(found, source, *self.state(found), self.storage)

    def is_folder(self, path: str) -> bool:
        """Return True if a folder exists. Hidden folders are included."""
        return False

    def look_up(self, values: Sequence[object]) -> None:
        """Concurrently request the states of all objects to which the values refer, and cache them for later calls."""

    def look_up_captions(self, paths: Sequence[str]) -> None:
        """Concurrently read the caption files of all media files that are in an object store."""

    def caption(self, file: CaptionFile) -> str | None:
        """Return the trimmed text of a caption file, or None if the file is missing or blank."""
        return None

    def origin(self, path: str) -> SealedOrigin | None:
        """Return the origin of a file that `locate` found, or None if the file is not from a sealed dataset."""
        return None


@dataclass(frozen=True)
class ObjectStates:
    """Cache of object states, keyed by URL. States are requested when needed; the state of a missing object is None.

    buckets: URLs of the buckets that rows may use; None allows all buckets.
    """

    storage: StorageOptions
    states: dict[str, FileState | None] = field(default_factory=dict)
    buckets: frozenset[str] | None = None

    def is_allowed(self, url: str) -> bool:
        return self.buckets is None or split_url(url)[0] in self.buckets

    def look_up(self, urls: Iterable[str]) -> None:
        wanted = [url for url in dict.fromkeys(urls) if url not in self.states and self.is_allowed(url)]
        self.states.update(concurrently(self._ask, wanted))

    def state(self, url: str) -> tuple[int, str]:
        if not self.is_allowed(url):
            raise Rejected(
                f"the metadata is in a bucket, but refers to a file in another bucket, {split_url(url)[0]}, which "
                "would be read with your credentials; if you trust the metadata, set source.other_buckets "
                "(--other-buckets)",
                kind="bad-path",
            )
        self.look_up([url])
        state = self.states[url]
        if state is None:
            raise Rejected(MISSING, kind="missing-file")
        return state.num_bytes, state.version

    def _ask(self, url: str) -> FileState | None:
        return object_state(url, self.storage)


@dataclass(frozen=True)
class LocalFolder(Place):
    """Folder on this machine. Rows may also refer to objects in object stores."""

    root: Path
    objects: ObjectStates

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def storage(self) -> StorageOptions:
        return self.objects.storage

    def paths(self) -> list[str]:
        return file_paths(self.root)

    def files_in(self, folders: Collection[str]) -> list[str]:
        return sorted(path for folder in folders for path in folder_files(self.root, folder))

    def is_file(self, path: str) -> bool:
        return (self.root / path).is_file()

    def is_folder(self, path: str) -> bool:
        return (self.root / path).is_dir()

    def look_up(self, values: Sequence[object]) -> None:
        self.objects.look_up(_object_urls(values, self.locate))

    def locate(self, value: object) -> tuple[str, str]:
        return locate(value, self.root)

    def caption(self, file: CaptionFile) -> str | None:
        path = (self.root / file.path).with_suffix(".txt")
        try:
            if not path.is_file():
                return None
            with path.open("rb") as opened:
                return caption_text(opened.read(MAX_CAPTION_BYTES))
        except OSError as error:
            raise Rejected(f"the caption file cannot be read: {error.strerror or error}", kind="bad-row") from error

    def state(self, path: str) -> tuple[int, str]:
        if is_remote(path):
            return self.objects.state(path)
        return file_state(path)


@dataclass(frozen=True)
class BucketFolder(Place):
    """Objects below a prefix in an object store. They are listed only once."""

    store: Store
    objects: ObjectStates
    files: dict[str, FileState]
    captions: dict[str, str | None] = field(default_factory=dict)

    @staticmethod
    def listed(store: Store, storage: StorageOptions) -> BucketFolder:
        files = {state.path: state for state in store.files()}
        states: dict[str, FileState | None] = {f"{store.url}/{path}": state for path, state in files.items()}
        return BucketFolder(store, ObjectStates(storage, states), files)

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def storage(self) -> StorageOptions:
        return self.objects.storage

    def paths(self) -> list[str]:
        found = sorted(path.split("/") for path in self.files)
        return ["/".join(parts) for parts in found if not any(part.startswith(".") for part in parts)]

    def is_file(self, path: str) -> bool:
        return path in self.files

    def is_folder(self, path: str) -> bool:
        return any(name.startswith(f"{path}/") for name in self.files)

    def look_up(self, values: Sequence[object]) -> None:
        urls = _object_urls(values, self.locate)
        self.objects.look_up(url for url in urls if not url.startswith(f"{self.url}/"))

    def look_up_captions(self, paths: Sequence[str]) -> None:
        wanted = {_caption_path(path) for path in paths} & self.files.keys()
        self.captions.update(concurrently(self._read_caption, sorted(wanted)))

    def locate(self, value: object) -> tuple[str, str]:
        path = check_path(value)
        if is_object(path):
            inside = f"{self.url}/"
            if not path.startswith(inside):
                return path, path
            path = path.removeprefix(inside)
        elif is_remote(path) or path.startswith(("/", "file:")):
            raise Rejected(
                "the path is neither relative to the source nor an s3:// URL; upload the file, or fix the path",
                kind="bad-path",
            )
        source = relative_source(path)
        return source, f"{self.url}/{source}"

    def caption(self, file: CaptionFile) -> str | None:
        return self.captions.get(_caption_path(file.path))

    def state(self, path: str) -> tuple[int, str]:
        if path.startswith(f"{self.url}/") and path not in self.objects.states:
            raise Rejected(MISSING, kind="missing-file")  # all existing objects are in the listing
        return self.objects.state(path)

    def _read_caption(self, path: str) -> str | None:
        state = self.files[path]
        data = bytearray(min(state.num_bytes, MAX_CAPTION_BYTES))
        self.store.read_ranges(path, [(0, memoryview(data))], state.version)
        return caption_text(bytes(data))


@dataclass(frozen=True)
class MemberFolder(Place):
    """Place whose files are parts of other files, such as members of tars.

    where: maps each name used in the rows to (source name, part path).
    states: maps each part path to (size in bytes, version).
    origins: maps each part path to its SealedOrigin.
    base: place of all other files; None if there are no other files.
    """

    root_url: str
    where: Mapping[str, tuple[str, str]]
    states: Mapping[str, tuple[int, str]]
    origins: Mapping[str, SealedOrigin] = field(default_factory=dict)
    base: Place | None = None

    @property
    def url(self) -> str:
        return self.root_url

    @property
    def storage(self) -> StorageOptions:
        return StorageOptions() if self.base is None else self.base.storage

    def look_up(self, values: Sequence[object]) -> None:
        if self.base is not None:
            self.base.look_up([value for value in values if value not in self.where])

    def paths(self) -> list[str]:
        return list(self.where)

    def is_file(self, path: str) -> bool:
        return path in self.where

    def locate(self, value: object) -> tuple[str, str]:
        path = check_path(value)
        if path not in self.where and self.base is not None:
            return self.base.locate(path)
        if path not in self.where:
            raise Rejected(
                "the path does not refer to a tar member in the source; write it as TAR/MEMBER, such as "
                "clips.tar/clip.mp4",
                kind="missing-file",
            )
        return self.where[path]

    def state(self, path: str) -> tuple[int, str]:
        return self.base.state(path) if self.base is not None and path not in self.states else self.states[path]

    def origin(self, path: str) -> SealedOrigin | None:
        return self.origins.get(path)


def _object_urls(values: Sequence[object], locate: Callable[[object], tuple[str, str]]) -> list[str]:
    """Return the URLs of the objects to which values in rows refer."""
    found = []
    for value in values:
        try:
            path = locate(value)[1]
        except Rejected:
            continue
        if is_remote(path):
            found.append(path)
    return found


def _caption_path(path: str) -> str:
    return posixpath.splitext(path)[0] + ".txt"


def caption_text(data: bytes) -> str | None:
    """Return the trimmed text of a caption file, or None if it is blank.

    data: first MAX_CAPTION_BYTES bytes of the file.
    """
    is_whole = len(data) < MAX_CAPTION_BYTES  # if it is not whole, the last character may be incomplete
    decoder = getincrementaldecoder("utf-8-sig")("surrogateescape")
    return decoder.decode(data, final=is_whole).strip() or None


def concurrently(ask: Callable[[_Item], _Found], items: Sequence[_Item]) -> list[tuple[_Item, _Found]]:
    """Call `ask` for all items concurrently; return (item, result) pairs in order."""
    if not items:
        return []
    with ThreadPoolExecutor(_CONCURRENT_READS) as threads:
        return list(zip(items, threads.map(ask, items), strict=True))
