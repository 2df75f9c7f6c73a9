"""What can go wrong between a user and a yard.

    YardError
    ├── InvalidSpec      the document is wrong; all its problems at once
    ├── InvalidArgument  an argument is wrong
    ├── NotFound
    ├── NotRunning       no yard is running, or it cannot be reached
    ├── Refused          authentication or permission
    ├── Conflict         not in the present state
    │   ├── CodeNotPacked    `code.path` has to be packed first (the client does it by itself)
    │   ├── NeverFits        a queued job that no machine can hold
    │   └── Exhausted        a bound was reached
    ├── JobFailed
    ├── JobCancelled
    └── Defect           the yard itself is at fault

Each class has the exit code that `yard` ends with. The standard library alone is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol


class Problem(Protocol):
    """One thing that is wrong with a document."""

    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def field(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def allowed(self) -> str: ...
    @property
    def suggestion(self) -> str: ...


class YardError(Exception):
    """The root of all errors of this library.

    Attributes:
        reason: stable CamelCase code, for instance "JobNotFound".
        hint: what to do next.
        fields: facts the reason comes with.
        problems: all that is wrong with a refused document.
        exit_code: what `yard` exits with.
    """

    exit_code: ClassVar[int] = 70

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        hint: str = "",
        fields: Mapping[str, str] | None = None,
        problems: Sequence[Problem] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).__name__
        self.hint = hint
        self.fields = dict(fields or {})
        self.problems = tuple(problems)


class InvalidSpec(YardError):
    """The document is wrong; nothing was created. See `problems`."""

    exit_code = 2


class InvalidArgument(YardError):
    """An argument is wrong; nothing was created."""

    exit_code = 2


class NotFound(YardError):
    """There is no such object."""

    exit_code = 3


class NotRunning(YardError):
    """No yard is running, or it cannot be reached."""

    exit_code = 4


class Refused(YardError):
    """The yard does not know the caller, or does not permit this."""

    exit_code = 5


class Conflict(YardError):
    """Not possible in the present state."""

    exit_code = 6


class CodeNotPacked(Conflict):
    """The document has `code.path`, which only a client can pack."""


class NeverFits(Conflict):
    """The job that was waited for can never start: it asks for more than any machine has."""


class Exhausted(Conflict):
    """A bound of the yard was reached."""


class JobFailed(YardError):
    """The job that was waited for failed."""

    exit_code = 1


class JobCancelled(YardError):
    """The job that was waited for was cancelled."""

    exit_code = 7


class Defect(YardError):
    """The yard itself is at fault."""
