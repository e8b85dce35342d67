"""Fixture for the clips of this room's tests, made once per session."""

from __future__ import annotations

import pytest

from tests.video.clips import ClipFolder


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> ClipFolder:
    """Function `clip(name)` that returns the path of a clip of tests/video/clips.py."""
    return ClipFolder(tmp_path_factory.mktemp("clips"))
