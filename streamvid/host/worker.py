"""Entry point of all worker processes, started by host/processes.py."""

from __future__ import annotations

import faulthandler
import importlib
import os
import select
import signal
import threading
from contextlib import suppress

SHOW_STACK = signal.SIGQUIT
"""Signal on which a worker writes its stack traces to standard error and continues. Call `show_stacks` first."""


def main(entry: str, parent_fd: str, socket_fd: str, *arguments: str) -> None:
    """Call the function `entry`, given as "module:function", with the socket's descriptor number and the arguments.

    All arguments are passed as text. The process ends immediately when its parent dies or the other end of the socket
    is closed.
    """
    # The parent handles Ctrl-C and the signals that schedulers send to each process of a job long before its end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, SHOW_STACK):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(int(parent_fd), int(socket_fd)), daemon=True).start()
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(socket_fd, *arguments)


def show_stacks() -> None:
    """Make this process write its stack traces to standard error on a crash and on the SHOW_STACK signal."""
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
