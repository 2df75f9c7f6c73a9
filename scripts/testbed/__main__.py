"""`python -m scripts.testbed`: gets every server that the tests need, or says why one cannot be had.

With a command it is about the testbed's Kubernetes cluster. TRAINYARD_TESTBED_CLUSTER=N is another one beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.testbed import fetch
from scripts.testbed.cluster import binaries, system
from scripts.testbed.cluster.cluster import Cluster
from scripts.testbed.cluster.layout import Wrong
from scripts.testbed.cluster.processes import Failed
from scripts.testbed.observability import prometheus
from scripts.testbed.proxy import NGINX, STREAM_MODULE


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    chosen = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = chosen.run
    try:
        return run(chosen)
    except (fetch.Unavailable, Failed, Wrong) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.testbed", description=__doc__.partition("\n")[0])
    parser.set_defaults(run=_get)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands on the cluster")
    up = commands.add_parser("up", help="start it, or what is missing of it")
    up.add_argument("--kwok", type=int, default=0, metavar="N", help="with N fake nodes")
    up.set_defaults(run=_up)
    down = commands.add_parser("down", help="end it and remove all of it")
    down.add_argument("--if-unused", action="store_true", help="only when tests have started it, and no test uses it")
    down.add_argument("--killed", default="", metavar="RUN", help="else remove the namespaces of this run of tests")
    down.set_defaults(run=_down)
    commands.add_parser("status", help="what runs; exits with 1 when a part does not").set_defaults(run=_status)
    for name, what in (("kubectl", "run kubectl"), ("helm", "run helm")):
        tool = commands.add_parser(name, help=f"{what} on it", add_help=False, prefix_chars="\0")
        tool.add_argument("arguments", nargs=argparse.REMAINDER)
        tool.set_defaults(run=_tool, tool=name)
    images = commands.add_parser("images", help="list the images of its nodes, or load one")
    images.add_argument("load", nargs="?", choices=["load"], help="give every node the images of an archive")
    images.add_argument("archive", nargs="?", type=Path, help="as `buildah push ... docker-archive:FILE:NAME` makes it")
    images.set_defaults(run=_images)
    return parser


def _get(_: argparse.Namespace) -> int:
    for program in (
        fetch.debian("redis-server", "/usr/bin/redis-server"),
        fetch.debian("postgresql-15", "/usr/lib/postgresql/*/bin/postgres"),
        fetch.debian(*NGINX),
        fetch.debian(*STREAM_MODULE),
        fetch.versitygw(),
        prometheus(),
    ):
        print(program.path)
    if obstacle := system.obstacle():
        print(f"no cluster: {obstacle}", file=sys.stderr)
        return 0
    for path in system.get(binaries.ALL):
        print(path)
    return 0


def _up(chosen: argparse.Namespace) -> int:
    cluster = Cluster()
    cluster.up(chosen.kwok)
    print(f"the cluster is up: export KUBECONFIG={cluster.kubeconfig}")
    return 0


def _down(chosen: argparse.Namespace) -> int:
    cluster = Cluster()
    cluster.down_after_tests(chosen.killed) if chosen.if_unused else cluster.down()
    return 0


def _status(_: argparse.Namespace) -> int:
    cluster = Cluster()
    for machine, parts in cluster.status().items():
        print(f"{machine}\t{' '.join(parts) or 'off'}")
    return 0 if cluster.whole() else 1


def _tool(chosen: argparse.Namespace) -> int:
    source = {"kubectl": binaries.kubernetes, "helm": binaries.helm}[chosen.tool]
    environ = os.environ | {"KUBECONFIG": str(Cluster().kubeconfig)}
    os.execve(source.program(chosen.tool), [chosen.tool, *chosen.arguments], environ)


def _images(chosen: argparse.Namespace) -> int:
    cluster = Cluster()
    if chosen.load:
        if chosen.archive is None or not chosen.archive.is_file():
            raise Wrong(f"images load {chosen.archive or ''}: give the path of an archive")
        cluster.load_image(chosen.archive.resolve())
    for node, names in cluster.images().items():
        print("\n".join(f"{node}\t{name}" for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
