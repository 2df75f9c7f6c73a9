import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from trainyard import home


def this_process(**changes: object) -> home.YardFile:
    start = home.process_start_time(os.getpid())
    assert start is not None
    fields = {
        "endpoint": "127.0.0.1:1",
        "pid": os.getpid(),
        "start_time": start,
        "boot_id": home.boot_id(),
        "version": "0",
        "ephemeral": False,
    }
    return home.YardFile(**{**fields, **changes})  # type: ignore[arg-type]


def test_home_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINYARD_HOME", str(tmp_path / "yard"))
    assert home.home() == tmp_path / "yard"


def test_home_is_in_the_users_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRAINYARD_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home.home() == tmp_path / ".trainyard"


def test_a_home_that_this_user_cannot_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    # Permissions do not bind root, unless it gives up its capabilities.
    unprivileged = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [*unprivileged, sys.executable, "-c", "from trainyard import home; home.home()"]
    environment = {**os.environ, "TRAINYARD_HOME": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    tmp_path.chmod(0o700)
    assert f"InvalidArgument: the yard's home {tmp_path} cannot be read: Permission denied" in ended.stderr


def test_a_published_yard_is_found_again(tmp_path: Path) -> None:
    yard = this_process()
    home.write_endpoint(tmp_path, yard)
    assert home.read_endpoint(tmp_path) == yard
    assert [path.name for path in tmp_path.iterdir()] == ["yard.json"]


def test_a_yard_of_an_earlier_version_is_found(tmp_path: Path) -> None:
    """It does not say which root certificate its clients check."""
    fields = asdict(this_process())
    del fields["ca"]
    (tmp_path / "yard.json").write_text(json.dumps(fields))
    assert home.read_endpoint(tmp_path) == this_process()


def test_a_missing_yard_file_means_no_yard(tmp_path: Path) -> None:
    assert home.read_endpoint(tmp_path) is None
    assert home.read_endpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"endpoint": "127.0.0.1:1"})])
def test_a_damaged_yard_file_means_no_yard(tmp_path: Path, text: str) -> None:
    (tmp_path / "yard.json").write_text(text)
    assert home.read_endpoint(tmp_path) is None


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot_id": "another boot"}])
def test_a_reused_pid_is_not_the_yard(tmp_path: Path, change: dict[str, object]) -> None:
    home.write_endpoint(tmp_path, this_process(**change))
    assert home.read_endpoint(tmp_path) is None


def test_an_ended_process_has_no_start_time_even_while_it_is_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    start = home.process_start_time(child.pid)
    assert start is not None and home.is_alive(child.pid, start, home.boot_id())
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped
    assert home.process_start_time(child.pid) is None
    child.wait()
    assert home.process_start_time(child.pid) is None


def test_the_token_is_read_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert home.token(tmp_path) == "secret"
