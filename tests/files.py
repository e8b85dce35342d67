"""Helpers that write and read files: metadata in any format, whole folders, and tars as WebDataset reads them."""

from __future__ import annotations

import csv
import gc
import json
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import webdataset

Tree = dict[str, bytes]


def tree_of(folder: Path) -> Tree:
    """Return the content of every file below a folder, including hidden ones, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write metadata in the format of the suffix. CSV cells hold lists as JSON; Parquet row groups have 97 rows."""
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


def png_bytes(width: int, height: int, *packed: tuple[bytes, int]) -> bytes:
    """Build a black RGB PNG that begins with compressed chunks, each given by its kind and its number of zeros."""
    prefix = {b"zTXt": b"Comment\0\0", b"iTXt": b"Comment\0\1\0\0\0", b"iCCP": b"profile\0\0"}
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    chunks = [_png_chunk(b"IHDR", header), *(_png_chunk(kind, prefix[kind] + _zeros(size)) for kind, size in packed)]
    chunks += [_png_chunk(b"IDAT", _zeros((1 + width * 3) * height)), _png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _png_chunk(kind: bytes, payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + kind + payload + zlib.crc32(kind + payload).to_bytes(4, "big")


def _zeros(size: int) -> bytes:
    packer, block = zlib.compressobj(9), bytes(1 << 20)
    return b"".join(packer.compress(block[: size - at]) for at in range(0, size, len(block))) + packer.flush()


def read_webdataset(tar: object) -> list[dict[str, Any]]:
    """Read the samples of a tar, or of a pattern that matches several, with the webdataset library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # webdataset closes a tar only when it is garbage-collected
        read = list(webdataset.WebDataset(str(tar), shardshuffle=False, empty_check=False))
        gc.collect()
    return read
