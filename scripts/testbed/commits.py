"""A relay in front of PostgreSQL that loses what a network loses: the answer to a COMMIT, or the COMMIT itself."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import sqlalchemy

_BLOCK = 64 * 1024
_COMMIT = b"COMMIT\0"  # the statement: BEGIN may say READ COMMITTED


class CommitRelay:
    """Forwards connections to a PostgreSQL server on loopback, on threads of its own."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: list[_Link] = []
        self._loses = ""
        self._away_after = False
        self._away = False
        self.lost = threading.Event()
        """Set once the COMMIT, or its answer, was lost."""

    def __enter__(self) -> CommitRelay:
        threading.Thread(target=self._accept, name="relay", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for link in self._links:
            link.close()

    def url(self, database: str) -> str:
        """The database's address, through this relay."""
        port = self._listener.getsockname()[1]
        return sqlalchemy.make_url(database).set(port=port).render_as_string(hide_password=False)

    def lose_answer(self, *, then_away: bool = False) -> None:
        """The next COMMIT is carried out, and its client is cut off before it learns of it.

        Args:
            then_away: whether the server cannot be reached from that moment until `heal`.
        """
        self._loses, self._away_after = "answer", then_away
        self.lost.clear()

    def lose_request(self, *, then_away: bool = False) -> None:
        """The next COMMIT does not arrive, and its client is cut off; the server learns of neither."""
        self._loses, self._away_after = "request", then_away
        self.lost.clear()

    def cut_clients(self) -> None:
        """Cuts everybody off; the server is not told, and keeps their sessions."""
        for link in list(self._links):
            link.close_client()

    def refuse(self) -> None:
        """Cuts everybody off, and lets nobody through until `heal`."""
        self._away = True
        self.cut_clients()

    def heal(self) -> None:
        """The server can be reached."""
        self._away = False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._away:
                client.close()
                continue
            link = _Link(client, socket.create_connection(("127.0.0.1", self._target)))
            self._links.append(link)
            threading.Thread(target=self._to_server, args=(link,), daemon=True).start()
            threading.Thread(target=self._to_client, args=(link,), daemon=True).start()

    def _to_server(self, link: _Link) -> None:
        with suppress(OSError):
            while block := link.client.recv(_BLOCK):
                loses = self._loses if _COMMIT in block else ""
                if loses:
                    self._loses = ""
                    link.answer_is_lost = loses == "answer"
                if loses == "request":
                    self._lose(link)
                    return
                link.server.sendall(block)
        if not link.cut_off:
            link.close()  # a client that leaves by itself says so

    def _to_client(self, link: _Link) -> None:
        with suppress(OSError):
            while block := link.server.recv(_BLOCK):
                if link.answer_is_lost:
                    self._lose(link)
                    return
                link.client.sendall(block)
        link.close()

    def _lose(self, link: _Link) -> None:
        self._away = self._away_after
        if self._away:
            self.cut_clients()
        link.close_client()
        self.lost.set()


class _Link:
    """Both ends of a connection."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.answer_is_lost = False
        self.cut_off = False

    def close_client(self) -> None:
        self.cut_off = True
        with suppress(OSError):
            self.client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.close_client()
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
