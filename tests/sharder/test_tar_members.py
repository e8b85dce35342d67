"""Tests of third-party tars: the members equal those found by Python's tarfile, and damaged tars are only rejected."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamvid.errors import Rejected
from streamvid.sharder.source.tar_members import MAX_HEADER_BYTES, TarMember, tar_members

names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=160
)
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
KINDS = (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)


class Counted:
    """Tar that records the largest read and asserts that each read starts inside it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.most = data, 0

    def __call__(self, offset: int, num_bytes: int) -> bytes:
        assert 0 <= offset < len(self.data) + 512 and num_bytes >= 0  # padding of the last member may be missing
        self.most = max(self.most, num_bytes)
        return self.data[offset : offset + num_bytes]


def members_of(data: bytes) -> tuple[list[TarMember], str]:
    """Return the members and the error that ended the reading, if any."""
    found: list[TarMember] = []
    read = Counted(data)
    try:
        for member in tar_members(read, len(data)):
            assert 0 <= member.offset <= member.offset + member.num_bytes <= len(data)
            found.append(member)
    except Rejected as error:
        return found, str(error)
    assert read.most <= MAX_HEADER_BYTES
    return found, ""


@settings(max_examples=150)
@example([("./0", b"x", tarfile.REGTYPE)], tarfile.USTAR_FORMAT)
@given(
    st.lists(st.tuples(names, st.binary(max_size=1500), st.sampled_from(KINDS)), max_size=6), st.sampled_from(FORMATS)
)
def test_members_equal_those_found_by_tarfile(entries: list[tuple[str, bytes, bytes]], kind: int) -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=kind, encoding="utf-8") as file:
        for name, data, entry in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = entry, "somewhere" * 30 if kind != tarfile.USTAR_FORMAT else "x"
            info.size = len(data) if entry == tarfile.REGTYPE else 0
            try:
                file.addfile(info, io.BytesIO(data))
            except ValueError:  # the name is too long for ustar
                continue
    data = sink.getvalue()
    expected = []
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8") as file:
        for info in file:
            if not info.isdir():
                expected.append(
                    (info.name, data[info.offset_data : info.offset_data + info.size] if info.isreg() else b"")
                )
    found, problem = members_of(data)
    assert problem == ""
    shown = [(member.name, data[member.offset : member.offset + member.num_bytes]) for member in found]
    # tarfile strips trailing slashes; members named like folders are skipped. "tar c ." writes names with "./".
    named = [(name.removeprefix("./"), content) for name, content in expected if not name.endswith("/")]
    assert [pair for pair in shown if pair in named] == shown


def plain(count: int = 4) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as file:
        for number in range(count):
            info = tarfile.TarInfo(f"é{number}" + "n" * 120)
            info.size, info.mtime = 700, 1.5
            file.addfile(info, io.BytesIO(bytes([number + 1]) * 700))
    return sink.getvalue()


@settings(max_examples=300)
@given(st.data())
def test_damaged_tars_are_rejections_and_nothing_else(draw: st.DataObject) -> None:
    """SAFE-1: changed or truncated bytes cause no other error, no read outside the tar, and no endless loop."""
    data = bytearray(plain())
    for _ in range(draw.draw(st.integers(1, 8))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    members_of(bytes(data[: draw.draw(st.integers(0, len(data)))]))


@given(st.integers(0, 12000))
def test_a_truncated_tar_is_an_error(end: int) -> None:
    """SHARD-3: a truncated tar is never mistaken for a complete one."""
    whole = plain()
    last = len(whole.rstrip(b"\0"))
    end = min(end, last - 1)
    found, problem = members_of(whole[:end])
    assert "truncated" in problem and len(found) < 4


def test_headers_cannot_ask_for_much() -> None:
    """SAFE-1: sizes beyond the file, negative sizes, and names of gigabytes are refused."""
    block = bytearray(tarfile.TarInfo("a.mp4").tobuf(tarfile.GNU_FORMAT))

    def sized(field: bytes, kind: bytes = b"0") -> bytes:
        block[124:136], block[156:157] = field, kind
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block) + bytes(2 * 512)

    assert "before the end of 'a.mp4'" in members_of(sized(b"77777777777\0"))[1]
    assert "no valid tar header" in members_of(sized(b"\xff" * 12))[1]
    assert "before the end of 'a.mp4'" in members_of(sized(b"\x80" + b"\xff" * 11))[1]
    name = sized(b"%011o\0" % (MAX_HEADER_BYTES + 1), b"L")
    assert "allowed" in members_of(name + bytes(MAX_HEADER_BYTES))[1]
    sparse = sized(b"%011o\0" % 512, b"S")
    assert "--sparse" in members_of(sparse)[1]


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\x1f\x8b" + bytes(600), bytes(1024)])
def test_data_that_is_not_a_tar_has_no_members(data: bytes) -> None:
    found, problem = members_of(data)
    assert found == [] and (bool(problem) or data == bytes(1024))
