"""The yards that a user works with, by name: where each is, its root certificate and token.

    $TRAINYARD_HOME/contexts.json   {"current": "lab", "contexts": {"lab": {"endpoint", "token", "ca"}}}, mode 0600

A yard that the chart installed is named by its release in place of an address: {"release", "namespace", ...}. `local`
is the yard of this machine and always there. The standard library alone, for every command reads this.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainyard import errors, files
from trainyard.endpoints import InvalidEndpoint, split_host_port

LOCAL = "local"
VARIABLE = "TRAINYARD_CONTEXT"
_FILE = "contexts.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Context:
    """A yard elsewhere.

    Attributes:
        endpoint: `host:port`.
        token: bearer token.
        ca: root certificate (PEM file); "" on loopback.
    """

    endpoint: str
    token: str = field(repr=False)
    ca: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """A yard that the chart installed on a cluster; it is reached through the cluster's API server.

    Attributes:
        release: its name, as helm has it.
        namespace: where it is installed.
        kube_context: of the kubeconfig; "" for the one that is current when it is used.
        kubeconfig: its file; "" for the user's own (`KUBECONFIG`, `~/.kube/config`).
        token: bearer token; "" to read it from the release's Secret.
    """

    release: str
    namespace: str
    kube_context: str = ""
    kubeconfig: str = ""
    token: str = field(default="", repr=False)

    def __str__(self) -> str:
        where = f" (kube context {self.kube_context})" if self.kube_context else ""
        return f"release {self.release} in namespace {self.namespace}{where}"


class Contexts:
    """Those of one user.

    Args:
        folder: TRAINYARD_HOME; it need not exist yet.
        environ: where the name of one may be set.

    Raises:
        InvalidArgument: their file cannot be read.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._folder = folder
        self._environ = environ
        self._current, self._known = self._read()

    def _read(self) -> tuple[str, dict[str, Context | Release]]:
        path = self._folder / _FILE
        try:
            said = json.loads(path.read_bytes())
            return said["current"], {name: _context(fields) for name, fields in said["contexts"].items()}
        except (FileNotFoundError, NotADirectoryError):
            return LOCAL, {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise errors.InvalidArgument(
                f"{path} cannot be read: {error}",
                reason="BadContexts",
                hint="correct it, or remove it and add them anew",
            ) from error

    @property
    def names(self) -> list[str]:
        """All of them, `local` first."""
        return [LOCAL, *sorted(self._known)]

    @property
    def current(self) -> str:
        """The one that commands use: TRAINYARD_CONTEXT, else the one that was chosen."""
        return self._environ.get(VARIABLE) or self._current

    def get(self, name: str) -> Context | Release | None:
        """A context by its name; None for `local`.

        Raises:
            NotFound: there is none of that name.
        """
        if name == LOCAL:
            return None
        if name not in self._known:
            raise errors.NotFound(
                f"there is no context '{name}'", reason="ContextNotFound", hint=f"there is: {', '.join(self.names)}"
            )
        return self._known[name]

    def chosen(self) -> Context | Release | None:
        """The current one; None for the yard of this machine. Raises NotFound."""
        return self.get(self.current)

    def add(self, name: str, context: Context | Release) -> None:
        """Keeps a context, in place of one of the same name.

        Raises:
            InvalidArgument: the name, the endpoint, the release or the namespace is none.
        """
        if not _NAME.fullmatch(name) or name == LOCAL:
            raise errors.InvalidArgument(
                f"'{name}' cannot be the name of a context",
                hint="letters, digits, '.', '_' and '-'; 'local' is the yard of this machine",
            )
        if isinstance(context, Context):
            _check_endpoint(context.endpoint)
        for word in (context.release, context.namespace) if isinstance(context, Release) else ():
            if not _LABEL.fullmatch(word):
                hint = "as 'helm list --all-namespaces' shows it: small letters, digits and '-'"
                raise errors.InvalidArgument(f"'{word}' is no name of a release or a namespace", hint=hint)
        self._write(self._current, self._known | {name: context})

    def use(self, name: str) -> None:
        """Commands use this one from now on. Raises NotFound."""
        self.get(name)
        self._write(name, self._known)

    def remove(self, name: str) -> None:
        """Forgets a context; when it is the current one, `local` becomes it.

        Raises:
            NotFound: there is none of that name.
            InvalidArgument: it is `local`.
        """
        if self.get(name) is None:
            raise errors.InvalidArgument(f"'{LOCAL}' is this machine and stays")
        rest = {each: context for each, context in self._known.items() if each != name}
        self._write(LOCAL if self._current == name else self._current, rest)

    def _write(self, current: str, known: dict[str, Context | Release]) -> None:
        self._current, self._known = current, known
        said = {"current": current, "contexts": {name: asdict(context) for name, context in known.items()}}
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(self._folder / _FILE, json.dumps(said, indent=2).encode())


def _check_endpoint(endpoint: str) -> None:
    try:
        split_host_port(endpoint)
    except InvalidEndpoint as error:
        raise errors.InvalidArgument(str(error), reason="BadEndpoint") from None


def _context(fields: dict[str, str]) -> Context | Release:
    return Release(**fields) if "release" in fields else Context(**fields)
