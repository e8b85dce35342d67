"""Where the input lies, a folder or a prefix of a bucket: which files are there, and what each is."""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from streamvid.errors import Rejected
from streamvid.sharder.source.columns import MAX_TEXT_BYTES
from streamvid.sharder.source.folder import check_path, file_paths, is_object, locate, relative_source
from streamvid.sharder.source.media import Media, is_remote, split_url, store_of, version_of
from streamvid.storage import FileState, StorageOptions, Store

_READS_AT_ONCE = 32
_MISSING = "cannot be read: No such file or directory"  # as a folder's, so that both give the same dataset
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A caption that may stand in a .txt beside the media file `path`."""

    path: str


@dataclass(frozen=True, slots=True)
class Kept:
    """What a clip of a sealed dataset keeps in another one.

    name: what its key there was, of which its new key is made. record_key: shared by all clips of one file, as there.
    is_val: whether it was kept for validation, which it then is here too.
    """

    name: str
    record_key: str
    is_val: bool


class Place(Protocol):
    """A source folder. What is wrong with one row is Rejected; what is wrong with the place is an error."""

    @property
    def url(self) -> str: ...

    def paths(self) -> list[str]:
        """Paths relative to the place of all files below it, hidden names left out, sorted by parts."""
        ...

    def is_file(self, path: str) -> bool:
        """Whether that file is there, hidden or not."""
        ...

    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder, hidden or not, with something in it."""
        ...

    def media(self, path: str) -> Media:
        """A file of the place, for who reads it. Rejected where it is none."""
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

    def kept(self, path: str) -> Kept | None:
        """What is known already of what `locate` named."""
        ...


@dataclass(frozen=True)
class Objects:
    """What is known of objects anywhere, by URL; None: not there. Others are asked for one by one."""

    storage: StorageOptions
    states: dict[str, FileState | None] = field(default_factory=dict)

    def look_up(self, urls: Iterable[str]) -> None:
        wanted = [url for url in dict.fromkeys(urls) if url not in self.states]
        for url, state in at_once(self._ask, wanted):
            self.states[url] = state

    def state(self, url: str) -> tuple[int, str]:
        self.look_up([url])
        state = self.states[url]
        if state is None:
            raise Rejected(_MISSING, kind="missing-file")
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

    def paths(self) -> list[str]:
        return file_paths(self.root)

    def is_file(self, path: str) -> bool:
        return (self.root / path).is_file()

    def is_folder(self, path: str) -> bool:
        return (self.root / path).is_dir()

    def media(self, path: str) -> Media:
        return Media(str(self.root / path), path, *self.state(str(self.root / path)), self.objects.storage)

    def kept(self, path: str) -> Kept | None:
        return None

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
                return caption_text(file.read(MAX_TEXT_BYTES + 1))
        except OSError as error:
            raise Rejected(f"its caption file cannot be read: {error.strerror or error}", kind="bad-row") from error

    def state(self, path: str) -> tuple[int, str]:
        if is_remote(path):
            return self.objects.state(path)
        try:
            status = Path(path).stat()
        except OSError as error:
            kind = "missing-file" if isinstance(error, FileNotFoundError) else "unreadable-file"
            raise Rejected(f"cannot be read: {error.strerror or error}", kind=kind) from error
        if not stat.S_ISREG(status.st_mode):
            raise Rejected(
                "is a folder" if stat.S_ISDIR(status.st_mode) else "is no regular file", kind="unreadable-file"
            )
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

    def paths(self) -> list[str]:
        found = sorted(path.split("/") for path in self.files)
        return ["/".join(parts) for parts in found if not any(part.startswith(".") for part in parts)]

    def is_file(self, path: str) -> bool:
        return path in self.files

    def is_folder(self, path: str) -> bool:
        return any(name.startswith(f"{path}/") for name in self.files)

    def media(self, path: str) -> Media:
        url = f"{self.url}/{path}"
        return Media(url, path, *self.state(url), self.objects.storage)

    def kept(self, path: str) -> Kept | None:
        return None

    def look_ahead(self, values: Sequence[object], *, is_folder: bool) -> None:
        if not is_folder:
            urls = _objects(values, self.locate)
            self.objects.look_up(url for url in urls if not url.startswith(f"{self.url}/"))
            return
        beside = {_beside(str(value)) for value in values} & self.files.keys()
        self.captions.update(at_once(self._read_caption, sorted(beside)))

    def locate(self, value: object) -> tuple[str, str]:
        path = check_path(value)
        if is_object(path):
            inside = f"{self.url}/"
            if not path.startswith(inside):
                return path, path
            path = path.removeprefix(inside)
        elif is_remote(path) or path.startswith(("/", "file:")):
            raise Rejected(
                "is no path in the source's bucket and no s3:// URL; upload it, or name it relative to it",
                kind="bad-path",
            )
        source = relative_source(path)
        return source, f"{self.url}/{source}"

    def caption(self, sidecar: Sidecar) -> str | None:
        return self.captions.get(_beside(sidecar.path))

    def state(self, path: str) -> tuple[int, str]:
        if path.startswith(f"{self.url}/") and path not in self.objects.states:
            raise Rejected(_MISSING, kind="missing-file")  # the listing is all there is
        return self.objects.state(path)

    def _read_caption(self, path: str) -> str | None:
        state = self.files[path]
        data = bytearray(min(state.num_bytes, MAX_TEXT_BYTES + 1))
        self.store.read_ranges(path, [(0, memoryview(data))], state.version)
        return caption_text(bytes(data))


@dataclass(frozen=True)
class Members:
    """Files that are parts of others, tars mostly: what is listed here is all there is.

    where: what rows call a file → (source, part path). states: part path → (bytes, version). kept_of: part path → what
    is known of it.
    """

    url: str
    where: Mapping[str, tuple[str, str]]
    states: Mapping[str, tuple[int, str]]
    kept_of: Mapping[str, Kept] = field(default_factory=dict)

    def paths(self) -> list[str]:
        return list(self.where)

    def is_file(self, path: str) -> bool:
        return path in self.where

    def is_folder(self, path: str) -> bool:
        return False

    def media(self, path: str) -> Media:
        source, part = self.locate(path)
        return Media(part, source, *self.state(part), StorageOptions())

    def look_ahead(self, values: Sequence[object], *, is_folder: bool) -> None:
        """All is known."""

    def locate(self, value: object) -> tuple[str, str]:
        path = check_path(value)
        if path not in self.where:
            raise Rejected("is no member of these tars", kind="missing-file")
        return self.where[path]

    def caption(self, sidecar: Sidecar) -> str | None:
        return None

    def state(self, path: str) -> tuple[int, str]:
        return self.states[path]

    def kept(self, path: str) -> Kept | None:
        return self.kept_of.get(path)


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


def caption_text(data: bytes) -> str | None:
    """What a caption file says, outer white space aside; None where that is nothing."""
    return data.decode("utf-8-sig", "surrogateescape").strip() or None


def at_once(ask: Callable[[_Item], _Answer], items: Sequence[_Item]) -> list[tuple[_Item, _Answer]]:
    """(item, answer) of each, many asked at the same time."""
    if not items:
        return []
    with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
        return list(zip(items, threads.map(ask, items), strict=True))
