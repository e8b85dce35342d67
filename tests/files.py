"""Files that tests write and read: metadata of any suffix, whole folders, and tars as WebDataset sees them."""

from __future__ import annotations

import csv
import gc
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import webdataset

Tree = dict[str, bytes]


def tree_of(folder: Path) -> Tree:
    """Every file below a folder, hidden ones too, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Metadata in the format of the file's suffix. A CSV cell holds a list as JSON; Parquet has 97 rows per group."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in rows:
                writer.writerow({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()})
    elif path.suffix == ".parquet":
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        pq.write_table(table, path, row_group_size=97)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


def read_webdataset(tar: object) -> list[dict[str, Any]]:
    """The samples of a tar, or of a pattern of them, as the webdataset library reads them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves closing a tar to the collector
        read = list(webdataset.WebDataset(str(tar), shardshuffle=False, empty_check=False))
        gc.collect()
    return read
