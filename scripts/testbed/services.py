"""`scripts/services`: a yard whose services run apart, on loopback, with everything they need.

  up                        start Redis, PostgreSQL, an S3 server, nginx and the four services
  status                    what runs, and where
  stop|start|restart NAME   end or start one of them, as an operator would
  kill|pause|resume NAME    the same by SIGKILL, SIGSTOP, SIGCONT
  down                      end all of it; jobs go on, and the next `up` finds them

`up` leaves one process behind, which owns the others: when it ends, however it ends, so do they. The address of every
server can be given instead of starting one; S3 keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psycopg
import sqlalchemy
from trainyard.home import home as default_home
from trainyard.home import read_endpoint
from trainyard.proc import open_process

from scripts.testbed import fetch
from scripts.testbed.databases import Postgres, Redis
from scripts.testbed.server import Server
from scripts.testbed.storage import S3, Bucket
from scripts.testbed.yard import SplitYard, Stores

_DATABASES = ("scheduler", "metrics", "artifacts")
_ACTIONS: dict[str, Callable[[Server], None]] = {
    "start": Server.start,
    "stop": Server.stop,
    "restart": Server.restart,
    "kill": Server.kill,
    "pause": Server.pause,
    "resume": Server.resume,
}
_CONTROL = "services.sock"
_TIMEOUT_S = 180.0


class Owner:
    """Owns the servers and the yard, and does what the commands ask.

    Args:
        arguments: those of `up`.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._home: Path = arguments.home
        self._stores: list[Server] = []
        self._port_file = self._home / "port"
        stores = Stores(self._broker(arguments), self._databases(arguments), self._bucket(arguments))
        self.yard = SplitYard(self._home, stores, port=self._port(arguments), schedulers=arguments.schedulers)

    def _port(self, arguments: argparse.Namespace) -> int:
        try:
            return arguments.port or int(self._port_file.read_text())  # agents know the last one
        except (FileNotFoundError, ValueError):
            return 0

    def _own(self, server: Server) -> None:
        server.start()
        self._stores.append(server)

    def _broker(self, arguments: argparse.Namespace) -> str:
        if arguments.redis_url:
            return str(arguments.redis_url)
        redis = Redis(self._home / "redis")
        self._own(redis)
        return redis.url()

    def _databases(self, arguments: argparse.Namespace) -> dict[str, str]:
        if arguments.postgres_url:
            return {name: _database(arguments.postgres_url, f"trainyard_{name}") for name in _DATABASES}
        postgres = Postgres(_reachable(self._home), durable=True)
        self._own(postgres)
        return {name: _database(postgres.url(), f"trainyard_{name}") for name in _DATABASES}

    def _bucket(self, arguments: argparse.Namespace) -> Bucket:
        if arguments.s3_endpoint:
            keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
            return Bucket(arguments.s3_endpoint, *keys, arguments.s3_bucket)
        s3 = S3(self._home / "s3")
        self._own(s3)
        return s3.bucket(arguments.s3_bucket)

    def servers(self) -> dict[str, Server]:
        """Every process by its name."""
        return {server.name: server for server in self._stores} | self.yard.servers()

    def start(self) -> None:
        """Starts the yard."""
        self.yard.start()
        self._port_file.write_text(str(self.yard.port))

    def stop(self) -> None:
        """Ends everything."""
        self.yard.stop()
        for server in reversed(self._stores):
            server.resume()
            server.stop()

    def do(self, action: str, name: str) -> dict[str, object]:
        """One command; returns the state of all, or what is wrong."""
        servers = self.servers()
        if action in _ACTIONS:
            if name not in servers:
                known = ", ".join(servers)
                return {"error": f"there is no '{name}'; there are: {known}" if name else f"name one of: {known}"}
            try:
                _ACTIONS[action](servers[name])
            except RuntimeError as error:
                return {"error": str(error)}
        return {"endpoint": self.yard.endpoint, "servers": [_state(server) for server in servers.values()]}


def _state(server: Server) -> dict[str, object]:
    return {
        "name": server.name,
        "pid": server.process.pid if server.alive and server.process else 0,
        "address": f"127.0.0.1:{server.port}",
        "log": str(server.log),
    }


def _reachable(home: Path) -> Path:
    """A folder for PostgreSQL, which runs as another user when this one is root, and must not enter the home."""
    if os.geteuid() != 0:
        return home / "postgres"
    link = home / "postgres"
    if not link.exists():
        link.unlink(missing_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="trainyard-postgres-", dir="/var/tmp"))
        folder.chmod(0o755)
        link.symlink_to(folder)
    return link.resolve()


def _database(server: str, name: str) -> str:
    """A database of a server, made when it is not there; returns its URL."""
    url = sqlalchemy.make_url(server)
    address = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(address, autocommit=True) as connection:
        if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone() is None:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return url.set(drivername="postgresql+psycopg", database=name).render_as_string(hide_password=False)


def _own_all(arguments: argparse.Namespace, ready: int) -> int:
    """The process that `up` leaves behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    owner = None
    try:
        owner = Owner(arguments)
        owner.start()
        control = arguments.home / _CONTROL
        control.unlink(missing_ok=True)
        with socketserver.UnixStreamServer(str(control), _handler(owner)) as server:
            control.chmod(0o600)
            _tell(ready, owner.do("status", ""))
            server.serve_forever()
    except (RuntimeError, OSError, KeyError, fetch.Unavailable, psycopg.Error) as error:
        _tell(ready, {"error": f"{type(error).__name__}: {error}"})
        return 1
    finally:
        if owner is not None:
            owner.stop()
    return 0


def _tell(descriptor: int, message: dict[str, object]) -> None:
    with os.fdopen(descriptor, "w") as file:
        json.dump(message, file)


def _handler(owner: Owner) -> type[socketserver.StreamRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            action, _, name = self.rfile.readline().decode().strip().partition(" ")
            self.wfile.write(json.dumps(owner.do(action, name)).encode())

    return Handler


def _up(arguments: argparse.Namespace) -> dict[str, object]:
    arguments.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if read_endpoint(arguments.home) is not None:
        return {"error": f"a yard serves {arguments.home} already: 'scripts/services down' or 'yard down' ends it"}
    read, write = os.pipe()
    with (arguments.home / "services.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "scripts.testbed.services", "own", *sys.argv[2:], "--ready", str(write)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(write,),
            start_new_session=True,
        )
    os.close(write)
    with os.fdopen(read) as ready:
        return dict(json.loads(ready.read() or '{"error": "the owner of the services died; see services.log"}'))


def _ask(home: Path, action: str, name: str) -> dict[str, object]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(home / _CONTROL))
        except OSError:
            return {"error": f"no services run in {home}: 'scripts/services up --home {home}' starts them"}
        connection.sendall(f"{action} {name}\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return dict(json.loads(answer))


def _down(home: Path) -> dict[str, object]:
    owner = read_endpoint(home)
    gone = open_process(owner.pid, owner.start_time) if owner is not None else None
    if owner is None or gone is None:
        return {"error": f"no services run in {home}"}
    try:
        signal.pidfd_send_signal(gone, signal.SIGTERM)
        ended = bool(select.select([gone], [], [], _TIMEOUT_S)[0])
    finally:
        os.close(gone)
    return {} if ended else {"error": f"process {owner.pid} does not end"}


def _show(answer: dict[str, object]) -> int:
    if "error" in answer:
        print(f"error: {answer['error']}", file=sys.stderr)
        return 1
    servers = answer.get("servers", [])
    assert isinstance(servers, list)
    for server in servers:
        state = f"process {server['pid']}" if server["pid"] else "down"
        print(f"{server['name']:12} {server['address']:18} {state:16} {server['log']}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/services", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["up", "down", "status", *_ACTIONS, "own"], metavar="COMMAND")
    parser.add_argument("name", nargs="?", default="", metavar="NAME")
    parser.add_argument(
        "--home", type=Path, default=default_home(), help="folder of the yard (default: TRAINYARD_HOME)"
    )
    parser.add_argument("--port", type=int, default=0, help="of the endpoint; 0 for the last one used, or a free one")
    parser.add_argument("--schedulers", type=int, default=1, help="one is active, further ones stand by")
    parser.add_argument("--redis-url", default="", help="use this Redis")
    parser.add_argument(
        "--postgres-url", default="", help="use this PostgreSQL server, as a user who may make databases"
    )
    parser.add_argument("--s3-endpoint", default="", help="use this S3 server")
    parser.add_argument("--s3-bucket", default="trainyard", help="a bucket that is there, with --s3-endpoint")
    parser.add_argument("--ready", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.home = arguments.home.absolute()
    return arguments


def main() -> int:
    arguments = _arguments()
    if arguments.action == "own":
        return _own_all(arguments, arguments.ready)
    if arguments.action == "up":
        return _show(_up(arguments))
    if arguments.action == "down":
        return _show(_down(arguments.home))
    return _show(_ask(arguments.home, arguments.action, arguments.name))


if __name__ == "__main__":
    sys.exit(main())
