"""Paths of the files that ship with the package. A wheel contains these files in `_shipped/`."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from streamvid.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent
_SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py")
_IN_CHECKOUT = {"make_corpus.py": "tools/make_corpus.py", "configs": "configs"}


def shipped(name: str) -> Path:
    """Return the path of a file or folder that ships with streamvid, such as `configs/train/tiny.yaml`.

    Raises ConfigError if the file or folder is missing.
    """
    first, _, rest = name.partition("/")
    for place in (_PACKAGE / "_shipped" / first, _PACKAGE.parent / _IN_CHECKOUT[first]):
        path = place / rest if rest else place
        if path.exists():
            return path
    raise ConfigError(f"{name} is missing from this installation of streamvid; reinstall streamvid")


def shipped_config(kind: str, name: str | Path) -> Path:
    """Return `name` if it is a path, otherwise the path of the preset `name`.

    Raises ConfigError if the preset does not exist.
    """
    path = Path(name)
    # Only known suffixes mark a path, because the name of a preset, such as wan2.1-480p, may contain a dot. A folder
    # with the name of a preset is ignored.
    if path.is_file() or len(path.parts) != 1 or path.suffix in _SUFFIXES:
        return path
    presets = sorted(shipped(f"configs/{kind}").glob("*.yaml"))
    for preset in presets:
        if preset.stem == path.name:
            return preset
    names = [preset.stem for preset in presets]
    near = get_close_matches(path.name, names, n=1)
    raise ConfigError(
        f"config {str(name)!r} is neither a file nor a preset; presets: {', '.join(names)}. "
        f"Use the path to a YAML file or one of these presets{f' (did you mean {near[0]!r}?)' if near else ''}"
    )
