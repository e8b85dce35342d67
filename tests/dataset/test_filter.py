"""Tests of filter conditions: their meaning, their errors, and cached counts."""

from __future__ import annotations

import contextlib
import logging
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.dataset.filter.filter import CountCache, Filter, count_matches, parse_filter
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, DatasetError, IntegrityError
from tests.dataset.samples import BUCKETS, ROW, Part, seal, seal_parts, tar_bytes

TYPES = {"score": "double", "year": "int64", "place": "string", "good": "bool", "my col": "double", "fps": "int64"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Dataset with a user column of each type; the user column `fps` hides the index column of that name."""
    root = tmp_path_factory.mktemp("dataset")
    values: list[dict[str, Any]] = [
        {"score": 6.0, "year": 2001, "place": "a b", "good": True, "my col": 1.0, "fps": 7},
        {"score": 4.5, "year": 2002, "place": "c{}", "good": False, "my col": None, "fps": 8},
        {"score": None, "year": None, "place": None, "good": None, "my col": 3.0, "fps": None},
        {"score": math.nan, "year": 2**62 + 1, "place": "é", "good": True, "my col": -0.5, "fps": 9},
    ]
    return dataset_of(root, values, TYPES)


def dataset_of(root: Path, values: list[dict[str, Any]], types: dict[str, str]) -> Dataset:
    rows = [replace(ROW, key=f"k{i}", index=i, columns=row) for i, row in enumerate(values)]
    tar = tar_bytes([("a-0", {"mp4": b"mp4"})])
    parts = [Part(BUCKETS[0], 0, tar, rows), Part(BUCKETS[1], 0, tar, [replace(ROW, columns={})])]
    seal_parts(root, BUCKETS, parts, types)
    return open_dataset(root)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("score > 4 and year < 2002", [0]),
        ("3 < score <= 4.5", [1]),
        ("not (score > 5)", [1]),
        ("score is None", [2, 3]),
        ("score is not None", [0, 1]),
        ("year == 2001 or score is None", [0, 2, 3]),
        ("year == 4611686018427387905", [3]),
        ("year > 4611686018427387904", [3]),
        ('place in ("a b", "é")', [0, 3]),
        ('place not in ["a b"]', [1, 3]),
        ("year in (2001, 2002.0)", [0, 1]),
        ('contains(place, " ") or startswith(place, "c{") and endswith(place, "}")', [0, 1]),
        ("good", [0, 3]),
        ("not good", [1]),
        ("good == False", [1]),
        ("good in {True}", [0, 3]),
        ("`my col` / 0 > 1", [0, 2]),
        ("- `my col` > 0", [3]),
        ("(`my col` - `my col`) / 0 == 1 or True", [0, 1, 2, 3]),
        ("fps >= 8", [1, 3]),
        ("`user.fps` >= 8", [1, 3]),
        ("clip_width == 96 and duration_seconds < 1 and window_num_frames == 9", [0, 1, 2, 3]),
        ("place > 'b'", [1, 3]),
        ("score * 2 + 1 == 13", [0]),
        ("score >\n  5", [0]),
        ("place == 'a\\x20b'", [0]),
    ],
)
def test_conditions(dataset: Dataset, text: str, rows: list[int]) -> None:
    parsed = parse_filter(text, dataset)
    found = parsed.matching(dataset.samples(dataset.shards[0], parsed.columns))
    assert found.dtype == np.int32 and found.tolist() == rows
    assert parse_filter(parsed.text, dataset) == parsed


def test_equal_conditions_have_one_text(dataset: Dataset) -> None:
    """PLAN-6: equal conditions therefore share one fingerprint and one cache entry."""
    texts = [
        "score>5 and place in ('b','a')",
        '((score) > 5)\tand place in ["a", "b", "a"]',
        "`user.score` > 5 and place in {'a','b'}",
    ]
    assert len({parse_filter(text, dataset) for text in texts}) == 1
    assert parse_filter("score > 5", dataset) == Filter("(`user.score`) > (5)", ("user.score",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("motoin > 3", r"character 1: 'motoin' is not a column of the dataset .*fps.*my col.*score"),
        ("score > 5 and motoin > 3", "character 15: 'motoin'"),
        ("`my col` > 1 and é > 2", "character 18: 'é'"),
        ("score > 'a'", r"character 1: `user.score` is a number and 'a' is text; they cannot be compared"),
        ("place + 1 > 2", "arithmetic requires numbers, but `user.place` is text"),
        ("place in (1, 'a')", "character 11: `user.place` is text and 1 is a number"),
        ("place in ('a')", r"'in' requires a list"),
        ("place in (year,)", "not columns or expressions"),
        ("score", "this is a number, not a condition; compare it"),
        ("score and good", "'and' requires conditions, not a number"),
        ("good > False", "no order"),
        ("score == None", "write 'score is None'"),
        ("score is 5", "'is' is only allowed before None"),
        ("clip_sha256 == 'a'", r"has type fixed_size_binary\[32\], which conditions do not support"),
        ("1 < 2", "does not refer to a column"),
        ("", "is empty"),
        ("score >", "not a valid condition: invalid syntax"),
        ("score > 5 # and more", "'#' is not allowed"),
        ("`score > 5", "the second backquote is missing"),
        ("`` > 5", "backquotes is empty"),
        ("user.score > 5", "enclose it in backquotes, as in `user.score`"),
        ("𝐬core > 1", "enclose it in backquotes: `𝐬core`"),
        ("score > 1in", "'1in' is not a number"),
        ("place == 'a\\d'", "an unknown escape"),
        ("place == '''a'''", "triple-quoted"),
        ("score > 99999999999999999999", "does not fit in 64 bits"),
        ("score > 1e999", "too large for a double"),
        ("contains(place, place)", "requires a text column and quoted text"),
        ("contains(score, 'a')", "requires a text column and quoted text"),
    ],
)
def test_errors_name_the_position_and_a_remedy(dataset: Dataset, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_filter(text, dataset)


NAMES = ["score"] * 3000
HOSTILE = [
    "__import__('os').system('true')", "().__class__.__bases__", "(lambda: 1)()", "score.__class__ == 1", "score[0] > 1",
    "[x for x in (1,)]", "9**9**9 > score", "1 << 99999999 > score", "f'{score}' == 'a'", "b'a' == place", "score > 1j",
    "(x := 5) > score", "score if good else good", "await score", "*score", "...", "eval('1')", "contains(*place)",
    "contains(place, text='a')", "(" * 10_000, "(" * 140 + "score" + ")" * 140, "not " * 10_000 + "good", "-" * 60_000 + "score > 1",
    "+".join(NAMES) + " > 1", "x" * 70_000, "score > " + "9" * 60_000, "\0", "score\0 > 1", "place == '\ud800'", "'\ud800' == place",
    "place == '\\ud800'", "score > ١", "score > 1 ; 2", "score\\\n > 1", "place == 'a\nb'", "`" * 999, "`score` `score`",
    "contains.x(place, 'a')", "None", "True", "score in ()", "score in (None,)", "score in (" + "1," * 20_000 + ")",
]  # fmt: skip


def chain(depth: int) -> str:
    return "good" if depth == 0 else f"(good == {chain(depth - 1)} == good)"


@pytest.mark.parametrize("text", [*HOSTILE, chain(25)], ids=lambda text: ascii(text[:20]))
def test_hostile_texts_are_config_errors(dataset: Dataset, text: str) -> None:
    """SAFE-1: no code runs, no large value is computed, and the message stays short."""
    with pytest.raises(ConfigError) as error:
        parse_filter(text, dataset)
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize("value", [None, 5, b"score > 5", ["score > 5"]])
def test_a_filter_that_is_not_text_is_refused(dataset: Dataset, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be text; write a condition such as 'aesthetic > 5'"):
        parse_filter(value, dataset)


@given(
    st.text(alphabet="scoreplagd yn0123456789.()[]{}<>=!+-*/%&|~^'\"`\\,:;#\n\tisnoreandtuT é٣ｘ\ud800", max_size=60)
)
@settings(max_examples=300)
def test_any_text_is_a_filter_or_a_config_error(dataset: Dataset, text: str) -> None:
    """SAFE-1: no other exception is raised."""
    try:
        parsed = parse_filter(text, dataset)
    except ConfigError:
        return
    assert parse_filter(parsed.text, dataset) == parsed


# Comparison with Python, row by row. None means "not known".

COLUMNS = {"i": st.integers(-3, 3), "j": st.integers(-(2**63), 2**63 - 1), "x": st.floats(width=32), "s": st.sampled_from(["", "a", "ab", "é"]), "b": st.booleans()}  # fmt: skip
ROWS = st.lists(st.fixed_dictionaries({k: st.none() | v for k, v in COLUMNS.items()}), max_size=8)
SCHEMA = pa.schema([("i", "int32"), ("j", "int64"), ("x", "float64"), ("s", "string"), ("b", "bool")])
OPERATORS = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
ARITHMETIC = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}
Tree = tuple[Any, ...]


def join(*parts: Any) -> Any:
    return st.tuples(*(st.just(part) if isinstance(part, str) else part for part in parts))


EXACT = join("column", st.sampled_from(["i", "j"])) | join("literal", st.integers(-4, 4))
FLOATS = join("column", st.just("x")) | join("literal", st.floats(-4, 4))
COMPUTED = st.recursive(
    FLOATS | EXACT,
    lambda part: join("arithmetic", st.sampled_from(list(ARITHMETIC)), part, part) | join("minus", part),
    max_leaves=4,
)
TEXTS = join("column", st.just("s")) | join("literal", st.sampled_from(["", "a", "b", "é", "'\"`\\{}"]))
LEAVES = (
    join("compare", st.sampled_from(list(OPERATORS)), COMPUTED, COMPUTED)
    | join("compare", st.sampled_from(list(OPERATORS)), TEXTS, TEXTS)
    | join("chain", EXACT, EXACT, EXACT)
    | join("in", EXACT, st.lists(st.integers(-4, 4), min_size=1, max_size=3))
    | join("in", TEXTS, st.lists(st.sampled_from(["", "a", "é"]), min_size=1, max_size=3))
    | join("missing", COMPUTED | TEXTS)
    | join("call", st.sampled_from(["contains", "startswith", "endswith"]), st.sampled_from(["a", "b", "é", ""]))
    | join("column", st.just("b"))
)
TREES = st.recursive(
    LEAVES, lambda part: join("not", part) | join("junction", st.sampled_from(["and", "or"]), part, part), max_leaves=6
)


def write(tree: Tree) -> str:
    kind, *parts = tree
    texts = [write(part) if isinstance(part, tuple) else part for part in parts]
    return {
        "column": lambda name: name,
        "literal": repr,
        "arithmetic": lambda sign, a, b: f"({a} {sign} {b})",
        "minus": lambda a: f"(-({a}))",
        "compare": lambda sign, a, b: f"({a} {sign} {b})",
        "chain": lambda a, b, c: f"({a} < {b} <= {c})",
        "in": lambda a, items: f"({a} in {items!r})",
        "missing": lambda a: f"({a} is None)",
        "call": lambda name, a: f"{name}(s, {a!r})",
        "not": lambda a: f"(not {a})",
        "junction": lambda word, a, b: f"({a} {word} {b})",
    }[kind](*texts)


def number(value: Any) -> Any:
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else value


def judge(tree: Tree, row: dict[str, Any]) -> Any:
    kind, *parts = tree
    if kind == "column":
        return number(row[parts[0]])
    if kind == "literal":
        return parts[0]
    if kind == "missing":
        return judge(parts[0], row) is None
    if kind == "call":
        test = {"contains": lambda a, b: b in a, "startswith": str.startswith, "endswith": str.endswith}[parts[0]]
        return None if row["s"] is None else test(row["s"], parts[1])
    if kind == "in":
        value = judge(parts[0], row)
        return None if value is None else value in parts[1]
    if kind == "junction":
        values = [judge(part, row) for part in parts[1:]]
        decides = parts[0] == "or"
        return decides if decides in values else None if None in values else not decides
    if kind == "chain":
        a, b, c = parts
        return judge(("junction", "and", ("compare", "<", a, b), ("compare", "<=", b, c)), row)
    values = [judge(part, row) for part in parts if isinstance(part, tuple)]
    if None in values:
        return None
    if kind == "not":
        return not values[0]
    return compute(kind, parts[0], values)


def compute(kind: str, sign: Any, values: list[Any]) -> Any:
    with np.errstate(all="ignore"):
        if kind == "minus":
            return (
                -values[0]
                if isinstance(values[0], int) and abs(values[0]) < 5
                else number(float(-np.float64(values[0])))
            )
        if kind == "arithmetic":
            return number(float(ARITHMETIC[sign](*map(np.float64, values))))
        if any(isinstance(value, float) for value in values):
            values = [np.float64(value) for value in values]
        return bool(OPERATORS[sign](*values)) if not isinstance(values[0], str) else python_compare(sign, *values)


def python_compare(sign: str, a: str, b: str) -> bool:
    return {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b, "==": a == b, "!=": a != b}[sign]


@given(ROWS, TREES)
@settings(max_examples=400)
def test_any_condition_gives_the_same_result_as_python(
    table_dataset: Dataset, rows: list[dict[str, Any]], tree: Tree
) -> None:
    """Nulls, NaN, 64-bit integers, text and Booleans are compared with plain Python row by row."""
    text = write(tree)
    try:
        parsed = parse_filter(text, table_dataset)
    except ConfigError as error:
        assert "does not refer to a column" in str(error)
        return
    stored = [{f"user.{name}": value for name, value in row.items()} for row in rows]
    table = pa.Table.from_pylist(stored, schema=pa.schema([f.with_name(f"user.{f.name}") for f in SCHEMA]))
    assert parsed.matching(table).tolist() == [i for i, row in enumerate(rows) if judge(tree, row) is True]


@pytest.fixture(scope="module")
def table_dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    types = {"i": "int32", "j": "int64", "x": "double", "s": "string", "b": "bool"}
    return dataset_of(tmp_path_factory.mktemp("table"), [{}], types)


def test_a_file_with_other_column_types_is_refused(dataset: Dataset) -> None:
    parsed = parse_filter("score > 5", dataset)
    for table in (pa.table({"user.score": ["a"]}), pa.table({"x": [1]})):
        with pytest.raises(DatasetError, match="columns of an index file differ"):
            parsed.matching(table)


# Cached counts.


@pytest.fixture
def counted(tmp_path: Path) -> Dataset:
    """Dataset with shards of 4, 9 and 2 samples, whose scores count from 0."""
    seal(tmp_path / "dataset", (4, 9, 2))
    return open_dataset(tmp_path / "dataset")


def test_counts_of_any_shards_come_from_one_scan(counted: Dataset, tmp_path: Path) -> None:
    """PLAN-6: the second query reads only the cache, because the index files have been deleted."""
    parsed = parse_filter("score >= 1 and score < 5", counted)
    shards = counted.shards
    counts = count_matches(counted, shards[:2], parsed, tmp_path / "cache")
    assert counts.dtype == np.int64 and counts.tolist() == [3, 4]
    for file in counted.manifest.files.samples:
        (counted.store.root / file.path).unlink()  # type: ignore[attr-defined]
    assert count_matches(counted, (shards[2], shards[0]), parsed, tmp_path / "cache").tolist() == [1, 3]
    assert count_matches(counted, (), parsed, tmp_path / "cache").tolist() == []
    with pytest.raises(IntegrityError, match="not in the dataset.s shard table"):
        count_matches(counted, (replace(shards[0], number=77),), parsed, tmp_path / "cache")


def test_a_damaged_cache_is_scanned_again(counted: Dataset, tmp_path: Path) -> None:
    parsed = parse_filter("score >= 1", counted)
    right = count_matches(counted, counted.shards, parsed, tmp_path / "cache").tolist()
    (entry,) = (tmp_path / "cache").glob("*.counts")
    data = entry.read_bytes()
    others = [data[:-1], b"", data + b"x"]
    others += [data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :] for i in range(0, len(data), 5)]
    for other in others:
        entry.write_bytes(other)
        assert count_matches(counted, counted.shards, parsed, tmp_path / "cache").tolist() == right
        assert entry.read_bytes() == data


def test_impossible_cached_counts_are_ignored(tmp_path: Path) -> None:
    cache, most = CountCache.of(tmp_path, "f" * 64, "x"), np.array([3, 4], np.int64)
    cache.write(np.array([3, 0], np.int64))
    read = cache.read(most)
    assert read is not None and read.tolist() == [3, 0]
    for wrong in ([4, 0], [-1, 0], [1], [1, 2, 3]):
        cache.write(np.array(wrong, np.int64))
        assert cache.read(most) is None


def test_an_unwritable_cache_folder_only_costs_a_scan(
    counted: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    parsed = parse_filter("score >= 1", counted)
    with caplog.at_level(logging.INFO):
        for folder in (tmp_path / "file" / "cache", "/proc/nope"):
            assert count_matches(counted, counted.shards, parsed, folder).tolist() == [3, 8, 1]
    assert "cannot store the filter's counts" in caplog.text


def test_the_users_cache_folder(counted: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    count_matches(counted, counted.shards, parse_filter("score >= 1", counted))
    assert list((tmp_path / "xdg" / "streamvid" / "filters").glob("*.counts"))


def test_each_dataset_and_condition_has_its_own_entry(tmp_path: Path) -> None:
    for number, sizes in enumerate([(2, 2), (2, 3), (2, 2, 1)]):
        seal(tmp_path / str(number), sizes)
        dataset = open_dataset(tmp_path / str(number))
        for text, least in (("score >= 1", 1), ("score >= 0", 0)):
            counts = count_matches(dataset, dataset.shards, parse_filter(text, dataset), tmp_path / "cache")
            assert counts.tolist() == [size - least for size in sizes]
    assert len(list((tmp_path / "cache").glob("*.counts"))) == 6


HOLD = """
import sys, time
from pathlib import Path
from streamvid.dataset.filter.filter import CountCache
with CountCache(Path(sys.argv[1]), sys.argv[2].encode()).locked():
    print("holds", flush=True)
    time.sleep(300)
"""
SCAN = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
from streamvid.dataset.filter.filter import count_matches, parse_filter
from streamvid.dataset.versions.open import open_dataset
dataset = open_dataset(sys.argv[1])
print(count_matches(dataset, dataset.shards, parse_filter("score >= 1", dataset), sys.argv[2]).tolist())
"""


def test_processes_that_start_together_scan_once(counted: Dataset, tmp_path: Path) -> None:
    """PLAN-6: only one process per machine scans, and the lock of a killed process is released."""
    parsed = parse_filter("score >= 1", counted)
    cache = CountCache.of(tmp_path / "cache", counted.manifest.fingerprints.content, parsed.text)
    hold = [sys.executable, "-c", HOLD, str(cache.path), cache.header.decode()]
    holder = subprocess.Popen(hold, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
    command = [sys.executable, "-c", SCAN, counted.url, str(tmp_path / "cache")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    while sum(is_waiting(rank.pid) for rank in ranks) < 4:
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.05)
    holder.kill()
    holder.communicate(timeout=200)
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert all("[3, 8, 1]" in output for output in outputs)
    assert sum("selects 12 of 15 samples" in output for output in outputs) == 1


def is_waiting(pid: int) -> bool:
    """Return whether a process has the lock file open and is therefore waiting for the lock."""
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            if str(file.readlink()).endswith(".lock"):
                return True
    return False
