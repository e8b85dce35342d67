"""Expiry: deletion of earlier versions, and of files to which no version refers."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import files_of_version, kept_files, read_version, version_files
from streamvid.dataset.versions.publish import LEASES, Writing
from streamvid.errors import ConfigError
from streamvid.storage import Store

GRACE_SECONDS = 3600.0
"""Time for which a file that no version names is kept, because its writer may be about to publish it."""
_FOLDERS = ("shards", "index", "versions")
_STAGING = ".staging"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_AGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*")


@dataclass(frozen=True, slots=True)
class Expired:
    """Versions and files that an expiry deleted, or would delete.

    versions: numbers of the versions.
    files: paths of files to which no kept version refers.
    num_bytes: total size of these files.
    has_unfinished_build: True if the dataset has an unfinished build. In that case, only files of expired versions
        were deleted.
    """

    versions: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    num_bytes: int = 0
    has_unfinished_build: bool = False


def parse_age(value: str | float) -> float:
    """Parse an age, and return it in seconds. value: number of seconds, or text such as "12h", "30d" or "4w"."""
    if isinstance(value, str):
        match = _AGE.fullmatch(value)
        if match is None:
            raise ConfigError(f"expire={value!r}: must be a number and a unit (s, m, h, d or w), such as 30d")
        return float(match[1]) * _UNITS[match[2]]
    if isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ConfigError(f"expire={value!r}: must be a number of seconds (at least 0), or text such as '30d'")
    return float(value)


def expire_versions(held: Writing | Dataset, age_seconds: float) -> Expired:
    """Delete versions that were published more than `age_seconds` ago, then files to which no kept version refers.

    The newest version and versions with tags are kept. A version of unknown age is kept. Tars are deleted first, then
    index files, then manifests, so that an interrupted expiry can be completed.

    held: the right to change the dataset, or a dataset for a dry run.
    """
    store = held.store
    newest = held.newest if isinstance(held, Writing) else held.manifest
    oldest = time.time() - age_seconds
    states = version_files(store, newest)
    tagged = {newest.version, *newest.tags.values()}
    expired = [
        number for number, state in sorted(states.items()) if number not in tagged and 0.0 < state.modified <= oldest
    ]
    named = set[str]().union(*(files_of_version(store, read_version(store, number)) for number in expired))
    manifests = {states[number].path for number in expired}
    kept = kept_files(store, newest, without=frozenset(expired)) | manifests
    has_build = _has_unfinished_build(store)
    found = [state for folder in _FOLDERS for state in store.files(folder) if state.path not in kept]
    garbage = [
        state
        for state in found
        if state.path in named or (not has_build and 0.0 < state.modified <= time.time() - GRACE_SECONDS)
    ]
    if isinstance(held, Writing):
        for path in (*sorted((state.path for state in garbage), key=_in_order), *sorted(manifests)):
            store.remove(path)
    return Expired(
        versions=tuple(expired),
        files=tuple(state.path for state in garbage),
        num_bytes=sum(state.num_bytes for state in garbage),
        has_unfinished_build=has_build,
    )


def _in_order(path: str) -> tuple[bool, str]:
    """Return a sort key that puts the tars of a version before the index files that list them."""
    return not path.startswith("shards/"), path


def _has_unfinished_build(store: Store) -> bool:
    """Return True if a writer has left intermediate results, which may refer to files that are not in a version yet."""
    return any(not state.path.startswith(f"{LEASES}/") for state in store.files(_STAGING))
