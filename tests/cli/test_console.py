"""Tables in a pipe."""

from __future__ import annotations

import pytest

from streamvid.cli.console import ProgressBar, print_table, size


def test_a_piped_table_is_plain_text_of_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAFE-1: a cell moves no cursor, and means what it says."""
    monkeypatch.setenv("COLUMNS", "40")
    long = "/a/path/that/is/long/" * 20 + " and words " * 20 + "end"
    print_table(["bucket", "samples", "what"], [("a", 12, long), ("b", 3456, "[red]x[/red] \x1b[2J\n:smile:")])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown[:1]] == [["bucket", "samples", "what"]] and set(shown[1]) == {"-", " "}
    assert shown[2].split(maxsplit=2) == ["a", "12", long]
    assert shown[3].split() == ["b", "3456", "[red]x[/red]", r"\x1b[2J\n:smile:"]
    assert shown[2].index("12") + 2 == shown[3].index("3456") + 4
    assert not any("\x1b" in line or line != line.rstrip() for line in shown)


def test_piped_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as progress:
        for phase in ("probe", "build"):
            for done in range(50):
                progress(phase, done + 1, 50)
    assert capsys.readouterr().err.splitlines() == ["probe 1/50", "probe 50/50", "build 1/50", "build 50/50"]


def test_sizes_are_decimal() -> None:
    assert [size(number) for number in (1, 999, 12_345_678, 2 * 10**12)] == ["1 byte", "999 bytes", "12.3 MB", "2.0 TB"]
