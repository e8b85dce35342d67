"""Files that travel with the package: inside a wheel in `_shipped/`, in a checkout where they are written."""

from __future__ import annotations

from pathlib import Path

from streamvid.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent
_SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py")
_IN_CHECKOUT = {"make_corpus.py": "tools/make_corpus.py", "configs": "configs"}


def shipped(name: str) -> Path:
    """The path of a shipped file or folder, e.g. `configs/train/tiny.yaml`. ConfigError where it is missing."""
    first, _, rest = name.partition("/")
    for place in (_PACKAGE / "_shipped" / first, _PACKAGE.parent / _IN_CHECKOUT[first]):
        path = place / rest if rest else place
        if path.exists():
            return path
    raise ConfigError(f"{name} is missing from this installation of streamvid; install it again")


def shipped_config(kind: str, name: str | Path) -> Path:
    """A config file: the path given where there is a file, else the shipped preset of that name, e.g. `tiny`."""
    path = Path(name)
    # Presets have dots in their names, as wan2.1-480p; and a folder that is called like one is not what is meant.
    if path.is_file() or len(path.parts) != 1 or path.suffix in _SUFFIXES:
        return path
    presets = sorted(shipped(f"configs/{kind}").glob("*.yaml"))
    for preset in presets:
        if preset.stem == path.name:
            return preset
    raise ConfigError(
        f"config {str(name)!r} is no file and no preset; presets: {', '.join(p.stem for p in presets)}. "
        "Give a path to a YAML file or one of these"
    )
