"""Common start of all worker processes: the first code that host/processes.py runs in them."""

from __future__ import annotations

import faulthandler
import importlib
import os
import select
import signal
import threading
from contextlib import suppress

SHOW_STACK = signal.SIGQUIT
"""Signal that makes a worker that called `show_stacks` write its stack to the error stream and continue."""


def main(entry: str, parent_fd: str, socket_fd: str, *arguments: str) -> None:
    """Call `entry` ("module:function") with the socket's number and the arguments, all as text.

    The process ends, whatever it is doing, when its parent dies or the other end of the socket is closed.
    """
    # Ctrl-C, and signals that schedulers send to each process of a job long before its end, are for the parent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, SHOW_STACK):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(int(parent_fd), int(socket_fd)), daemon=True).start()
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(socket_fd, *arguments)


def show_stacks() -> None:
    """From now on, write stacks to the error stream on a crash and on SHOW_STACK."""
    with suppress(RuntimeError, ValueError, OSError):  # a caller without an error stream
        faulthandler.enable()
        faulthandler.register(SHOW_STACK)


def _end_with_parent(parent_fd: int, socket_fd: int) -> None:
    # Use a separate thread, because one that is stuck in C code never looks at its socket. Watch the parent in addition
    # to the socket, whose other end may be open in processes that the parent forked.
    poller = select.poll()
    poller.register(socket_fd, 0)
    if parent_fd >= 0:
        poller.register(parent_fd, select.POLLIN)
    poller.poll()
    os._exit(1)
