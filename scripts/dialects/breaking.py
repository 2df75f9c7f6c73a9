"""Applies mutations to a copy of the source, and runs each row's own tests against the copy.

Importing torch takes seconds. This process imports what the tests need, apart from the project's own packages, and
forks for each mutation; a forked process imports the copy. Processes that a test starts find the copy by PYTHONPATH.
"""

from __future__ import annotations

import compileall
import ctypes
import functools
import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  so that processes which are forked have it

from scripts.dialects.mutations import ROOT, TESTS, Mutation
from scripts.dialects.verdict import Verdict

PATIENCE_S = 300
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_FORKS = ROOT / TESTS / "forks.py"
# Imported again by each process: the project's packages, and pytest's plugins, which it wants to import itself.
_OWN = ("trainkit", "trainyard", "servicekit", "libs", "scripts", "conftest", "tests", "cases", "_pytest", "__main__")


@dataclass(frozen=True)
class Line:
    """One line of the table; `result` is caught, survived, crashed, hung or not proven unbroken."""

    mutation: Mutation
    result: str
    by: str


def table(chosen: Sequence[Mutation], *, unbroken_first: bool) -> bool:
    """Prints the table of mutations, and returns whether the tests of their rows catch all of them.

    Args:
        chosen: the mutations to apply.
        unbroken_first: whether the tests of a row have to pass without a mutation first.
    """
    print("| row | clause | file | result | by |\n|---|---|---|---|---|")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        runner = _Runner(Path(folder))
        for each in chosen:
            line = runner.run(each, unbroken_first=unbroken_first)
            missed += line.result != "caught"
            cells = (each.row, each.clause, each.file, line.result, line.by.replace("|", "\\|"))
            print(f"| {' | '.join(cells)} |", flush=True)
    gc.unfreeze()
    print(f"\n{len(chosen)} mutations, {len(chosen) - missed} caught, {missed} not caught")
    return not missed


class _Runner:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies: dict[Path, Path] = {}
        self._unbroken: dict[str, str] = {}

    def run(self, mutation: Mutation, *, unbroken_first: bool) -> Line:
        """Runs the tests of the mutation's row, without it (once for each row) and with it."""
        source = self._copy_of(mutation)
        if unbroken_first and (wrong := self._wrong_unbroken(mutation)):
            return Line(mutation, "not proven unbroken", wrong)
        with _broken(source, mutation):
            verdict = self._run_tests(mutation)
        if verdict is None:
            return Line(mutation, "hung", f"after {PATIENCE_S} s")
        if verdict.comparison:
            return Line(mutation, "caught", verdict.comparison)
        if verdict.other:
            return Line(mutation, "crashed", verdict.other)
        return Line(mutation, "survived", f"{verdict.passed} tests passed")

    def _copy_of(self, mutation: Mutation) -> Path:
        """Returns the mutation's file in the copy of its source folder, which is the part of the path up to `src`."""
        parts = Path(mutation.file).parts
        source = Path(*parts[: parts.index("src") + 1])
        if source not in self._copies:
            copy = self._folder / "copy" / source
            shutil.copytree(ROOT / source, copy)  # with the compiled modules, which stay valid
            compileall.compile_dir(copy, quiet=2)
            self._copies[source] = copy
        return self._folder / "copy" / mutation.file

    def _wrong_unbroken(self, mutation: Mutation) -> str:
        if mutation.row not in self._unbroken:
            verdict = self._run_tests(replace(mutation, raises=""))
            self._unbroken[mutation.row] = (
                f"hung for {PATIENCE_S} s" if verdict is None else verdict.comparison or verdict.other
            )
        return self._unbroken[mutation.row]

    def _run_tests(self, mutation: Mutation) -> Verdict | None:
        """Runs the tests of a row against the copies as they are; returns None if they hang."""
        place = Path(tempfile.mkdtemp(dir=self._folder))
        verdict = Verdict(mutation.row, ROOT, self._folder / "copy", raises=mutation.raises)
        copies = [str(copy) for copy in self._copies.values()]
        requests, answers = os.pipe(), os.pipe()
        server = _fork(functools.partial(_serve_forks, copies, requests, answers), place / "forks.log")
        os.environ["TRAINKIT_TEST_FORKS"] = f"{answers[0]} {requests[1]}"
        tests = _fork(functools.partial(_run_pytest, copies, verdict, place), place / "pytest.log")
        for end in (*requests, *answers):
            os.close(end)
        ended = _wait(tests)
        _kill(server)
        if not ended:
            return None
        answer = place / "verdict.json"
        found = json.loads(answer.read_text()) if answer.exists() else {"modules": []}
        if not found.get("passed") and not found.get("comparison") and not found.get("other"):
            found["other"] = "no test ran: " + " ".join((place / "pytest.log").read_text().split()[-40:])
        _import(found.pop("modules"))
        shutil.rmtree(place, ignore_errors=True)
        return replace(verdict, **found)


@contextmanager
def _broken(source: Path, mutation: Mutation) -> Iterator[None]:
    """Applies the mutation to the copy for as long as the context is entered."""
    text = source.read_text("utf-8")
    _replace(source, mutation.applied(text))
    try:
        yield
    finally:
        _replace(source, text)


def _replace(source: Path, text: str) -> None:
    """Writes a source, and removes what was compiled: a text of the same length within a second would count as it."""
    source.write_text(text, "utf-8")
    for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
        compiled.unlink()


def _fork(function: Callable[[], Any], log: Path) -> int:
    """Runs a function in a process of a session of its own, which ends with this one; returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        function()
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> bool:
    """Waits for a process and kills what it left; returns False if it takes too long."""
    handle = os.pidfd_open(pid)
    ended = bool(select.select([handle], [], [], PATIENCE_S)[0])
    os.close(handle)
    _kill(pid)
    return ended


def _kill(pid: int) -> None:
    """Kills a process that leads a session, and what it started there."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended before it began a session
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _prefer(copies: list[str]) -> None:
    """Lets this process, and those that it starts, import the project's packages from the copies."""
    sys.path[:0] = copies
    sys.dont_write_bytecode = False  # each process would compile the tests again
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    given = [path for path in [os.environ.get("PYTHONPATH")] if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*copies, *given])


def _serve_forks(copies: list[str], requests: tuple[int, int], answers: tuple[int, int]) -> None:
    """Offers what the program `forks.py` offers, without importing torch again."""
    _prefer(copies)
    os.dup2(requests[0], 0)
    os.dup2(answers[1], 1)
    for end in (*requests, *answers):
        os.close(end)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    if not select.select([sys.stdin], [], [])[0]:
        return
    spec = importlib.util.spec_from_file_location("__forks__", _FORKS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.serve()


def _run_pytest(copies: list[str], verdict: Verdict, place: Path) -> None:
    _prefer(copies)
    for variable in [name for name in os.environ if name.startswith("PYTEST_") and name != "PYTEST_DEBUG_TEMPROOT"]:
        del os.environ[variable]
    os.chdir(ROOT)
    before = set(sys.modules)
    # Without what takes longer than most tests: sources of tracebacks, and a search for garbage.
    options = ["-vv", "--tb=native", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    # Plugins use modules that are imported already.
    options += [
        "-m",
        "spec and not exhaustive",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        f"--basetemp={place / 'pytest'}",
    ]
    pytest.main([*options, *_files(verdict.row)], plugins=[verdict])
    new = [name for name in sys.modules if name not in before]
    found = {name: asdict(verdict)[name] for name in ("passed", "skipped", "comparison", "other")}
    (place / "verdict.json").write_text(json.dumps({**found, "modules": new}))


@functools.cache
def _texts() -> dict[Path, str]:
    return {file: file.read_text("utf-8") for file in sorted((ROOT / TESTS).rglob("test_*.py"))}


def _files(row: str) -> list[str]:
    """The files that may have tests of a row: those that name it, and those that compose the names of rows."""
    composed = 'mark.spec(f"'
    return [str(file) for file, text in _texts().items() if f'spec("{row}")' in text or composed in text]


def _import(names: list[str]) -> None:
    """Imports other packages that a forked process imported, so that the next ones have them."""
    libraries = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    for name in reversed(names):  # modules are in the order in which their imports ended: importers follow
        if name.partition(".")[0] in _OWN or name in sys.modules:
            continue
        spec = importlib.util.find_spec(name) if "." not in name or name.rpartition(".")[0] in sys.modules else None
        if spec is None or not (spec.origin or "").startswith(libraries):
            continue
        with suppress(ImportError):  # some cannot be imported by themselves
            importlib.import_module(name)
    gc.freeze()  # what is imported here is not searched for garbage by each process
    assert threading.active_count() == 1, f"an imported package started threads: {threading.enumerate()}"
