"""The servers that other tests stand on are real, apart from each other, and come back."""

import subprocess
import sys

import psutil
import psycopg
import pytest
import redis

from scripts.testbed.ports import free_port
from scripts.testbed.server import Server
from tests.conftest import wait_until


def test_each_test_has_a_database_of_its_own(make_postgres_url):
    one, two = make_postgres_url(), make_postgres_url()
    with psycopg.connect(one.replace("+psycopg", "")) as connection:
        connection.execute("CREATE TABLE t (n int)")
    with psycopg.connect(two.replace("+psycopg", "")) as connection:
        assert connection.execute("SELECT to_regclass('t')").fetchone() == (None,)


def test_postgres_keeps_what_was_committed_when_it_is_killed(postgres_server, postgres_url):
    address = postgres_url.replace("+psycopg", "")
    with psycopg.connect(address) as connection:
        connection.execute("CREATE TABLE t (n int)")
    postgres_server.kill()
    postgres_server.start()
    with psycopg.connect(address) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_redis_forgets_everything_when_it_is_restarted(redis_server, redis_url):
    with redis.Redis.from_url(redis_url) as client:
        client.set("a", "b")
    redis_server.restart()
    with redis.Redis.from_url(redis_url) as client:
        assert client.get("a") is None


def test_the_s3_server_wants_its_keys(s3):
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-T", __file__, f"{s3.endpoint}/{s3.name}/file"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "403"
    signed = [*command, "--aws-sigv4", f"aws:amz:{s3.region}:s3", "-u", f"{s3.access_key}:{s3.secret_key}"]
    signed += ["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]
    assert subprocess.run(signed, capture_output=True, text=True).stdout == "200"


class Failing(Server):
    name = "failing"

    def command(self):
        return [sys.executable, "-c", "raise SystemExit('there is no such file')"]


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="there is no such file"):
        Failing(tmp_path).start()


def test_a_server_dies_with_whoever_started_it(tmp_path):
    owner = f"""
import pathlib, time
from scripts.testbed.databases import Redis
server = Redis(pathlib.Path({str(tmp_path)!r}), {free_port()})
server.start()
print(server.process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        server = psutil.Process(int(process.stdout.readline()))
        process.kill()
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the end of the server")


def test_no_two_processes_take_a_port_from_the_same_block():
    code = "from scripts.testbed.ports import free_port; print(*{free_port() for _ in range(50)}, flush=True); input()"
    command = [sys.executable, "-c", code]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as two,
    ):
        taken = [{int(port) // 100 for port in each.stdout.readline().split()} for each in (one, two)]
        for each in (one, two):
            each.communicate("\n")
    assert len(taken[0]) == len(taken[1]) == 1 and taken[0] != taken[1]


class Parent(Server):
    name = "parent"

    def command(self):
        code = (
            "import subprocess, sys, time\n"
            "children = [subprocess.Popen(['sleep', '600'], start_new_session=alone) for alone in (False, True)]\n"
            "open('pids', 'w').write(' '.join(str(each.pid) for each in children) + '.')\n"
            "time.sleep(600)"
        )
        return [sys.executable, "-c", code]

    def ready(self):
        pids = self.folder / "pids"
        return pids.exists() and pids.read_text().endswith(".")


def test_what_a_killed_server_started_in_a_session_of_its_own_is_not_waited_for(tmp_path, monkeypatch):
    parent = Parent(tmp_path)
    parent.start()
    _, apart = map(int, (tmp_path / "pids").read_text().rstrip(".").split())
    waited_for = []
    monkeypatch.setattr(psutil, "wait_procs", lambda processes, _: waited_for.extend(each.pid for each in processes))
    parent.kill()
    assert psutil.pid_exists(apart) and apart not in waited_for and len(waited_for) == 1
    for pid in (*waited_for, apart):
        psutil.Process(pid).kill()
