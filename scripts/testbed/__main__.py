"""`python -m scripts.testbed`: gets every server that the tests need, or says why one cannot be had."""

from __future__ import annotations

import sys

from scripts.testbed import fetch


def main() -> int:
    try:
        for program in (
            fetch.debian("redis-server", "/usr/bin/redis-server"),
            fetch.debian("postgresql-15", "/usr/lib/postgresql/*/bin/postgres"),
            fetch.debian("nginx", "/usr/sbin/nginx"),
            fetch.versitygw(),
        ):
            print(program.path)
    except fetch.Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
