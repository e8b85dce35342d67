"""Versions, tags and views of a dataset: listing and changing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from streamvid.dataset.filter.filter import parse_filter
from streamvid.dataset.manifest import Change, Manifest, read_manifest
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.versions.open import LATEST, NAME, check_newest, find_version, history, resolve, version_files
from streamvid.dataset.versions.publish import Writing, writing
from streamvid.errors import ConfigError
from streamvid.storage import StorageOptions, Store, open_store


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version of a dataset.

    modified: Unix time at which the version was published, or 0.0 if the store does not report it.
    verb: command that created the version.
    num_added, num_removed: numbers of samples that the version adds and removes.
    num_samples, num_bytes: number of samples, and total size of all tars in bytes.
    """

    number: int
    modified: float
    verb: str
    note: str
    num_added: int
    num_removed: int
    num_samples: int
    num_bytes: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VersionsReport:
    """Kept versions of a dataset, newest first, and the dataset's views, as a mapping from name to condition."""

    dataset: str
    versions: tuple[VersionInfo, ...]
    views: Mapping[str, str]

    @property
    def newest(self) -> VersionInfo:
        return self.versions[0]

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON-serializable dictionary."""
        return asdict(self)


def versions(dataset: str | Path, *, storage: StorageOptions | Mapping[str, Any] | None = None) -> VersionsReport:
    """List the views of the dataset at `dataset`, and its kept versions with the change that produced each version.

    Raises DatasetError if there is no dataset, and StorageError if the store fails.
    """
    return _report(open_store(check_newest(dataset), StorageOptions.of(storage)))


def tag(
    dataset: str | Path,
    name: str,
    version: int | str | None = LATEST,
    *,
    move: bool = False,
    storage: StorageOptions | Mapping[str, Any] | None = None,
) -> VersionsReport:
    """Tag a version, so that `URL@NAME` opens this version and `compact --expire` keeps it. Return the versions.

    version: number, another tag, or "latest"; None removes the tag.
    move: True to allow moving an existing tag to another version.

    Raises ConfigError for an invalid name, an unknown version or tag, or a tag that already points to another version,
    DatasetError if the version was deleted or another process is changing the dataset, and StorageError if the store
    fails.
    """
    with writing(open_store(check_newest(dataset), StorageOptions.of(storage))) as held:
        tags = dict(held.newest.tags)
        if version is None:
            _drop(tags, name, "tag", held)
        else:
            number = resolve(held.newest, version, held.store.url)
            find_version(held.store, held.newest, number)
            if not move and tags.get(name, number) != number:
                raise ConfigError(
                    f"tag {name!r} already points to version {tags[name]} of {held.store.url}; choose another name, "
                    f"or set move=True (--move) to move it to version {number}"
                )
            tags[_named(name, "tag")] = number
        note = f"removed {name}" if version is None else f"{name}={tags[name]}"
        _publish(held, replace(held.newest, tags=tags), Change("tag", note=note))
        return _report(held.store)


def view(
    dataset: str | Path,
    name: str,
    where: str | None,
    *,
    storage: StorageOptions | Mapping[str, Any] | None = None,
) -> VersionsReport:
    """Store a condition on samples as a view, so that `URL#NAME` opens only the samples that match.

    Return the versions.

    where: condition as in `VideoLoader(where=...)`; None removes the view. An existing view is replaced.

    Raises ConfigError for an invalid name or condition or an unknown view, DatasetError if another process is changing
    the dataset, and StorageError if the store fails.
    """
    with writing(open_store(check_newest(dataset), StorageOptions.of(storage))) as held:
        views = dict(held.newest.views)
        if where is None:
            _drop(views, name, "view", held)
        else:
            parse_filter(where, held.dataset)
            views[_named(name, "view")] = where
        note = f"removed {name}" if where is None else f"{name}: {where}"
        _publish(held, replace(held.newest, views=views), Change("view", note=note))
        return _report(held.store)


def _publish(held: Writing, draft: Manifest, change: Change) -> None:
    """Publish `draft` as a version, unless it is equal to the newest version."""
    if draft != held.newest:
        held.publish(draft, change)


def _named(name: str, kind: str) -> str:
    if not NAME.fullmatch(name) or name == LATEST:
        raise ConfigError(
            f"{kind} {name!r}: must begin with a letter or '_', contain only letters, digits, '_', '-' and '.', have "
            f"at most 64 characters, and not be {LATEST!r}"
        )
    return name


def _drop(known: dict[str, Any], name: str, kind: str, held: Writing) -> None:
    if known.pop(name, None) is None:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{held.store.url} has no {kind} named {name!r}; available {kind}s: {names}")


def _report(store: Store) -> VersionsReport:
    newest = read_manifest(store)
    states = version_files(store, newest)
    if newest.version not in states:  # a dataset that was never changed
        states.update((newest.version, state) for state in store.files() if state.path == MANIFEST)
    found = []
    for manifest in history(store, newest):
        number, change = manifest.version, manifest.change
        tags = tuple(sorted(name for name, tagged in newest.tags.items() if tagged == number))
        counts = manifest.counts
        found.append(
            VersionInfo(
                number=number,
                modified=states[number].modified if number in states else 0.0,
                verb=change.verb,
                note=change.note,
                num_added=counts.samples if change.verb == "shard" else change.num_added,
                num_removed=change.num_removed,
                num_samples=counts.samples,
                num_bytes=counts.num_bytes,
                tags=tags,
            )
        )
    return VersionsReport(store.url, tuple(found), dict(newest.views))
