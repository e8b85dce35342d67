"""Tests of files shipped with the package, which are found by name from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamvid.errors import ConfigError
from streamvid.shipped import shipped, shipped_config


def test_a_preset_is_found_by_name_and_a_file_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_config("train", "tiny").read_text().startswith("# ")
    (tmp_path / "tiny").write_text("dataset: x")
    assert shipped_config("train", "tiny") == Path("tiny")  # an existing file of that name takes precedence
    assert shipped_config("train", "missing/tiny.yaml") == Path("missing/tiny.yaml")  # reading it reports the error


def test_a_preset_has_dots_in_its_name_and_a_folder_of_its_name_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wan2.1-480p").mkdir()
    assert shipped_config("buckets", "wan2.1-480p").read_text().startswith("# ")
    assert shipped_config("buckets", "wan2.1-480p.yaml") == Path("wan2.1-480p.yaml")


def test_an_unknown_preset_is_answered_with_the_available_ones() -> None:
    with pytest.raises(ConfigError, match="'tny' is neither a file nor a preset; presets: tiny"):
        shipped_config("train", "tny")
    with pytest.raises(ConfigError, match=r"did you mean 'wan2\.1-480p'\?"):
        shipped_config("buckets", "wan2.1-480")
    with pytest.raises(ConfigError, match="reinstall streamvid"):
        shipped("configs/nothing.yaml")
