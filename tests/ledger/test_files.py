"""Tests of a ledger's files: a kill loses nothing already written, and damaged or hostile files are safe to read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.errors import SourceError, StorageError
from streamvid.ledger.frames import MAX_JSON_BYTES, frame, read_frames
from streamvid.ledger.history import read_history
from streamvid.ledger.log import RankLog
from streamvid.ledger.records import LoggedBatch, LoggedSample, LoopStart, Position
from streamvid.ledger.writer import LedgerWriter

PLAN = {"num_ranks": 1}
START = {"epoch": 0, "positions": {"b": 0}, "step": 0}

integers = st.integers(-(2**63), 2**63 - 1)
keys = st.text(min_size=1, max_size=20)
samples = st.builds(
    LoggedSample, st.integers(0, 9), keys, integers, integers, integers, keys, st.booleans(), st.none() | keys
)
batches = st.builds(
    LoggedBatch,
    st.builds(Position, st.integers(0, 2**30), st.integers(0, 2**53)),
    st.lists(samples, max_size=5).map(tuple),
)
fields = st.sampled_from(
    [
        "n",
        "cursor",
        "seconds",
        "again",
        "epoch",
        "step",
        "epochs",
        "steps",
        "sizes",
        "datasets",
        "keys",
        "visits",
        "starts",
        "strides",
        "captions",
        "repeats",
        "substituted",
        "urls",
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(fields, inner, max_size=8),
    max_leaves=12,
)


def batch(step: int, num_samples: int = 4) -> LoggedBatch:
    slots = (
        LoggedSample(0, f"{step * 7919 % 1000:04}-{slot}", step // 9, step % 13, 1, "text")
        for slot in range(num_samples)
    )
    return LoggedBatch(Position(0, step), tuple(slots))


def written(folder: Path, several: Sequence[LoggedBatch]) -> LedgerWriter:
    writer = LedgerWriter(folder, 0, ["ds"])
    writer.begin(PLAN, START, is_again=False)
    for one in several:
        writer.add(one)
    return writer


def read(session: Path) -> list[LoggedBatch]:
    return [one for one in RankLog(session, 0).records() if isinstance(one, LoggedBatch)]


@settings(max_examples=60)
@given(several=st.lists(batches, max_size=6), is_closed=st.booleans())
def test_written_batches_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, several: list[LoggedBatch], is_closed: bool
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    writer = written(folder, several)
    if is_closed:
        writer.close()
        writer.close()
    assert read(folder / "session-000001") == several
    writer.close()
    assert read(folder / "session-000001") == several


def test_a_kill_at_any_byte_of_the_tail_loses_only_the_last_batch(tmp_path: Path) -> None:
    writer = written(tmp_path, [])
    session = tmp_path / "session-000001"
    tail, several, ends = session / "rank-00000.tail", [batch(step) for step in range(5)], [0]
    for one in several:
        writer.add(one)
        ends.append(tail.stat().st_size)
    data = tail.read_bytes()
    for cut in range(len(data) + 1):
        tail.write_bytes(data[:cut])
        assert read(session) == several[: sum(end <= cut for end in ends) - 1]


def test_a_kill_at_any_byte_of_a_block_loses_nothing(tmp_path: Path) -> None:
    """The block's batches are still in the tail, which is emptied only after the block is complete."""
    several = [batch(step, 300) for step in range(4)]
    writer = written(tmp_path, several[:3])
    session = tmp_path / "session-000001"
    log, tail = session / "rank-00000.ledger", session / "rank-00000.tail"
    before, kept = log.stat().st_size, tail.read_bytes()
    writer.add(several[3])
    data = log.read_bytes()
    assert before < len(data) and not tail.read_bytes(), "a block is written after 1,024 samples"
    tail.write_bytes(kept)
    for cut in (*range(before, before + 40), *range(before, len(data), 101), len(data) - 1):
        log.write_bytes(data[:cut])
        assert read(session) == several[:3], cut
    log.write_bytes(data)
    assert read(session) == several, "batches in both files count once"


def test_damage_never_raises_an_error_or_invents_batches(tmp_path: Path) -> None:
    several = [batch(step) for step in range(6)]
    written(tmp_path, several).close()
    session = tmp_path / "session-000001"
    log = session / "rank-00000.ledger"
    data = log.read_bytes()
    for place in range(len(data)):
        log.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        found = read(session)
        assert found == several[: len(found)]


@settings(max_examples=200)
@given(st.lists(values, max_size=4), st.booleans())
def test_forged_frames_are_read_safely(
    tmp_path_factory: pytest.TempPathFactory, forged: list[Any], packed: bool
) -> None:
    """SAFE-1: frames with valid checksums and arbitrary content."""
    session = tmp_path_factory.mktemp("session")
    data = b"".join(frame(one, is_compressed=packed) for one in forged)
    (session / "rank-00000.ledger").write_bytes(data)
    for record in RankLog(session, 0).records():
        assert isinstance(record, LoggedBatch | LoopStart)
        assert record.position >= Position(-(2**80), 0)


def test_a_frame_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    """SAFE-1: the limit applies before memory is allocated."""
    stored = b"z" + zlib.compress(b'"' + b"x" * (MAX_JSON_BYTES + 1) + b'"')
    head = len(stored).to_bytes(4, "little") + zlib.crc32(stored).to_bytes(4, "little")
    (tmp_path / "bomb").write_bytes(head + stored)
    with (tmp_path / "bomb").open("rb") as file:
        assert list(read_frames(file)) == []


def test_ranks_of_a_run_share_a_session_and_later_runs_do_not(tmp_path: Path) -> None:
    for _ in range(2):
        for rank in (1, 0):
            writer = LedgerWriter(tmp_path, rank, ["ds"])
            writer.begin({"num_ranks": 2}, START, is_again=False)
            writer.add(batch(0))
            writer.close()
    written(tmp_path, [batch(0)]).close()
    names = [sorted(path.name for path in folder.iterdir()) for folder in sorted(tmp_path.iterdir())]
    ranks = ["rank-00000.ledger", "rank-00001.ledger", "session.json"]
    assert names == [ranks, ranks, ["rank-00000.ledger", "session.json"]]


def test_errors_name_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"contains no ledger; pass the folder that was set as output\.ledger"):
        read_history(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"output\.ledger: cannot write to .*; free space there, or choose"):
        written(tmp_path / "file", [])
    written(tmp_path / "ledger", [batch(0)]).close()
    session = tmp_path / "ledger" / "session-000001" / "session.json"
    whole = session.read_text()
    for text, match in (("{", "is damaged; remove the folder"), ('{"version": 2}', "is damaged"), ("[]", "is damaged")):
        session.write_text(text)
        with pytest.raises(SourceError, match=match):
            read_history(tmp_path / "ledger")
    session.write_text(whole.replace('"version": 1', '"version": 2'))
    with pytest.raises(
        SourceError, match="version 2 of the ledger format, but this version of streamvid reads only version 1"
    ):
        read_history(tmp_path / "ledger")
