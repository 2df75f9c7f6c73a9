"""A pytest plugin that runs the tests of one row and tells a failed comparison from any other failure."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pytest

_TRACEBACK = re.compile(
    r"^(?P<prefix>.*?)Traceback \(most recent call last\):\n(?P<frames>(?:(?P=prefix)[ \t].*\n|(?P=prefix)\n)*)"
    r"(?P=prefix)(?P<error>[A-Za-z_][\w.]*)(?P<text>.*)",
    re.MULTILINE,
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*')
_COMPARISONS = {"AssertionError", "Failed", "_pytest.outcomes.Failed"}


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Verdict:
    """What a row's tests found.

    Attributes:
        row: the row whose tests run.
        repository: tests are below it.
        copy: the copy of the source that the tests import.
        raises: name of an exception that counts as a failed comparison.
        passed: number of tests that passed.
        skipped: the tests that were skipped.
        comparison: the first failed comparison.
        other: the first failure of another kind.
    """

    row: str
    repository: Path
    copy: Path
    raises: str = ""
    passed: int = 0
    skipped: list[str] = field(default_factory=list)
    comparison: str = ""
    other: str = ""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        own = [item for item in items if any(mark.args[0] == self.row for mark in item.iter_markers("spec"))]
        config.hook.pytest_deselected(items=[item for item in items if item not in own])
        items[:] = sorted(own, key=_starts_processes)  # the first failed comparison is enough

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.other = self.other or f"collection: {str(report.longrepr).strip().splitlines()[-1]}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:  # a generator by pluggy's rules; it returns the report
        report = yield
        if report.skipped:
            self.skipped.append(item.nodeid)
        elif report.failed and call.excinfo is not None:
            self._judge(call.excinfo.value, call.excinfo.tb)
            if self.comparison:
                item.session.shouldfail = "a comparison failed"
        elif call.when == "call":
            self.passed += 1
        return report  # type: ignore[return-value]

    def _judge(self, error: BaseException, traceback: TracebackType | None) -> None:
        kind = type(error).__name__
        frame = self._innermost(traceback)
        where = f"{self._short(frame[0])}:{frame[1]} {linecache.getline(*frame).strip()}" if frame else ""
        text = str(error)
        if kind == self.raises:
            self.comparison = f"{where} ({kind}: {_first_line(text)})"
        elif kind not in _COMPARISONS or frame is None or not self._is_test(frame[0]):
            self.other = self.other or f"{kind}: {_first_line(text)} at {where}"
        elif failures := list(_TRACEBACK.finditer(text)):
            self._judge_children(failures)
        else:
            self.comparison = where

    def _judge_children(self, failures: list[re.Match[str]]) -> None:
        """Judges tracebacks of processes that the test started: one of them has to end in a failed comparison."""
        for failure in failures:
            frames = [(each["file"], int(each["line"])) for each in _FRAME.finditer(failure["frames"])]
            own = [frame for frame in frames if self._is_own(frame[0])]
            if not own:
                continue
            where = f"{self._short(own[-1][0])}:{own[-1][1]} {linecache.getline(*own[-1]).strip()}"
            if failure["error"] == self.raises or (failure["error"] in _COMPARISONS and self._is_test(own[-1][0])):
                self.comparison = f"{where} (in a process of the test)"
                return
            self.other = (
                self.other or f"{failure['error']}{failure['text'][:200]} at {where} (in a process of the test)"
            )

    def _innermost(self, traceback: TracebackType | None) -> tuple[str, int] | None:
        frame = None
        while traceback is not None:
            file = traceback.tb_frame.f_code.co_filename
            if self._is_own(file):
                frame = (file, traceback.tb_lineno)
            traceback = traceback.tb_next
        return frame

    def _is_own(self, file: str) -> bool:
        path = Path(file)
        if path.is_relative_to(self.copy):
            return True
        return path.is_relative_to(self.repository) and ".venv" not in path.parts

    def _is_test(self, file: str) -> bool:
        return not Path(file).is_relative_to(self.copy)

    def _short(self, file: str) -> str:
        for base in (self.copy, self.repository / "libs" / "trainkit" / "tests", self.repository):
            if Path(file).is_relative_to(base):
                return str(Path(file).relative_to(base))
        return file


def _starts_processes(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    return "forks" in names or any(name.endswith("_server") for name in names)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:200]
