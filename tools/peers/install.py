"""The peers' environment, with one command: a virtual environment with what the benchmarks compare streamvid with.

    python tools/peers/install.py [--dir .peers]

Versions are pinned in requirements.txt and constraints.txt. torchcodec brings no FFmpeg: it gets PyAV's (the same
build that streamvid decodes with), as DIR/ffmpeg, a folder of links with the names that it looks for. At the end it
prints which peers run here, and why others do not; exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
_LIBRARY = re.compile(r"(?P<name>lib(?:av|sw)\w+?)-[0-9a-f]+\.so\.(?P<major>\d+)(?:\.\d+)*$")


def install(folder: Path) -> None:
    """Makes or completes the environment."""
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "-c", str(HERE / "constraints.txt"), "-r", str(HERE / "requirements.txt")], check=True)
    found = sorted(folder.glob("lib/python3*/site-packages/av.libs"))
    if found:
        link_ffmpeg(found[0], folder / "ffmpeg")


def link_ffmpeg(libraries: Path, folder: Path) -> None:
    """Links to PyAV's libraries under their own names, and FFmpeg's under their plain ones too."""
    folder.mkdir(exist_ok=True)
    for link in folder.iterdir():
        link.unlink()
    for library in sorted(libraries.resolve().iterdir()):
        (folder / library.name).symlink_to(library)
        match = _LIBRARY.match(library.name)
        if match:
            (folder / f"{match['name']}.so.{match['major']}").symlink_to(library.name)


def report(folder: Path) -> int:
    """Prints what there is; the number of methods that do not run."""
    python, count = str(folder / "bin" / "python"), 0
    for module in ("tools.peers.decode", "tools.peers.loader"):
        line = json.dumps({"method": "versions"}) + "\n"
        done = subprocess.run(
            [python, "-m", module], input=line, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
        )
        found = json.loads(done.stdout)
        print(f"{module}: " + ", ".join(f"{name} {number}" for name, number in found["versions"].items()))
        for method, reason in found["missing"].items():
            print(f"  {method} does not run here: {reason}", file=sys.stderr)
        count += len(found["missing"])
    return count


def main() -> None:
    """Parse the command line, install, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=ROOT / ".peers", help="where the environment goes")
    folder = parser.parse_args().dir.absolute()
    install(folder)
    sys.exit(1 if report(folder) else 0)


if __name__ == "__main__":
    main()
