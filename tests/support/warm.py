"""Processes of this Python that begin with torch and fxpipe imported: a server forks them, so nobody waits for imports.

`Popen` is `subprocess.Popen`: a process has its own arguments (in /proc, too), environment, folder, descriptors and
session, is a child of the caller, and ends as Python does. It starts a real one where the difference could be seen:
for what Python or a library reads of the environment when it begins, or other programs. Where beginning is what is
tested, use `subprocess.Popen`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "fxpipe.cli.main",
    "fxpipe.lowering.lower",
    "fxpipe.runtime.process.launch",
    "fxpipe.runtime.process.start",
    "fxpipe.runtime.process.rank",
)
READ_AT_ONCE = (
    "PYTHON",
    "LC_",
    "LANG",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "CUDA_",
    "LD_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
)
"""Beginnings of the names of variables that are read when a process begins, or by imports."""

ROOM = 16384
"""Bytes for a command line in that of the server."""

_PR_SET_CHILD_SUBREAPER = 36


def heed_interrupts() -> None:
    """Before a command begins: Ctrl-C and a hangup are for it, also where the tests run where these are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Popen(subprocess.Popen[Any]):
    """A process that the server forks."""

    def _execute_child(self, *given: Any) -> None:
        args, _, prepare, _, pass_fds, folder, environment = given[:7]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[10:16]
        environment = dict(os.environ if environment is None else environment)
        if prepare not in (None, heed_interrupts) or not self._can_fork(args, environment):
            super()._execute_child(*given)
            return
        files = [own if own != -1 else number for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        begin = {
            "arguments": list(map(str, args)),
            "environment": environment,
            "folder": os.path.abspath(folder or os.curdir),
            "session": given[21],
            "numbers": [0, 1, 2, *pass_fds],
        }
        self.pid = self._fork(begin, [*files, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _can_fork(self, args: Any, environment: dict[str, str]) -> bool:
        return (
            sys.platform == "linux"
            and args[0] == sys.executable
            and (args[1] in ("-m", "-c") or args[1:3] == ["-P", "-m"] or args[1].endswith(".py"))
            and _read_at_once(environment) == _read_at_once(dict(os.environ))
        )

    def _fork(self, begin: dict[str, Any], files: list[int]) -> int:
        return _server(os.getpid()).fork(begin, files)


class Forked(Popen):
    """A process that this one, which the server has forked, forks itself: it has imported, and computed nothing."""

    def _can_fork(self, args: Any, environment: dict[str, str]) -> bool:
        return super()._can_fork(args, environment) and len(os.listdir("/proc/self/task")) == 1

    def _fork(self, begin: dict[str, Any], files: list[int]) -> int:
        sys.stdout.flush()
        process = os.fork()
        if not process:
            _become(begin, files)
        return process


def forking(popen: type[Popen]) -> Any:
    """The module `subprocess`, for a module that starts processes by it, with another `Popen`."""
    module = types.ModuleType("subprocess")
    vars(module).update(vars(subprocess), Popen=popen)
    return module


def _read_at_once(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_ONCE)}


class Server:
    """The process that forks, and this process's end of the line to it."""

    def __init__(self) -> None:
        self._line, end = socket.socketpair()
        self._one = threading.Lock()
        command = [sys.executable, "-P", __file__, str(end.fileno()), "x" * ROOM]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=[end.fileno()], start_new_session=True, **quiet)
        end.close()

    def fork(self, begin: dict[str, Any], files: list[int]) -> int:
        """Have a process forked; its id."""
        text = json.dumps(begin).encode()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # again: a run in this process sets it back when it ends
        with self._one:
            socket.send_fds(self._line, [len(text).to_bytes(4, "big")], files)
            self._line.sendall(text)
            return int.from_bytes(_read(self._line, 4), "big")


@functools.cache
def _server(_: int) -> Server:
    return Server()


def _read(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = line.recv(size - len(found))
        assert more, "the other end is gone"
        found += more
    return found


def serve(line: socket.socket) -> None:
    """Fork what is asked for, until nobody can ask any more."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    caller = os.getppid()
    while True:
        size, files, _, _ = socket.recv_fds(line, 4, 64)
        if not size:
            return
        begin = json.loads(_read(line, int.from_bytes(size, "big")))
        if between := os.fork():
            os.waitpid(between, 0)
            for fd in files:
                os.close(fd)
            continue
        if os.fork():
            os._exit(0)
        while os.getppid() != caller:  # who adopts the orphan
            time.sleep(0.0005)
        line.sendall(os.getpid().to_bytes(4, "big"))
        _become(begin, files)


def _become(begin: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the process that was asked for, from its first line to its end."""
    _take(begin, files)
    code = 1
    try:
        _run(begin["arguments"][1:])
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, int) or ended.code is None:
            code = ended.code or 0
        else:
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            heed_interrupts()
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = code or 120
    os._exit(code)


def _take(begin: dict[str, Any], files: list[int]) -> None:
    """What Python takes over when it begins."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if begin["session"]:
        os.setsid()
    apart = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in files]
    for fd, number in zip(apart, begin["numbers"], strict=True):
        os.dup2(fd, number)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in begin["numbers"]:
            try:
                os.close(fd)
            except OSError:  # that of the list
                continue
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # of whom forked it: temporary folders
    os.environ.clear()
    os.environ.update(begin["environment"])
    os.chdir(begin["folder"])
    tempfile.tempdir = None
    importlib.invalidate_caches()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = "\0".join(begin["arguments"]).encode()[: ROOM - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
    launch = importlib.import_module("fxpipe.runtime.process.launch")
    launch.subprocess = forking(Forked)  # type: ignore[attr-defined]


def _run(arguments: Sequence[str]) -> None:
    """Run a module, a text or a file as Python does that is given these arguments."""
    safe = arguments[0] == "-P"
    kind, *rest = arguments[safe:]
    if not safe:
        own = {"-m": os.getcwd(), "-c": ""}
        sys.path.insert(0, own[kind] if kind in own else os.path.dirname(os.path.abspath(kind)))
    if kind == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
