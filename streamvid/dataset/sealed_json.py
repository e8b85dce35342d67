"""Manifests of datasets and of features: JSON files that contain a checksum of their own content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from streamvid.errors import DatasetError, IntegrityError, StreamvidError
from streamvid.storage import LocalStore, Store, WrongReads

T = TypeVar("T")

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 * 2**20

CHECKSUM = "manifest_sha256"
"""Field that contains the checksum of all other fields."""


def sealed_json(value: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest: indented JSON with sorted keys and a checksum of the content."""
    sealed = {**value, CHECKSUM: manifest_checksum(value)}
    return (json.dumps(sealed, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def manifest_checksum(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all fields except the checksum itself, serialized as compact JSON."""
    content = {name: field for name, field in value.items() if name != CHECKSUM}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def unsealed_json(data: bytes, format_name: str, version: int) -> dict[str, Any]:
    """Parse a manifest. Raises DatasetError unless the format, the version and the checksum are valid."""
    value: dict[str, Any] = json.loads(data)
    if value.get("format") != format_name:
        raise DatasetError(
            f"format is {str(value.get('format'))[:40]!r}, but must be {format_name!r}; check the path or URL"
        )
    found = value["format_version"]
    if type(found) is int and found > version:
        raise DatasetError(
            f"format_version {found} is newer than the supported version {version}; "
            "update streamvid (pip install -U streamvid)"
        )
    if value.get(CHECKSUM) != manifest_checksum(value):
        raise IntegrityError(
            f"checksum mismatch: {CHECKSUM} is {value.get(CHECKSUM)!r}, which does not match the contents; the file "
            "is damaged or was edited. Copy the file again"
        )
    if type(found) is not int or found != version:
        raise DatasetError(f"format_version={found!r}: must be {version}; the file is damaged, so copy it again")
    return value


@contextmanager
def naming(where: str, remedy: str = "copy the file again, or rebuild the dataset") -> Iterator[None]:
    """Convert manifest parsing errors to DatasetErrors that state the manifest's name (`where`) and a remedy."""
    try:
        yield
    except IntegrityError as error:
        raise IntegrityError(f"{where}: {error}") from error
    except DatasetError as error:
        raise DatasetError(f"{where}: {error}") from error
    except (StreamvidError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        said = str(error) if isinstance(error, StreamvidError) else f"{type(error).__name__}: {error}"
        raise DatasetError(f"{where} is damaged ({said}); {remedy}") from error


def read_sealed(store: Store, parse: Callable[[bytes, str], T], nothing: str, remedy: str, path: str = MANIFEST) -> T:
    """Read the manifest at `path`, and return the result of `parse(data, name)`.

    If the data cannot be parsed, it is read again (FETCH-1). Raises the same errors as `parse`. If there is no
    manifest, raises DatasetError with the texts `nothing` and `remedy`.
    """
    size = store.size(path)
    if size is None:
        missing = f"{path} is missing"
        if isinstance(store, LocalStore) and not store.root.is_dir():
            missing = "it is not a folder" if store.root.exists() else "the folder does not exist"
        raise DatasetError(f"{nothing}: {missing}; {remedy}")
    where = f"{store.url}/{path}"
    if size > MAX_MANIFEST_BYTES:
        raise DatasetError(
            f"{where} is {size} bytes long; at most {MAX_MANIFEST_BYTES} are allowed; copy the file again"
        )
    wrong = WrongReads()
    while True:
        data = store.read(path)
        try:
            return parse(data, where)
        except DatasetError:
            if wrong.judge(hashlib.sha256(data).digest()) != "again":
                raise
        store.forget(path)
