"""Listing of media folders in a fixed order, and resolution of the paths in metadata rows."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from streamvid.dataset.tabular.columns import check_text
from streamvid.errors import Rejected, SourceError, StorageError
from streamvid.storage import OBJECT_SCHEMES, check_relative, file_url_path, redact

VIDEO_EXTENSIONS = (
    *("mp4", "m4v", "mov", "f4v", "3gp", "3g2", "mkv", "webm", "avi", "divx", "mpg", "mpeg", "vob", "m2v"),
    *("ts", "mts", "m2ts", "flv", "wmv", "asf", "ogv", "ivf", "mxf", "rm", "rmvb"),
)
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif", "avif", "heic")
AUDIO_EXTENSIONS = ("wav", "flac", "mp3", "m4a", "mka", "ogg", "oga", "opus")
MAX_PATH_CHARS = 4096
_EXTENSIONS = frozenset(VIDEO_EXTENSIONS + IMAGE_EXTENSIONS)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_media_name(name: str) -> bool:
    """Return True if the name has a media extension. The sharder stores or rejects every file with such a name."""
    return _extension(name) in _EXTENSIONS


def is_audio_name(name: str) -> bool:
    """Return True if the name has the extension of an audio file. Only datasets of audio samples store such files."""
    return _extension(name) in AUDIO_EXTENSIONS


def _extension(name: str) -> str:
    return posixpath.splitext(name)[1].lower().lstrip(".")


def file_paths(root: Path) -> list[str]:
    """Return the relative paths of all files below `root`, except hidden files, sorted by path components.

    Links to folders are followed, but each real folder is visited only once, so link loops are harmless. A folder whose
    name has a media extension is visited, and its path is also returned, so that the caller can reject it.

    Raises SourceError if a folder cannot be read.
    """
    return sorted(_walk(root, "", set()), key=lambda path: path.split("/"))


def folder_files(root: Path, folder: str) -> list[str]:
    """Return the paths, relative to `root`, of the files directly in `folder`, except hidden files.

    Return an empty list if the folder cannot be read.
    """
    try:
        entries = list(os.scandir(root / folder))
    except OSError:  # the path comes from a row, so the folder may not exist
        return []
    return [posixpath.join(folder, entry.name) for entry in entries if entry.name[0] != "." and not _is_folder(entry)]


def _walk(folder: Path, prefix: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    try:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(
            f"cannot read the folder {folder}: {error.strerror or error}; check its permissions"
        ) from error
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
    except OSError:  # the entry is a link to itself
        return False


def locate(value: object, root: Path) -> tuple[str, str]:
    """Return (source name, local path or URL) of the file to which a value in a metadata row refers.

    A relative path must not lead outside `root` (SAFE-1). An absolute path or an s3:// URL is used unchanged, because
    the user chose it. If the file is inside `root`, its source name is the path relative to `root`, with forward
    slashes. Raises Rejected if the path is invalid.
    """
    text = check_path(value)
    if is_object(text):
        return text, text
    path = _strip_scheme(text)
    folder = root.as_posix().rstrip("/") + "/"
    if posixpath.isabs(path):
        normal = posixpath.normpath(path)
        if not normal.startswith(folder):
            return normal, normal
        path = normal[len(folder) :]
    source = relative_source(path)
    return source, folder + source


def check_path(value: object) -> str:
    """Check that a value in a row is a valid path, and return it. Raises Rejected if it is invalid."""
    if value is None:
        raise Rejected("the path is missing", kind="bad-path")
    if not isinstance(value, str):
        raise Rejected(f"the path has type {type(value).__name__}; it must be text", kind="bad-path")
    if len(value) > MAX_PATH_CHARS:
        raise Rejected(f"the path has {len(value)} characters; at most {MAX_PATH_CHARS} are allowed", kind="bad-path")
    return check_text(value, "the path")


def relative_source(path: str) -> str:
    """Return a normalized relative path. Raises Rejected if the path leads outside its folder."""
    source = posixpath.normpath(path)
    if source == ".." or source.startswith("../"):
        raise Rejected(
            "the path points outside the source folder or base folder; if that is intended, use the file's full "
            "path or URL",
            kind="bad-path",
        )
    return source


def is_object(text: str) -> bool:
    """Return True if a string is an object's URL. Raises Rejected if the URL is invalid or contains credentials."""
    match = _URL.match(text)
    if match is None or match[1] not in OBJECT_SCHEMES:
        return False
    bucket, _, key = text[match.end() :].partition("/")
    if not bucket or not key or "@" in bucket or ":" in bucket:
        raise Rejected(
            "the path is not a valid object URL; use a URL such as s3://bucket/clip.mp4, without credentials",
            kind="bad-path",
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
        remedy = "write s3 in lowercase" if match[1].lower() in OBJECT_SCHEMES else "download the file first"
        raise Rejected(
            f"the path starts with {match[0]}, but only local files and s3:// URLs are supported; {remedy}",
            kind="bad-path",
        )
    path = file_url_path(text)
    if path is None:
        raise Rejected("the file:// URL contains a host; use a URL such as file:///folder/clip.mp4", kind="bad-path")
    return check_text(path, "the path")


def printable_source(value: object) -> str:
    """Return a source name for rejections: valid Unicode of limited length, without credentials (SAFE-1)."""
    text = value if isinstance(value, str) else ""
    return redact(text.encode("utf-8", "backslashreplace").decode())[:MAX_PATH_CHARS]
