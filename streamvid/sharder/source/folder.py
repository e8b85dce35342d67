"""Where media files lie: folders walked in a fixed order, and paths from metadata kept inside their folder."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from streamvid.errors import Rejected, SourceError, StorageError
from streamvid.sharder.source.columns import check_text
from streamvid.sharder.source.media import BUCKET_SCHEMES
from streamvid.storage import check_relative, redact

VIDEO_EXTENSIONS = (
    *("mp4", "m4v", "mov", "mkv", "webm", "avi", "mpg", "mpeg", "ts", "mts", "m2ts", "flv", "wmv", "ogv", "3gp", "3g2"),
)
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif", "avif", "heic")
MAX_PATH_CHARS = 4096
_EXTENSIONS = frozenset(VIDEO_EXTENSIONS + IMAGE_EXTENSIONS)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_media_name(name: str) -> bool:
    """Whether a file of this name must end in a shard or in the rejections."""
    return posixpath.splitext(name)[1].lower().lstrip(".") in _EXTENSIONS


def file_paths(root: Path) -> list[str]:
    """Paths relative to `root` of all files below it, hidden names skipped, sorted by their parts.

    Linked folders are entered, each real folder once, so that no loop of links is endless. A folder that is named like
    media counts as one, for the rejections, and is entered too. Raises SourceError for a folder that cannot be read.
    """
    return sorted(_walk(root, "", set()), key=lambda path: path.split("/"))


def _walk(folder: Path, prefix: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    try:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(f"cannot read the folder {folder}: {error.strerror or error}") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        is_folder = _is_folder(entry)
        if not is_folder or is_media_name(entry.name):
            yield prefix + entry.name
        if is_folder:
            yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", seen)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def locate(value: object, root: Path) -> tuple[str, str]:
    """(source, local path or URL of an object) of what a metadata row calls its file.

    A relative path stays inside `root` (SAFE-1). An absolute one, or an s3:// URL, is taken as it is: the user named
    it. `source` is
    relative to `root`, with forward slashes, wherever the file lies inside. Raises Rejected with the reason.
    """
    text = check_path(value)
    if is_object(text):
        return text, text
    path = _strip_scheme(text)
    if posixpath.isabs(path):
        normal = posixpath.normpath(path)
        folder = root.as_posix().rstrip("/") + "/"
        if not normal.startswith(folder):
            return normal, normal
        path = normal[len(folder) :]
    source = relative_source(path)
    return source, str(root / source)


def check_path(value: object) -> str:
    """What a row calls its file, if it is a text that can be one."""
    if value is None:
        raise Rejected("the path is missing", kind="bad-path")
    if not isinstance(value, str):
        raise Rejected(f"the path is a {type(value).__name__}, not text", kind="bad-path")
    if len(value) > MAX_PATH_CHARS:
        raise Rejected(f"the path has {len(value)} characters, {MAX_PATH_CHARS} are allowed", kind="bad-path")
    return check_text(value, "the path")


def relative_source(path: str) -> str:
    """A relative path in its short form; Rejected where it leaves its folder."""
    source = posixpath.normpath(path)
    if source == ".." or source.startswith("../"):
        raise Rejected("the path leaves the source folder; give an absolute path if that is meant", kind="bad-path")
    return source


def is_object(text: str) -> bool:
    """Whether that is the URL of an object. Rejected for one that cannot be, or with keys in it."""
    match = _URL.match(text)
    if match is None or match[1] not in BUCKET_SCHEMES:
        return False
    bucket, _, key = text[match.end() :].partition("/")
    if not bucket or not key or "@" in bucket:
        raise Rejected(
            "is no URL of an object, as s3://bucket/folder/clip.mp4; keys do not belong into it", kind="bad-path"
        )
    try:
        check_relative(key)
    except StorageError as error:
        raise Rejected(str(error), kind="bad-path") from None
    return True


def _strip_scheme(text: str) -> str:
    match = _URL.match(text)
    if match is None:
        return text
    if match[1].lower() != "file":
        raise Rejected(
            f"is a {match[1].lower()}:// URL, and only local files and s3:// objects are read; download it first",
            kind="bad-path",
        )
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise Rejected("is a file:// URL with a host; write file:///folder/clip.mp4", kind="bad-path")
    return check_text(url2pathname(parts.path), "the path")


def printable_source(value: object) -> str:
    """What the rejections call a source: no credentials (SAFE-1), valid Unicode, a limited length."""
    text = value if isinstance(value, str) else ""
    text = text.encode("utf-8", "backslashreplace").decode()[:MAX_PATH_CHARS]
    try:
        return redact(text)
    except ValueError:  # no valid URL: what stands before the last @ may be a password
        return text.rpartition("@")[2].partition("?")[0]
