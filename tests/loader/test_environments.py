"""Tests of STOP-1 and memory in notebooks, with a small /dev/shm, without writable files, and with little memory."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamvid.buckets.bucket import Bucket
from streamvid.errors import StreamvidError
from tests.loader.conftest import build_dataset, open_loader
from tests.processes import run_python, wait_for_end

LARGE = Bucket(num_frames=17, height=480, width=848)  # 20 MB per sample


@pytest.fixture(scope="module")
def large_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_dataset(tmp_path_factory.mktemp("large"), {LARGE: [3, 2]}, variants=1)


@pytest.mark.parametrize("decode", [True, False])
def test_decode_workers_receive_no_credentials(
    large_dataset: Path, monkeypatch: pytest.MonkeyPatch, decode: bool
) -> None:
    """SAFE-1: a hostile clip that takes over a decoder finds no credentials.

    The loader itself reads stores that need them.
    """
    secrets = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "canary")
    with open_loader(large_dataset, batch_size=1, num_workers=2, output={"decode": decode}) as loader:
        next(iter(loader))
        environments = [Path(f"/proc/{pid}/environ").read_text() for pid in loader.worker_pids]
    assert len(environments) == 2
    assert all("PATH=" in text and "canary" not in text for text in environments)


# ---------------------------------------------------------------------------------------------- notebooks

SETUP = """
import threading, psutil, streamvid
me = psutil.Process()
def left():
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("streamvid"))
    return [child.pid for child in me.children()], names
with streamvid.VideoLoader(ROOT, batch_size=1, num_workers=2) as loader:
    expected = [batch.sample_keys[0] for batch in loader]
assert left() == ([], []), left()
"""
LOOP = """
import time
loader = streamvid.VideoLoader(ROOT, batch_size=1, num_workers=2)
keys = []
for batch in loader:
    keys.append(batch.sample_keys[0])
    if len(keys) == 3:
        print("streaming", *loader.worker_pids, flush=True)
    time.sleep(SECONDS)
"""


class Notebook:
    """Real IPython kernel, as used by a notebook."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import KernelManager

        places = ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")
        self.environment = {**os.environ, **dict.fromkeys(places, str(folder))}
        self.manager = KernelManager(connection_file=str(folder / "kernel.json"))
        self.manager.start_kernel(env=self.environment, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr, attr-defined]

    def run(self, code: str) -> dict[str, Any]:
        """Run a cell to its end and return the kernel's reply."""
        return dict(self.client.execute_interactive(code, timeout=60, output_hook=lambda message: None)["content"])

    def begin(self, code: str) -> str:
        """Start a cell and return the first line that it prints; `finish` waits for its end."""
        # After an error, a kernel aborts requests that arrive too soon, unless the cell disables this.
        self.cell = self.client.execute(code, stop_on_error=False)
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") == self.cell:
                assert message["msg_type"] != "error", message["content"]
                if message["msg_type"] == "stream":
                    return str(message["content"]["text"])

    def finish(self) -> dict[str, Any]:
        while True:
            reply = self.client.get_shell_msg(timeout=60)
            if reply["parent_header"].get("msg_id") == self.cell:
                return dict(reply["content"])

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.close()


def test_a_notebook_cell_is_interrupted_and_run_again(dataset: Path, notebook: Notebook) -> None:
    """STOP-1: the interrupt ends the loop at once.

    The same cell then delivers the whole epoch, and nothing accumulates.
    """
    assert notebook.run(f"ROOT = {str(dataset)!r}\n{SETUP}")["status"] == "ok"
    old: list[int] = []
    for _ in range(3):
        said = notebook.begin(LOOP.replace("SECONDS", "0.5"))
        workers = [int(pid) for pid in said.split()[1:]]
        assert wait_for_end(old) == []  # the cell has replaced its loader
        notebook.manager.interrupt_kernel()
        assert notebook.finish()["ename"] == "KeyboardInterrupt"
        old = workers
    # The interrupted loader is usable, and a new loop delivers the epoch from its start.
    reply = notebook.run("assert [batch.sample_keys[0] for batch in loader] == expected")
    assert reply["status"] == "ok", reply
    reply = notebook.run(LOOP.replace("SECONDS", "0") + "\nassert keys == expected\nloader.close()\nbatch = None")
    assert reply["status"] == "ok", reply
    reply = notebook.run("import gc\ngc.collect()\nassert left() == ([], []), left()")
    assert reply["status"] == "ok", reply


@pytest.mark.parametrize("how", [pytest.param("restart", marks=pytest.mark.slow), "shutdown"])
def test_workers_end_with_their_kernel(dataset: Path, notebook: Notebook, how: str) -> None:
    """STOP-1: the kernel is restarted or shut down in the middle of a cell."""
    assert notebook.run(f"ROOT = {str(dataset)!r}\n{SETUP}")["status"] == "ok"
    workers = [int(pid) for pid in notebook.begin(LOOP.replace("SECONDS", "0.5")).split()[1:]]
    assert len(workers) == 2
    if how == "restart":
        notebook.manager.restart_kernel(now=True)
    else:
        notebook.manager.shutdown_kernel(now=False)
    assert wait_for_end(workers) == []


# ---------------------------------------------------------------------------------------------- memory

# Audit hook that forbids all writes, in the caller and, through sitecustomize, in its workers.
READ_ONLY = """
import os, sys
def refuse(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (writes and str(arguments[0]) != os.devnull) or event in ("os.mkdir", "os.rename", "tempfile.mkstemp"):
        os.write(2, f"{event} {arguments}\\n".encode())
        os._exit(99)
sys.addaudithook(refuse)
"""
STREAM = """
import os, sys, streamvid
import torch
keys = []
with streamvid.VideoLoader(sys.argv[1], batch_size=int(sys.argv[2]), num_workers=2) as loader:
    for batch in loader:
        keys += batch.sample_keys
        pixels = batch.video.numel()
    workers = loader.worker_pids
print(len(set(keys)), pixels, os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
"""


def test_batches_larger_than_dev_shm(large_dataset: Path) -> None:
    """Docker limits /dev/shm to 64 MB, but batches of 99 MB are delivered.

    Without permission to mount, the test does not set this limit.
    """
    mount = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]
    mount += ['mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "-"]
    can_mount = subprocess.run([*mount, "true"], capture_output=True, check=False, timeout=20).returncode == 0
    before = set(Path("/dev/shm").iterdir())
    prefix = mount if can_mount else []
    num_keys, pixels, shm_bytes = map(int, run_python(STREAM, large_dataset, 5, prefix=prefix).stdout.split())
    assert num_keys == 5 and pixels == 5 * 17 * 480 * 848 * 3 > 64 * 2**20
    assert shm_bytes == 64 * 2**20 or not can_mount
    assert set(Path("/dev/shm").iterdir()) <= before


def test_a_read_only_environment(dataset: Path, tmp_path: Path) -> None:
    """In a container with a read-only root, no process opens a file for writing, or creates or renames one."""
    (tmp_path / "sitecustomize.py").write_text(READ_ONLY)
    environment = {k: v for k, v in os.environ.items() if k not in ("TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME")}
    environment |= {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"HOME": "/nowhere", "TMPDIR": "/nowhere"}
    with pytest.raises(AssertionError, match="open"):
        run_python("open('x', 'w')", env=environment, cwd=tmp_path)
    assert run_python(STREAM, dataset, 1, env=environment).stdout.startswith("23 ")


def test_a_worker_without_memory_is_an_error_and_not_a_bad_sample(large_dataset: Path) -> None:
    """STOP-1, BAD-1: a frame exceeds the memory limit.

    The error is raised within seconds, and no good sample is replaced.
    """
    for spare in (0, 1, 2, 4, 8):
        with open_loader(large_dataset, num_workers=2, num_epochs=None, limits={"prefetch_bytes": 0}) as loader:
            iterator = iter(loader)
            next(iterator)
            pids = list(loader.worker_pids)
            for pid in pids:
                size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
                resource.prlimit(pid, resource.RLIMIT_AS, (size + spare * 2**20, -1))
            with pytest.raises(StreamvidError, match="out of memory"):
                for _ in range(100):
                    assert not next(iterator).is_repeat.any(), "a good sample was replaced"
        assert wait_for_end(pids) == []


# ---------------------------------------------------------------------------------------------- loops


def test_loops_over_several_loaders_interleave(dataset: Path) -> None:
    """One loop is abandoned and restarted, one continues, and one loader is created and closed in between."""
    with (
        open_loader(dataset, num_workers=1, seed=1) as one,
        open_loader(dataset, batch_size=2, seed=2) as other,
    ):
        expected = [[batch.sample_keys for batch in loader] for loader in (one, other)]
        one.set_epoch(0)
        other.set_epoch(0)
        assert [next(iter(one)).sample_keys for _ in range(3)] == expected[0][:1] * 3
        seen = []
        for batch in one:
            seen.append(batch.sample_keys)
            if len(seen) % 7 == 0:
                with open_loader(dataset, num_workers=1, seed=1) as third:
                    assert next(iter(third)).sample_keys == expected[0][0]
                assert [batch.sample_keys for batch in other] == expected[1]
                other.set_epoch(0)
        assert seen == expected[0]


def test_cloned_batches_outlive_the_loader(dataset: Path) -> None:
    """BATCH-1: the ring has room for three batches, and the clones are read after the loader has closed."""
    with open_loader(dataset, num_workers=2, limits={"prefetch_bytes": 0}) as loader:
        clones = [batch.clone() for batch in loader]
        loader.set_epoch(0)
        sums = [int(batch.video.sum()) for batch in loader]
    assert [int(batch.video.sum()) for batch in clones] == sums and len(sums) == 23


def test_a_thread_that_ends_with_its_loader_open(dataset: Path) -> None:
    """STOP-1: a server's request thread may fail within a loop.

    Nothing of the loader remains once the error has been freed.
    """
    pids: list[int] = []

    def work() -> None:
        loader = open_loader(dataset, num_workers=1, num_epochs=None)
        for batch in loader:
            pids.extend(loader.worker_pids)
            assert batch is None

    failed: list[type[BaseException] | None] = []
    hook, threading.excepthook = threading.excepthook, lambda args: failed.append(args.exc_type)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
    finally:
        threading.excepthook = hook
    gc.collect()
    assert failed == [AssertionError] and len(pids) == 1
    assert wait_for_end(pids) == []
