"""Versions of a dataset: how they are named and opened.

A version is a manifest. `manifest.json` is the newest one; every version ever published is also kept as
`versions/manifest-<number>.json`, which is never replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamvid.dataset.manifest import Manifest, manifest_from_json, read_manifest
from streamvid.dataset.passes import dataset_files
from streamvid.dataset.reader import Dataset
from streamvid.dataset.sealed_json import MANIFEST, read_sealed
from streamvid.errors import ConfigError, DatasetError, refuse_credentials
from streamvid.storage import BlockCache, FileState, StorageOptions, Store, open_store

LATEST = "latest"
_FOLDER = "versions"
_FILE = re.compile(rf"{_FOLDER}/manifest-(\d{{6,9}})\.json")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""Names of tags and views. They do not begin with a digit, so that a tag is never mistaken for a version number."""

_REF = re.compile(r"(?P<url>.*?)(?:@(?P<version>[A-Za-z0-9_.-]{1,64}))?(?:#(?P<view>[A-Za-z0-9_.-]{1,64}))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DatasetRef:
    """URL of a dataset, with an optional version and view.

    version: number, tag, or "latest"; None also means the newest version.
    view: name of a view of the dataset, or None.
    """

    url: str
    version: str | None = None
    view: str | None = None

    @staticmethod
    def parse(url: str | Path) -> DatasetRef:
        """Parse `URL[@VERSION][#VIEW]`.

        A local path that itself ends with such a suffix (for example, "clips@2") is used unchanged, unless only the
        path without the suffix exists. Raises ConfigError if both paths are datasets. A trailing slash selects the path
        that ends with the suffix.
        """
        refuse_credentials("dataset", url)
        text = str(url)
        match = _REF.fullmatch(text)
        # In the first part of a URL, "@" separates a user name from a host. open_store refuses it.
        is_host = "://" in text and match is not None and "/" not in match["url"].partition("://")[2]
        if match is None or is_host:
            return DatasetRef(text)
        if "://" not in text and (_exists(text) or not _exists(match["url"])):
            if text != match["url"] and all(_exists(f"{path}/{MANIFEST}") for path in (text, match["url"])):
                raise ConfigError(
                    f"dataset {text!r} is ambiguous: it names a folder that contains a dataset, but could also refer "
                    f"to a version or a view of the dataset {match['url']!r}; write {text + '/'!r} for the folder, or "
                    "rename the folder"
                )
            return DatasetRef(text)
        return DatasetRef(match["url"], match["version"], match["view"])

    @property
    def is_newest(self) -> bool:
        """True if this refers to the newest version rather than to a particular number or tag."""
        return self.version in (None, LATEST)


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists()


def version_path(number: int) -> str:
    """Return the path of a version's manifest."""
    return f"{_FOLDER}/manifest-{number:06d}.json"


def read_version(store: Store, number: int) -> Manifest:
    """Return the manifest of a version. Raises DatasetError if the dataset does not contain this version."""
    nothing = f"no version {number} of the dataset at {store.url}"
    remedy = "run `streamvid versions` to list the versions that still exist"
    found = read_sealed(store, manifest_from_json, nothing, remedy, version_path(number))
    if found.version != number:
        raise DatasetError(
            f"{store.url}/{version_path(number)} contains version {found.version}, not {number}; copy the dataset again"
        )
    return found


def resolve(newest: Manifest, version: str | int | None, url: str) -> int:
    """Return the number of the version to which a number, a tag or "latest" refers.

    Raises ConfigError if there is no such version or tag.
    """
    if version in (None, LATEST):
        return newest.version
    number = int(version) if str(version).isdecimal() else newest.tags.get(str(version), 0)
    if not 1 <= number <= newest.version:
        tags = ", ".join(sorted(newest.tags)) or "none"
        raise ConfigError(
            f"{url} has no version {version!r}; available: 1 to {newest.version}, {LATEST!r} and the tags ({tags})"
        )
    return number


def open_dataset(url: str | Path, *, storage: StorageOptions | Mapping[str, Any] | None = None) -> Dataset:
    """Open a sealed dataset at a local path, or at a file:// or s3:// URL.

    url: `URL[@VERSION][#VIEW]`, where VERSION is a number, a tag or "latest" (the default).
    storage: options for access to object stores and for the cache.

    Raises ConfigError for invalid options or an unknown version or view, DatasetError if there is no sealed dataset or
    the version was deleted, and StorageError if the store cannot be read.
    """
    options, ref = StorageOptions.of(storage), DatasetRef.parse(url)
    return open_ref(ref, open_store(ref.url, options), open_cache(options))


def open_cache(options: StorageOptions) -> BlockCache | None:
    """Open the cache that the options configure. Return None if no cache is configured."""
    if options.cache_dir is None or options.cache_bytes is None:
        return None
    return BlockCache(Path(options.cache_dir), options.cache_bytes)


def open_ref(ref: DatasetRef, store: Store, cache: BlockCache | None = None, version: int | None = None) -> Dataset:
    """Open a dataset at the version and view that `ref` names. Raises the same errors as `open_dataset`.

    version: number of the version to open instead of the version that `ref` names.
    """
    newest = read_manifest(store)
    manifest = find_version(store, newest, ref.version if version is None else version)
    return Dataset(store, cache, manifest, view_of(manifest, newest, ref.view, store.url), newest)


def find_version(store: Store, newest: Manifest, version: str | int | None) -> Manifest:
    """Return the manifest of a version.

    Raises ConfigError for an unknown version, and DatasetError for a deleted version. The manifest of an earlier
    version omits the `.nv-meta/` files, because the stored files always belong to the newest version.
    """
    number = resolve(newest, version, store.url)
    if number == newest.version:
        return newest
    return without_reader_files(read_version(store, number))


def without_reader_files(manifest: Manifest) -> Manifest:
    """Return the manifest without the `.nv-meta/` files, whose names are the same in all versions."""
    columns = {file.path for group in manifest.columns for file in group.known_files}
    other = tuple(file for file in manifest.files.other if file.path in columns)
    return replace(manifest, files=replace(manifest.files, other=other))


def check_newest(url: str | Path) -> str | Path:
    """Return the URL of a dataset to change. Raises ConfigError if it names an earlier version or a view."""
    ref = DatasetRef.parse(url)
    if ref.version not in (None, LATEST) or ref.view is not None:
        raise ConfigError(
            f"dataset {str(url)!r} refers to a version or a view, but only the newest version of a whole dataset can "
            f"be changed; use {ref.url}"
        )
    return url if ref.version is None else ref.url


def view_of(manifest: Manifest, newest: Manifest, view: str | None, url: str) -> str | None:
    """Return the condition of a view, or None if `view` is None. Raises ConfigError for an unknown view.

    If the opened version itself lists the view, the condition from this version is used, so that a run can resume after
    the view has changed.
    """
    if view is None:
        return None
    if view in manifest.views:
        return manifest.views[view]
    if view not in newest.views:
        known = ", ".join(sorted(newest.views)) or "none"
        raise ConfigError(
            f"{url} has no view named {view!r}; available: {known}. To store a view, run: streamvid versions {url} "
            f"--view {view} --where CONDITION"
        )
    return newest.views[view]


def version_files(store: Store, newest: Manifest) -> dict[int, FileState]:
    """Map the numbers of all kept versions to their manifest files, by listing the `versions` folder."""
    found = {}
    for state in store.files(_FOLDER):
        match = _FILE.fullmatch(state.path)
        if match is not None and int(match[1]) <= newest.version:
            found[int(match[1])] = state
    return found


def history(store: Store, newest: Manifest) -> Iterator[Manifest]:
    """Yield the kept versions from `newest` back to the oldest. Versions in between may have been deleted."""
    yield newest
    for number in sorted(version_files(store, newest), reverse=True):
        if number != newest.version:
            yield read_version(store, number)


def files_of_version(store: Store, manifest: Manifest) -> set[str]:
    """Return the paths of all files in a version, including its own manifest.

    If an interrupted deletion has already removed the shard table, the tars no longer exist, so they are omitted.
    """
    own = version_path(manifest.version)
    if any(store.size(file.path) is None for file in (*manifest.files.shards, *manifest.files.removed)):
        return {own, *(file.path for file in manifest.files)}
    return {own, *(file.path for file in dataset_files(Dataset(store, manifest=manifest)))}


def kept_files(store: Store, newest: Manifest, without: frozenset[int] = frozenset()) -> set[str]:
    """Return the paths of all files in all kept versions, including their manifests. without: versions to omit."""
    kept = (manifest for manifest in history(store, newest) if manifest.version not in without)
    return {MANIFEST}.union(*(files_of_version(store, manifest) for manifest in kept))
