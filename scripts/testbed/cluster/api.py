"""Short questions to the API server, asked often while a cluster starts, when a kubectl each would be too much."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from scripts.testbed.cluster import certificates
from scripts.testbed.cluster.layout import Layout
from scripts.testbed.cluster.processes import Failed

_ANSWER_S = 30


class Client:
    """The administrator of a cluster.

    Args:
        layout: of the cluster; its certificates have to be there.
    """

    def __init__(self, layout: Layout) -> None:
        self._url = layout.api
        self._context = ssl.create_default_context(cafile=str(certificates.pair(layout, "ca").certificate))
        files = certificates.pair(layout, certificates.ADMIN)
        self._context.load_cert_chain(files.certificate, files.key)

    def ready(self) -> bool:
        """Whether the API server serves, with everything that it makes at its start."""
        return self._read("/readyz") == b"ok"

    def find(self, path: str) -> dict[str, Any] | None:
        """An object or a list.

        Args:
            path: such as `/api/v1/nodes/node-1`.

        Returns:
            It, or None when it is not there or nobody answers.
        """
        answer = self._read(path)
        return None if answer is None else dict(json.loads(answer))

    def make(self, path: str, item: dict[str, Any]) -> None:
        """Makes an object, unless there is one of its name.

        Args:
            path: of the list that it is in, such as `/api/v1/nodes`.
            item: it.

        Raises:
            Failed: the API server refuses it.
        """
        if self.find(f"{path}/{item['metadata']['name']}") is not None:
            return
        body, kind = json.dumps(item).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, body, kind)
        try:
            urllib.request.urlopen(request, context=self._context, timeout=_ANSWER_S).close()
        except urllib.error.HTTPError as error:
            raise Failed(f"POST {path}: {error.read().decode()}") from error

    def _read(self, path: str) -> bytes | None:
        try:
            with urllib.request.urlopen(self._url + path, context=self._context, timeout=_ANSWER_S) as answer:
                return bytes(answer.read())
        except (OSError, urllib.error.URLError):
            return None
