"""Processes for tests that have to kill them, or need several: forked from one that has imported torch already.

Importing torch takes seconds of processor time. The server (this file as a program) does it once, and forks for each
request as many processes as are asked for; a forked one starts within milliseconds and shares nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

PATIENCE_S = 240
NOTICE_S = 60
"""How long the others may take to end when one process has failed."""
OFFERED = "TRAINKIT_TEST_FORKS"
"""The variable with the descriptors of an offered server: where it answers, and where it reads requests."""


class Forks:
    """Starts functions of a Python file in processes of their own."""

    def __init__(self) -> None:
        self._server = _offered_server() or subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(
        self, function: Any, folder: Path, *, processes: int = 1, imports: Sequence[str] = (), **arguments: Any
    ) -> list[int]:
        """Runs `function(folder=..., **arguments)` in each process, which torch's environment variables tell apart.

        Args:
            function: a function of a test's file.
            folder: for the output, and the function's first argument.
            processes: how many processes run it.
            imports: other packages that several tests need and that take long to import; the server imports each once.
            arguments: the function's other arguments.

        Returns:
            Their exit codes, as `subprocess` gives them: negative for a signal. Output is in `folder/rank-<n>.log`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            "file": function.__code__.co_filename,
            "function": function.__name__,
            "arguments": {"folder": str(folder), **arguments},
            "processes": processes,
            "imports": imports,
            "folder": str(folder),
        }
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return list(json.loads(self._server.stdout.readline()))

    def succeed(self, function: Any, folder: Path, *, processes: int = 1, **arguments: Any) -> None:
        """Like `run`; every process has to end with 0."""
        codes = self.run(function, folder, processes=processes, **arguments)
        if any(codes):
            logs = "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted(folder.glob("rank-*.log")))
            raise AssertionError(f"exit codes {codes}\n{logs}")

    def close(self) -> None:
        if isinstance(self._server, _OfferedServer):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()


class _OfferedServer(NamedTuple):
    """A server that this process did not start: `scripts.dialects --break` forks one for each run of tests."""

    stdout: TextIO
    stdin: TextIO


def _offered_server() -> _OfferedServer | None:
    if OFFERED not in os.environ:
        return None
    answers, requests = (int(number) for number in os.environ[OFFERED].split())
    return _OfferedServer(os.fdopen(answers), os.fdopen(requests, "w"))


def serve() -> None:
    import pytest  # noqa: F401 - the tests' files do, and torch imports `_dynamo` with the first FSDP module
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torchmetrics  # noqa: F401
    import trainkit.callbacks.ema
    import trainkit.checkpoints.saver
    import trainkit.loop.fit

    # What a process would import by itself: a source that is edited while tests run would give it two versions.
    import trainkit.loop.keeper
    import trainkit.strategies.ddp
    import trainkit.strategies.fsdp  # noqa: F401

    sys.path.append(str(Path(__file__).parents[3]))  # the repository, as in pytest, for what tests' files share
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a forked process that collects garbage searches what is its own
    for number, line in enumerate(sys.stdin):
        request = {"number": number, **json.loads(line)}
        _import(request["imports"])
        children = [_fork(request, rank) for rank in range(request["processes"])]
        print(json.dumps(_codes(children)), flush=True)


def _import(names: Sequence[str]) -> None:
    """Imports packages; one that cannot be imported is left to the process, whose output then says why."""
    if new := [name for name in names if name not in sys.modules]:
        for name in new:
            # The answers to requests go to the standard output.
            with contextlib.suppress(ImportError), contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()


def _codes(children: list[int]) -> list[int]:
    """Waits for all. When one fails, the others get a while to notice and are then killed, as torchrun does."""
    codes: dict[int, int] = {}
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in children if pid not in codes])
    signal.alarm(PATIENCE_S)
    while len(codes) < len(children):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] and not any(codes[other] for other in codes if other != pid):
            signal.alarm(1 if codes[pid] < 0 else NOTICE_S)
    signal.alarm(0)
    return [codes[pid] for pid in children]


def _fork(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    log = os.open(Path(request["folder"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        _child(request, rank)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _child(request: dict[str, Any], rank: int) -> None:
    import torch.distributed as dist

    processes = request["processes"]
    if processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        # A store in a file needs no port, which another test could have taken. A new one for each life of a group.
        store = dist.FileStore(str(Path(request["folder"]) / f"store-{request['number']}"), processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    spec = importlib.util.spec_from_file_location("cases", request["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module
    spec.loader.exec_module(module)
    getattr(module, request["function"])(**request["arguments"])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    serve()
