"""Where the input lies, a folder or a prefix of a bucket: which files are there, and what each is."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from streamvid.errors import Rejected, SourceError
from streamvid.sharder.columns import MAX_TEXT_BYTES
from streamvid.sharder.folder import check_path, is_media_name, is_object, locate, media_paths, relative_source
from streamvid.sharder.media import is_remote, split_url, store_of, version_of
from streamvid.sharder.metadata import READERS, Metadata, download_metadata, read_metadata
from streamvid.storage import FileState, LocalStore, StorageOptions, Store, open_store

_READS_AT_ONCE = 32
_MISSING = "cannot be read: No such file or directory"  # as a folder's, so that both give the same dataset
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A caption that may stand in a .txt beside the media file `path`."""

    path: str


class Place(Protocol):
    """A source folder. What is wrong with one row is Rejected; what is wrong with the place is an error."""

    @property
    def url(self) -> str: ...

    def media_paths(self) -> list[str]:
        """Paths relative to the place of all that is named like media, hidden names left out, sorted by parts."""
        ...

    def look_ahead(self, values: Sequence[object], *, is_folder: bool) -> None:
        """Rows that will be asked for, with their captions beside them or not: many at once is faster."""
        ...

    def locate(self, value: object) -> tuple[str, str]:
        """(source, path or URL) of what a row calls its file."""
        ...

    def caption(self, sidecar: Sidecar) -> str | None:
        """The caption beside a media file, outer white space aside; None where there is none."""
        ...

    def state(self, path: str) -> tuple[int, str]:
        """Bytes and version of what `locate` named."""
        ...


@dataclass(frozen=True)
class Objects:
    """What is known of objects anywhere, by URL; None: not there. Others are asked for one by one."""

    storage: StorageOptions
    states: dict[str, FileState | None] = field(default_factory=dict)

    def look_up(self, urls: Iterable[str]) -> None:
        wanted = [url for url in dict.fromkeys(urls) if url not in self.states]
        for url, state in _at_once(self._ask, wanted):
            self.states[url] = state

    def state(self, url: str) -> tuple[int, str]:
        self.look_up([url])
        state = self.states[url]
        if state is None:
            raise Rejected(_MISSING)
        return state.num_bytes, state.version

    def _ask(self, url: str) -> FileState | None:
        bucket_url, key = split_url(url)
        return store_of(bucket_url, self.storage).state(key)


@dataclass(frozen=True)
class Folder:
    """A folder of this machine; rows may name objects too."""

    root: Path
    objects: Objects

    @property
    def url(self) -> str:
        return str(self.root)

    def media_paths(self) -> list[str]:
        return media_paths(self.root)

    def look_ahead(self, values: Sequence[object], *, is_folder: bool) -> None:
        if not is_folder:
            self.objects.look_up(_objects(values, self.locate))

    def locate(self, value: object) -> tuple[str, str]:
        return locate(value, self.root)

    def caption(self, sidecar: Sidecar) -> str | None:
        path = (self.root / sidecar.path).with_suffix(".txt")
        try:
            if not path.is_file():
                return None
            with path.open("rb") as file:
                return _caption(file.read(MAX_TEXT_BYTES + 1))
        except OSError as error:
            raise Rejected(f"its caption file cannot be read: {error.strerror or error}") from error

    def state(self, path: str) -> tuple[int, str]:
        if is_remote(path):
            return self.objects.state(path)
        try:
            status = Path(path).stat()
        except OSError as error:
            raise Rejected(f"cannot be read: {error.strerror or error}") from error
        if not stat.S_ISREG(status.st_mode):
            raise Rejected("is a folder" if stat.S_ISDIR(status.st_mode) else "is no regular file")
        return status.st_size, version_of(status)


@dataclass(frozen=True)
class BucketFolder:
    """All objects below a prefix, listed once."""

    store: Store
    objects: Objects
    files: dict[str, FileState]
    captions: dict[str, str | None] = field(default_factory=dict)

    @staticmethod
    def listed(store: Store, storage: StorageOptions) -> BucketFolder:
        files = {state.path: state for state in store.files()}
        states: dict[str, FileState | None] = {f"{store.url}/{path}": state for path, state in files.items()}
        return BucketFolder(store, Objects(storage, states), files)

    @property
    def url(self) -> str:
        return self.store.url

    def media_paths(self) -> list[str]:
        found = (path.split("/") for path in self.files if is_media_name(path))
        return ["/".join(parts) for parts in sorted(found) if not any(part.startswith(".") for part in parts)]

    def look_ahead(self, values: Sequence[object], *, is_folder: bool) -> None:
        if not is_folder:
            urls = _objects(values, self.locate)
            self.objects.look_up(url for url in urls if not url.startswith(f"{self.url}/"))
            return
        beside = {_beside(str(value)) for value in values} & self.files.keys()
        self.captions.update(_at_once(self._read_caption, sorted(beside)))

    def locate(self, value: object) -> tuple[str, str]:
        path = check_path(value)
        if is_object(path):
            inside = f"{self.url}/"
            if not path.startswith(inside):
                return path, path
            path = path.removeprefix(inside)
        elif is_remote(path) or path.startswith(("/", "file:")):
            raise Rejected("is no path in the source's bucket and no s3:// URL; upload it, or name it relative to it")
        source = relative_source(path)
        return source, f"{self.url}/{source}"

    def caption(self, sidecar: Sidecar) -> str | None:
        return self.captions.get(_beside(sidecar.path))

    def state(self, path: str) -> tuple[int, str]:
        if path.startswith(f"{self.url}/") and path not in self.objects.states:
            raise Rejected(_MISSING)  # the listing is all there is
        return self.objects.state(path)

    def _read_caption(self, path: str) -> str | None:
        state = self.files[path]
        data = bytearray(min(state.num_bytes, MAX_TEXT_BYTES + 1))
        self.store.read_ranges(path, [(0, memoryview(data))], state.version)
        return _caption(bytes(data))


def find_input(
    source: str | Path, metadata: str | Path | None, storage: StorageOptions
) -> tuple[Place, Metadata | None]:
    """(what relative paths start from, the metadata if any). Raises SourceError, StorageError where a store fails."""
    store = open_store(source, storage)
    if isinstance(store, LocalStore):
        root = Path(os.path.abspath(store.root))  # noqa: PTH100 — resolve() would follow links, and rename what lies behind them
        place, found = _find_folder(root, metadata, storage)
    else:
        place, found = _find_prefix(store, metadata, storage)
    return place, None if found is None else _read_metadata(found, storage)


def _find_folder(root: Path, metadata: str | Path | None, storage: StorageOptions) -> tuple[Place, str | Path | None]:
    if root.is_file():
        if metadata is not None:
            raise SourceError(f"source {root} is a file, and metadata={str(metadata)!r} is given too; give the folder")
        return Folder(root.parent, Objects(storage)), root
    if not root.is_dir():
        raise SourceError(f"source {root} is neither a folder nor a metadata file")
    place = Folder(root, Objects(storage))
    found = [path for suffix in READERS if (path := root / f"metadata{suffix}").is_file()]
    return place, _choose(place, metadata, [str(path) for path in found])


def _is_object(url: str, storage: StorageOptions) -> bool:
    return open_store(posixpath.dirname(url), storage).state(posixpath.basename(url)) is not None


def _find_prefix(store: Store, metadata: str | Path | None, storage: StorageOptions) -> tuple[Place, str | Path | None]:
    if store.url.startswith("memory:"):
        raise SourceError(f"source {store.url} is in this process alone, and workers are others; give another place")
    if posixpath.splitext(store.url)[1].lower() in READERS:
        if metadata is not None:
            raise SourceError(
                f"source {store.url} is a file, and metadata={str(metadata)!r} is given too; give the folder"
            )
        return BucketFolder.listed(open_store(posixpath.dirname(store.url), storage), storage), store.url
    place = BucketFolder.listed(store, storage)
    if not place.files:
        if "/" in store.url.removeprefix("s3://") and _is_object(store.url, storage):
            raise SourceError(
                f"source {store.url} is one file, and no metadata file ({', '.join(READERS)}); "
                f"give its folder, {posixpath.dirname(store.url)}"
            )
        raise SourceError(f"source {store.url} is neither a folder nor a metadata file: no object lies below it")
    found = [f"{store.url}/{name}" for suffix in READERS if (name := f"metadata{suffix}") in place.files]
    return place, _choose(place, metadata, found)


def _choose(place: Place, metadata: str | Path | None, found: list[str]) -> str | Path | None:
    if metadata is not None:
        return metadata
    if len(found) > 1:
        names = " and ".join(posixpath.basename(path) for path in found)
        raise SourceError(f"source {place.url} holds {names}; say which with --metadata")
    return found[0] if found else None


def _read_metadata(path: str | Path, storage: StorageOptions) -> Metadata:
    if isinstance(path, str) and is_remote(path):
        bucket_url, key = split_url(path)
        return download_metadata(store_of(bucket_url, storage), key)
    return read_metadata(Path(path))


def _objects(values: Sequence[object], locate: Callable[[object], tuple[str, str]]) -> list[str]:
    """URLs of the objects that rows name."""
    found = []
    for value in values:
        try:
            path = locate(value)[1]
        except Rejected:
            continue
        if is_remote(path):
            found.append(path)
    return found


def _beside(path: str) -> str:
    return posixpath.splitext(path)[0] + ".txt"


def _caption(data: bytes) -> str | None:
    return data.decode("utf-8-sig", "surrogateescape").strip() or None


def _at_once(ask: Callable[[_Item], _Answer], items: Sequence[_Item]) -> list[tuple[_Item, _Answer]]:
    if not items:
        return []
    with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        return list(zip(items, threads.map(ask, items), strict=True))
