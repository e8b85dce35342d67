"""Annotation of sealed datasets: column files are added next to the index, then the manifest is replaced."""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamvid.credentials import hide_credentials
from streamvid.dataset.annotate.file import read_annotation
from streamvid.dataset.annotate.join import Join
from streamvid.dataset.index import named_by_content
from streamvid.dataset.manifest import MANIFEST, ColumnGroup, Manifest, manifest_to_json, read_manifest
from streamvid.dataset.passes import Progress, no_progress
from streamvid.dataset.reader import Dataset
from streamvid.errors import DatasetError, StorageError
from streamvid.storage import StorageOptions, Store, open_store

LOCK = "index/annotate.lock"
_WAIT_SECONDS = 5.0
_PUT_BYTES = 64 * 2**20
_SHOWN = 10
_OURS = re.compile(r"index/(\.?columns-\d{5}-[0-9a-f]{12}\.parquet|\.annotate\.lock)(\..*tmp)?")


_CHANGED = "another process has changed the dataset, so this annotation was not stored; run the same command again"


@dataclass(frozen=True, slots=True)
class AnnotateReport:
    """Result of an annotation.

    state: "annotated", or "already annotated" if the last annotation was the same.
    num_samples: number of samples in the dataset.
    num_annotated: number of samples that have a row in the file.
    num_rows: number of rows in the file.
    num_unmatched: number of rows that match no sample.
    unmatched: keys of the first ten of these rows.
    columns: user columns that were stored.
    has_captions: True if captions were stored.
    num_bytes: total size of the new files.
    """

    dataset: str
    state: str
    num_samples: int
    num_annotated: int
    num_rows: int
    num_unmatched: int
    unmatched: tuple[str, ...]
    columns: tuple[str, ...]
    has_captions: bool
    num_bytes: int
    content_fingerprint: str

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON-serializable dictionary."""
        return asdict(self)


def annotate(
    dataset: str | Path,
    file: str | Path,
    *,
    key_column: str | None = None,
    columns: Sequence[str] | None = None,
    caption_column: str | None = None,
    overwrite: bool = False,
    storage: StorageOptions | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> AnnotateReport:
    """Add the columns and captions of a CSV, JSON, JSON Lines or Parquet `file` to a sealed dataset.

    Tars and index files do not change. New files are stored beside them, and manifest.json, which lists all files, is
    replaced last. Plans and saved states remain valid. Annotating is idempotent: a killed annotation can be run
    again. It needs memory for the selected columns, 4 bytes per sample, and the keys of a million samples.

    key_column: index column that identifies the samples of a row. "key" identifies one sample; "record_key" and
    "source" identify all samples of a source file. None uses the first of these columns that the file contains.
    columns: columns to add; None adds all except keys and captions.
    caption_column: column with a caption or a list of captions per row; "" adds no captions; None uses the first column
    with a usual name (caption, text, prompt, …), but only if `columns` is also None.
    overwrite: allow replacing values of existing columns. A sample keeps its values if the file has no row or no value
    for it.

    Raises ConfigError if a column is missing from the file or, without `overwrite`, is already in the dataset;
    SourceError for an unreadable file, a repeated key, or keys that match no sample; DatasetError if another process
    annotates the dataset; StorageError if the store fails.
    """
    store = open_store(dataset, StorageOptions.of(storage))
    found = read_annotation(Path(file).expanduser(), key_column, columns, caption_column)
    opened = Dataset(store)
    old = opened.manifest
    is_done = bool(old.columns) and old.columns[-1].source_sha256 == found.sha256
    join = Join(opened, found, overwrite or is_done, str(file))
    new = old if is_done else _put_columns(store, old, join, found.sha256, progress or no_progress)
    return AnnotateReport(
        dataset=store.url,
        state="already annotated" if is_done else "annotated",
        num_samples=old.counts.samples,
        num_annotated=join.num_annotated,
        num_rows=len(found.keys),
        num_unmatched=len(join.unmatched),
        unmatched=tuple(hide_credentials(str(key)) for key in join.unmatched.slice(0, _SHOWN).to_pylist()),
        columns=tuple(found.columns),
        has_captions=found.text is not None,
        num_bytes=0 if is_done else sum(file.num_bytes for file in new.columns[-1].files),
        content_fingerprint=new.fingerprints.content,
    )


def _put_columns(store: Store, old: Manifest, join: Join, source_sha256: str, progress: Progress) -> Manifest:
    """Store the files of the new columns, then the manifest that lists them. Return this manifest."""
    files = []
    try:
        for number, data in enumerate(join.files(progress)):
            files.append(named_by_content("columns", number, data))
            _put(store, files[-1].path, data)
        new = old.with_columns(ColumnGroup(tuple(files), join.types, source_sha256))
        _seal(store, old, new)
    except StorageError as error:
        # The annotation that finishes first removes the files of all others, even while they are being written.
        if read_manifest(store) == old:
            raise
        raise DatasetError(f"{store.url}: {_CHANGED}") from error
    return new


def _put(store: Store, path: str, data: bytes) -> None:
    if store.is_local or len(data) <= _PUT_BYTES:
        store.put(path, data)
        return
    with tempfile.TemporaryDirectory(prefix="streamvid-") as folder:  # large files are uploaded in parts, from a file
        local = Path(folder) / "columns"
        local.write_bytes(data)
        store.put(path, local)


def _seal(store: Store, old: Manifest, new: Manifest) -> None:
    """Replace the manifest, and remove files left behind by interrupted annotation runs."""
    data = manifest_to_json(new)
    with _locked(store, hashlib.sha256(data).hexdigest().encode()):
        now = read_manifest(store)
        mine = new.columns[-1].files
        if now not in (old, new):
            _remove(store, now, {file.path for file in mine})
            raise DatasetError(f"{store.url}: {_CHANGED}")
        if any(store.size(file.path) != file.num_bytes for file in mine):
            raise DatasetError(
                f"{store.url}: another process removed files of this annotation; run the same command again"
            )
        store.put(MANIFEST, data)
        _remove(store, new, {state.path for state in store.files("index") if _OURS.fullmatch(state.path)})
        store.abort_uploads("index")


def _remove(store: Store, manifest: Manifest, paths: set[str]) -> None:
    """Remove the files in `paths` that the manifest does not list."""
    for path in paths - {file.path for file in manifest.files.other}:
        store.remove(path)


@contextmanager
def _locked(store: Store, token: bytes) -> Iterator[None]:
    """Hold the lock on the manifest while the context is open. A rerun of a killed annotation takes over its lock."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not store.create(LOCK, token):
        if _is_mine(store, token):
            break
        if time.monotonic() > deadline:
            raise DatasetError(
                f"{store.url}: another annotation holds the lock; wait until it ends, then run this command again; if "
                f"the other annotation was killed, rerun it first, or remove {LOCK} from the dataset"
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        store.remove(LOCK)


def _is_mine(store: Store, token: bytes) -> bool:
    try:
        return store.size(LOCK) is not None and store.read(LOCK) == token
    except StorageError:  # another process has just removed it
        return False
