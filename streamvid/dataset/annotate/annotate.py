"""Annotation of sealed datasets: column files are added next to the index, and then a new version is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamvid.credentials import hide_credentials
from streamvid.dataset.annotate.file import read_annotation
from streamvid.dataset.annotate.join import Join
from streamvid.dataset.index import named_by_content
from streamvid.dataset.manifest import Change, ColumnGroup, Manifest
from streamvid.dataset.passes import Progress, no_progress
from streamvid.dataset.versions.open import check_newest
from streamvid.dataset.versions.publish import Writing, put_file, writing
from streamvid.storage import StorageOptions, open_store

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class AnnotateReport:
    """Result of an annotation.

    state: "annotated", or "already annotated" if the last annotation was the same.
    num_samples: number of samples in the dataset.
    num_annotated: number of samples that have a row in the file.
    num_rows: number of rows in the file.
    num_unmatched: number of rows that match no sample.
    unmatched: keys of the first ten unmatched rows.
    columns: user columns that were stored.
    has_captions: True if captions were stored as well.
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
    """Add the columns and captions from a CSV, JSON, JSON Lines or Parquet `file` to a sealed dataset.

    The tars and index files do not change. The new columns are stored in additional files, and a new version is
    published last. Plans and saved states remain valid. Annotating is idempotent: if it is interrupted, run it again.
    Memory usage is the size of the selected columns, plus 4 bytes per sample, plus the keys of about a million samples.

    key_column: index column that identifies the samples to which a row applies. "key" identifies one sample;
        "record_key" and "source" identify all samples of a source file. None uses the first of these columns that the
        file contains.
    columns: columns to add; None adds all except keys and captions.
    caption_column: column with a caption or a list of captions per row; "" adds no captions; None uses the first
        column with a common name (caption, text, prompt, …), but only if `columns` is also None.
    overwrite: if True, the file may replace values in existing columns. Samples without a row or a value in the file
        keep their values.

    Raises ConfigError if a column is missing from the file or, without `overwrite`, is already in the dataset;
    SourceError if the file is unreadable, repeats a key, or matches no sample at all; DatasetError if another process
    changes the dataset; StorageError if the store fails.
    """
    store = open_store(check_newest(dataset), StorageOptions.of(storage))
    found = read_annotation(Path(file).expanduser(), key_column, columns, caption_column)
    with writing(store) as held:
        opened = held.dataset
        groups = opened.manifest.columns
        # Samples that were added after an annotation do not have its values yet.
        is_done = bool(groups) and groups[-1].source_sha256 == found.sha256 and None not in groups[-1].files
        join = Join(opened, found, overwrite or is_done, str(file))
        new = opened.manifest if is_done else _put_columns(held, join, found.sha256, progress or no_progress)
    return AnnotateReport(
        dataset=store.url,
        state="already annotated" if is_done else "annotated",
        num_samples=new.counts.samples,
        num_annotated=join.num_annotated,
        num_rows=len(found.keys),
        num_unmatched=len(join.unmatched),
        unmatched=tuple(hide_credentials(str(key)) for key in join.unmatched.slice(0, _SHOWN).to_pylist()),
        columns=tuple(found.columns),
        has_captions=found.text is not None,
        num_bytes=0 if is_done else sum(file.num_bytes for file in new.columns[-1].known_files),
        content_fingerprint=new.fingerprints.content,
    )


def _put_columns(writing: Writing, join: Join, source_sha256: str, progress: Progress) -> Manifest:
    """Store the new column files, then publish a version that lists them.

    Return the manifest of that version.
    """
    files = []
    for number, data in enumerate(join.files(progress)):
        files.append(named_by_content("columns", number, data))
        put_file(writing.store, files[-1].path, data)
    draft = writing.newest.with_columns(ColumnGroup(tuple(files), join.types, source_sha256))
    return writing.publish(draft, Change("annotate", note=", ".join(join.types)))
