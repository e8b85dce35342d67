"""Files that ship with the package: in `_shipped/` of a wheel, and at their usual place in a checkout."""

from __future__ import annotations

from pathlib import Path

from streamvid.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent
_SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py")
_IN_CHECKOUT = {"make_corpus.py": "tools/make_corpus.py", "configs": "configs"}


def shipped(name: str) -> Path:
    """Return the path of a shipped file or folder, e.g. `configs/train/tiny.yaml`. Raise ConfigError if missing."""
    first, _, rest = name.partition("/")
    for place in (_PACKAGE / "_shipped" / first, _PACKAGE.parent / _IN_CHECKOUT[first]):
        path = place / rest if rest else place
        if path.exists():
            return path
    raise ConfigError(f"{name} is missing from this installation of streamvid; install it again")


def shipped_config(kind: str, name: str | Path) -> Path:
    """Return a config file: the given path if it is a file, else the shipped preset of that name, e.g. `tiny`."""
    path = Path(name)
    # Names of presets may contain dots, such as wan2.1-480p; a folder with a preset's name does not count.
    if path.is_file() or len(path.parts) != 1 or path.suffix in _SUFFIXES:
        return path
    presets = sorted(shipped(f"configs/{kind}").glob("*.yaml"))
    for preset in presets:
        if preset.stem == path.name:
            return preset
    raise ConfigError(
        f"config {str(name)!r} is neither a file nor a preset; presets: {', '.join(p.stem for p in presets)}. "
        "Use the path of a YAML file or one of these"
    )
