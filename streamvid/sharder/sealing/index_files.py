"""Names of the index files that a build writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeAlias

from streamvid.dataset.index import named_by_content
from streamvid.dataset.manifest import FileInfo, ManifestFiles

Kind: TypeAlias = Literal["samples", "packets", "shards", "rejections", "columns"]
NO_FILES = ManifestFiles((), (), ())


class IndexFiles:
    """Writer for a build's index files. Their numbers follow those of the dataset's existing files."""

    def __init__(self, put: Callable[[str, bytes], None], there: ManifestFiles) -> None:
        """Create a writer. put: function that stores a file. there: files that the dataset already contains."""
        self.put = put
        # index/samples-00000-<hash>.parquet → samples
        self._counts = Counter(file.path.split("/")[-1].split("-")[0] for file in there)

    def number(self, kind: str) -> int:
        """Return the number for the next file of this kind."""
        return self._counts[kind]

    def add(self, kind: Kind, data: bytes, extension: str = "parquet") -> FileInfo:
        """Store a file and return its description."""
        file = named_by_content(kind, self.number(kind), data, extension)
        self.put(file.path, data)
        self._counts[kind] += 1
        return file
