"""Tests of reading and typing tabular metadata: every caller gets the same columns, types and broken rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamvid.dataset.captions import listed_captions
from streamvid.dataset.tabular.columns import Column, common_kind
from streamvid.dataset.tabular.reader import BLOCK_ROWS, RowBlock, column_names, read_blocks
from streamvid.dataset.tabular.table import read_table
from streamvid.errors import SourceError
from streamvid.storage import StorageOptions

CELLS: list[tuple[list[str], str, list[Any]]] = [
    (["1", "2", ""], "int64", [1, 2, None]),
    (["1.5", "+2", "nan"], "double", [1.5, 2.0, None]),
    (["true", "False", "n/a"], "bool", [True, False, None]),
    (["007", "1"], "string", ["007", "1"]),
    (["1e3", ".5", "2."], "double", [1000.0, 0.5, 2.0]),
    (["9999999999999999999", "1"], "string", ["9999999999999999999", "1"]),
    (["9223372036854775807"], "int64", [2**63 - 1]),
    (["", ""], "string", [None, None]),
    (["nan", ""], "string", ["nan", None]),
    ([" 1 ", "2"], "int64", [1, 2]),
    (["1", "x"], "string", ["1", "x"]),
    (["true", "1"], "string", ["true", "1"]),
    (["-0", "5"], "int64", [0, 5]),
    (["1e999", "2"], "double", [None, 2.0]),
    (["None", "3"], "int64", [None, 3]),
]

VALUES: list[tuple[list[Any], str, list[Any]]] = [
    ([1, None, 2], "int64", [1, None, 2]),
    ([1, 0.5, None], "double", [1.0, 0.5, None]),
    ([1, float("nan"), float("inf")], "int64", [1, None, None]),
    ([True, False], "bool", [True, False]),
    ([True, 1], "string", ["true", "1"]),
    (["1", "2"], "string", ["1", "2"]),
    ([2**70, 1], "string", [str(2**70), "1"]),
    ([["b", "a"], {"y": 1, "x": None}, "é"], "string", ['["b", "a"]', '{"x": null, "y": 1}', "é"]),
    ([None], "string", [None]),
]


def blocks(path: Path) -> list[RowBlock]:
    return [block for block in read_blocks(path) if block.num_rows]


@pytest.mark.parametrize(("cells", "kind", "values"), CELLS)
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_text_is_typed_by_all_its_cells(cells: list[str], kind: str, values: list[Any], num_blocks: int) -> None:
    """The type does not depend on how the rows are split into blocks."""
    middle = len(cells) // 2 if num_blocks == 2 else 0
    columns = [Column(pa.array(part, pa.large_string()), "text") for part in (cells[:middle], cells[middle:])]
    found = common_kind(column.kinds() for column in columns)
    assert found == kind
    assert [value for column in columns for value in column.as_kind(found).to_pylist()] == values


@pytest.mark.parametrize(("given", "kind", "values"), VALUES)
def test_json_is_typed_by_its_values(tmp_path: Path, given: list[Any], kind: str, values: list[Any]) -> None:
    (tmp_path / "m.jsonl").write_text(
        "\n".join(json.dumps({"a": value}) for value in given).replace("Infinity", "1e999")
    )
    (block,) = blocks(tmp_path / "m.jsonl")
    found = common_kind([block.column("a").kinds()])
    assert found == kind and block.column("a").as_kind(found).to_pylist() == values


def test_a_parquet_bomb_is_refused_by_its_footer(tmp_path: Path) -> None:
    """SAFE-1: a file of a few kilobytes contains a text of 80 MiB."""
    path = tmp_path / "metadata.parquet"
    pq.write_table(pa.table({"video": ["a.mp4"], "text": [" " * (80 << 20)]}), path, compression="zstd")
    with pytest.raises(SourceError, match=r"metadata.parquet is not a readable.*unpacks to 8\d{7} bytes; at most"):
        list(read_blocks(path))


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "n": pa.array([1, None], pa.uint8()),
            "big": pa.array([2**64 - 1, 1], pa.uint64()),
            "x": pa.array([0.5, float("nan")], pa.float32()),
            "d": pa.array(["1.25", "2.50"]).cast(pa.decimal128(5, 2)),
            "c": pa.array(["a", None]).dictionary_encode(),
            "t": pa.array([0, 86_400_000], pa.timestamp("ms")),
            "raw": pa.array([b"\x01\xff", None]),
            "lists": pa.array([[1, 2], None]),
        }
    )
    pq.write_table(table, tmp_path / "m.parquet", row_group_size=1)
    read = read_table(tmp_path / "m.parquet", StorageOptions())
    kinds = read.kinds(read.names)
    assert kinds == {
        "n": "int64", "big": "string", "x": "double", "d": "double", "c": "string", "t": "string", "raw": "string",
        "lists": "string",
    }  # fmt: skip
    found = {
        name: [value for block in read.blocks for value in block.column(name).as_kind(kind).to_pylist()]
        for name, kind in kinds.items()
    }
    assert found == {
        "n": [1, None],
        "big": [str(2**64 - 1), "1"],
        "x": [0.5, None],
        "d": [1.25, 2.5],
        "c": ["a", None],
        "t": ["1970-01-01 00:00:00", "1970-01-02 00:00:00"],
        "raw": ["01ff", None],
        "lists": ["[1, 2]", None],
    }


def test_rows_keep_their_places_over_blocks(tmp_path: Path) -> None:
    """SHARD-3: broken rows keep their positions, and their errors name lines of the file."""
    count = BLOCK_ROWS + 10
    broken = {3: "line 5 has 1 fields, but the header has 2", BLOCK_ROWS + 2: f"line {BLOCK_ROWS + 4} has 3 fields"}
    with (tmp_path / "m.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["n", "text"])
        for row in range(count):
            writer.writerow(["x"] if row == 3 else ["x", "y", "z"] if row == BLOCK_ROWS + 2 else [row, 'a "quoted"'])
    lines = [json.dumps({"n": row, "text": "a"}) for row in range(count)]
    lines[3], lines[BLOCK_ROWS + 2] = "{", "[1]"
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    for name in ("m.csv", "m.jsonl"):
        found = blocks(tmp_path / name)
        assert [block.num_rows for block in found] == [BLOCK_ROWS, 10]
        assert [list(block.broken) for block in found] == [[3], [2]]
        values = [str(value) for block in found for value in block.column("n").values()]
        assert all(value == str(row) for row, value in enumerate(values) if row not in broken)
        if name == "m.csv":
            reasons = [reason for block in found for reason in block.broken.values()]
            assert all(found.startswith(said) for found, said in zip(reasons, broken.values(), strict=True))


def test_rows_that_are_not_unicode_are_broken(tmp_path: Path) -> None:
    """The cells of these rows stay printable, so that reports can show them."""
    (tmp_path / "m.csv").write_bytes(b"path,n\na.mp4,1\nb\xff.mp4,2\n")
    (tmp_path / "m.jsonl").write_bytes(b'{"path": "a.mp4", "n": 1}\n{"path": "b\\ud800.mp4", "n": ["\xff"]}\n')
    for name, column in (("m.csv", "path"), ("m.jsonl", "path")):
        (block,) = blocks(tmp_path / name)
        assert block.broken == {1: f"column {column!r} is not valid UTF-8"}
        assert all(value.isprintable() for value in block.column("path").values())
    assert column_names(tmp_path / "m.csv") == ("path", "n")


def test_deep_nesting_breaks_a_row_and_nothing_else(tmp_path: Path) -> None:
    """SAFE-1."""
    lines = ['{"a": ' + "[" * depth + "]" * depth + "}" for depth in (1, 500, 900, 990, 100_000)]
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    (block,) = blocks(tmp_path / "m.jsonl")
    assert 4 in block.broken and 0 not in block.broken
    assert block.column("a").values()[0] == []


def test_a_sample_of_the_names_reads_one_block(tmp_path: Path) -> None:
    lines = ['{"a": 1}'] * BLOCK_ROWS + ['{"b": 1}']
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    assert column_names(tmp_path / "m.jsonl", is_sample=True) == ("a",)
    assert column_names(tmp_path / "m.jsonl") == ("a", "b")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json"])
def test_utf_16_is_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"m{suffix}").write_bytes('{"a": 1}'.encode("utf-16"))
    with pytest.raises(SourceError, match="is UTF-16; save it as UTF-8"):
        blocks(tmp_path / f"m{suffix}")


@pytest.mark.parametrize("text", ["[aesthetic score: 5.5]", "[1]", '["a', "[[1, 2]]", '[["a"]]', "a"])
def test_a_text_that_only_looks_like_a_list_is_one_caption(text: str) -> None:
    assert listed_captions(text) == text


def test_a_text_may_hold_a_list_of_captions() -> None:
    """CSV cells contain such lists, and so does the index, as pairs of text and weight."""
    assert listed_captions('["a", {"text": "b"}]') == ["a", {"text": "b"}]
    assert listed_captions('[["a", 1.0]]') == listed_captions([["a", 1.0]]) == [{"text": "a", "weight": 1.0}]


def test_a_long_field_is_read_whole(tmp_path: Path) -> None:
    """A field may exceed the 131,072 characters that Python's csv accepts by default."""
    path, text = tmp_path / "long.csv", "ab" * 200_000
    path.write_text(f"path,caption\na.mp4,{text}\n")
    (block,) = [block for block in read_blocks(path) if block.num_rows]
    assert block.columns["caption"].cells.to_pylist() == [text] and not block.broken


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_csv_separators(tmp_path: Path, sign: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f'\ufeffpath{sign}caption\na.mp4{sign}"one, two; three"\n', encoding="utf-8")
    rows = [row for block in read_blocks(path) for row in block.rows()]
    assert rows == [{"path": "a.mp4", "caption": "one, two; three"}]
