"""Tests of docker/: the content of the image, and the commands of the compose file, run without containers."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml
from botocore.configprovider import BOTOCORE_DEFAUT_SESSION_VARIABLES as KNOWN_TO_BOTOCORE

from streamvid.cli.main import cli
from streamvid.config import load_config
from streamvid.shipped import shipped_config
from streamvid.storage import open_store
from streamvid.trainer.config import TrainConfig
from tests.conftest import Corpus
from tests.processes import run_command
from tests.servers import S3Env, S3Server

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"
# From the compose specification: https://github.com/compose-spec/compose-spec/blob/main/05-services.md
SERVICE_KEYS = {
    *("image", "build", "init", "read_only", "tmpfs", "cap_drop", "security_opt", "healthcheck", "depends_on"),
    *("environment", "entrypoint", "command", "volumes"),
}
HEALTH_KEYS = {"test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
CREDENTIALS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


def compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    return read


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile as (instruction, arguments), with continuation lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1].strip()) for line in text.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage; the key "" is the last stage, the image itself."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, arguments in instructions():
        if name == "FROM":
            current = found.setdefault(arguments.partition(" AS ")[2], [])
        elif found:
            current.append((name, arguments))
    assert next(reversed(found)) == ""
    return found


def test_hadolint_finds_nothing_wrong() -> None:
    run_command([str(Path(sys.executable).with_name("hadolint")), "--no-color", str(DOCKERFILE)])


def test_images_run_without_privileges_and_hold_no_secrets() -> None:
    """SAFE-1: the images run as user 1000, and no build argument or variable holds a secret."""
    for name in ("s3", ""):
        users = [arguments for instruction, arguments in stages()[name] if instruction == "USER"]
        assert users == ["1000:1000"]
    for instruction, arguments in instructions():
        if instruction in ("ARG", "ENV"):
            assert not re.search("KEY|SECRET|TOKEN|PASS|AWS", arguments), arguments
    assert ("ENTRYPOINT", '["streamvid"]') in stages()[""]


def test_copied_files_exist_and_are_not_ignored() -> None:
    allowed = [line[1:] for line in Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        arguments.split()[:-1] for name, arguments in instructions() if name == "COPY" and "--from" not in arguments
    ]
    assert copied
    for path in (path for paths in copied for path in paths):
        assert (ROOT / path).exists() and any(fnmatch(path, pattern) for pattern in allowed), path


def test_the_compose_file_is_consistent() -> None:
    """All services, volumes, stages, build arguments and hosts that the file refers to exist."""
    file = compose()
    services = file["services"]
    assert {name for name in file if not name.startswith("x-")} == {"name", "services", "volumes"}
    declared = {arguments.partition("=")[0] for name, arguments in instructions() if name == "ARG"}
    for name, service in services.items():
        assert service.keys() <= SERVICE_KEYS, name
        build = service["build"]
        assert (ROOT / "docker" / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
        assert build.get("target", "") in stages() and build.get("args", {}).keys() <= declared
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in file["volumes"]
        for other, how in service.get("depends_on", {}).items():
            assert other in services and how["condition"] in CONDITIONS
            assert how["condition"] != "service_healthy" or services[other]["healthcheck"].keys() <= HEALTH_KEYS
        assert all(isinstance(value, str) for value in service.get("environment", {}).values())
        host = urlsplit(service.get("environment", {}).get("AWS_ENDPOINT_URL", "http://s3:5000"))
        assert host.hostname in services


def test_variables_of_the_compose_file_are_used() -> None:
    """Every environment variable is known to botocore or streamvid; a misspelled one would be ignored silently."""
    botocore = {name for entry in KNOWN_TO_BOTOCORE.values() for name in _listed(entry[1])}
    known = botocore | CREDENTIALS | {"AWS_ENDPOINT_URL", "AWS_REGION", "XDG_CACHE_HOME"}
    ours = "".join(path.read_text() for path in (ROOT / "streamvid").rglob("*.py"))
    for service in compose()["services"].values():
        for name in service.get("environment", {}):
            assert name in known and (name in botocore or name in ours)


def _listed(names: object) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["sharder", "trainer"])
def test_commands_are_verbs_with_their_flags(name: str) -> None:
    verb, *arguments = compose()["services"][name]["command"]
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    given = command.make_context(verb, list(arguments)).params  # raises for unknown flags
    if name == "trainer":
        config = load_config(TrainConfig, shipped_config("train", given["config"]), given["overrides"])
        assert config.data.dataset == compose()["services"]["sharder"]["command"][2]


@pytest.mark.slow
def test_the_commands_of_the_compose_file_work(
    corpus: Corpus, moto_server: S3Server, s3_env: S3Env, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its commands work in their order; only paths, endpoint and number of steps are changed."""
    s3_env(moto_server)
    port = moto_server.endpoint_url.rpartition(":")[2]
    data, home = tmp_path / "data", tmp_path / "home"
    data.mkdir()
    (data / "corpus").symlink_to(corpus.root)
    places = {
        "http://s3:5000": f"http://localhost:{port}",  # a host name without dots, like the service's
        "127.0.0.1:5000": f"127.0.0.1:{port}",
        "/opt/streamvid/make_corpus.py": str(ROOT / "tools" / "make_corpus.py"),
        "/data/": f"{data}/",
    }

    def run(argv: list[str], environment: dict[str, str]) -> str:
        there = {name: _placed(value, places) for name, value in environment.items()}
        argv = [sys.executable if part == "python" else _placed(part, places) for part in argv]
        done = run_command(argv, cwd=tmp_path, env={**os.environ, "HOME": str(home), **there})
        return done.stdout

    services = compose()["services"]
    bucket = urlsplit(services["sharder"]["command"][2]).netloc
    assert services["s3"]["healthcheck"]["test"][0] == "CMD"
    run(services["s3"]["healthcheck"]["test"][1:], {})
    for _ in range(2):  # each `up` runs it again
        run(services["bucket"]["entrypoint"], services["bucket"]["environment"])
    run([*services["corpus"]["entrypoint"], f"{corpus.root}"], {})  # exists already, so nothing is built
    assert services["corpus"]["command"] == [services["sharder"]["command"][1]]
    ours = [sys.executable, "-m", "streamvid"]
    for said in ("\nsealed: ", "\nalready sealed"):
        assert said in run([*ours, *services["sharder"]["command"]], services["sharder"]["environment"])
    few = ["--set", "max_steps=2", "--set", "eval.num_batches=1"]
    run([*ours, *services["trainer"]["command"], *few], services["trainer"]["environment"])

    assert any((data / "run").glob("step-*.safetensors")) and any((data / "cache" / "blocks").iterdir())
    # In the containers, only /data and /tmp are writable.
    assert {path.name for path in tmp_path.iterdir()} <= {"data", "home"} and not home.exists()
    manifest = moto_server.read(bucket, "demo/manifest.json")
    assert moto_server.uploads(bucket) == [] and json.loads(manifest)
    # The server does not mistake the service's name for part of a bucket name.
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: real({"s3": "127.0.0.1"}.get(host, host), *rest, **more)
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://s3:{port}")
    assert open_store(f"s3://{bucket}/demo").read("manifest.json") == manifest


def _placed(text: str, places: dict[str, str]) -> str:
    for there, here in places.items():
        text = text.replace(there, here)
    return text
