"""`python -m trainyard_setup`: `namespace` and `install` before an installation or upgrade, `remove` after a
removal, or `check`."""

from __future__ import annotations

import datetime
import os
import sys

from kubernetes.client.exceptions import ApiException
from servicekit import logs
from servicekit.settings import from_environment

from trainyard_setup import check
from trainyard_setup.cluster import Cluster
from trainyard_setup.install import Incomplete, install
from trainyard_setup.remove import remove
from trainyard_setup.settings import Settings


def main(arguments: list[str]) -> int:
    """Runs one hook; returns the exit code: 0 done, 1 not possible, 2 wrong arguments."""
    if arguments not in (["namespace"], ["install"], ["remove"], ["check"]):
        print("usage: python -m trainyard_setup namespace|install|remove|check", file=sys.stderr)  # noqa: T201
        return 2
    logs.configure("INFO")
    try:
        if arguments == ["check"]:
            print(check.main(os.environ))  # noqa: T201
            return 0
        settings = from_environment(Settings, "TRAINYARD_SETUP")
        cluster = Cluster(settings.release)
        if arguments == ["namespace"]:
            cluster.ensure_namespace(settings.jobs_namespace, settings.pod_security)
        elif arguments == ["install"]:
            install(settings, cluster, datetime.datetime.now(datetime.UTC))
        else:
            print(remove(settings, cluster))  # noqa: T201
    except (ValueError, Incomplete, check.Unwell) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except ApiException as error:
        print(f"error: the cluster refused: {error.status} {error.reason}: {error.body}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
