"""What a folder takes on disk is what `du` says, and what cannot be counted is named."""

import os
import subprocess
from contextlib import contextmanager

from servicekit.tree import measure


def du(folder):
    said = subprocess.run(["du", "-sx", "--block-size=1", folder], capture_output=True, text=True)
    return int(said.stdout.split()[0])


def test_files_with_several_names_count_once_and_links_are_not_followed(tmp_path):
    folder = tmp_path / "a"
    (folder / "inner").mkdir(parents=True)
    (folder / "large").write_bytes(os.urandom(1_000_000))
    (folder / "small").write_bytes(b"x")
    with (folder / "sparse").open("wb") as file:
        file.truncate(10**9)
    os.link(folder / "large", folder / "inner/again")
    (folder / "out").symlink_to("/usr")
    (folder / "loop").symlink_to(folder)
    links = set()
    size = measure(folder, links)
    assert (size.bytes, size.files, size.unread) == (du(folder), 6, [])
    (tmp_path / "b").mkdir()
    os.link(folder / "large", tmp_path / "b/again")
    assert measure(tmp_path / "b", links).bytes < 1_000_000


def test_what_is_gone_takes_nothing(tmp_path):
    assert measure(tmp_path / "gone", set()).bytes == 0


def test_what_was_not_counted_in_time_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    size = measure(tmp_path, set(), give_up_at=0)
    assert (size.unread, size.unread_count) == ([f"{tmp_path}: not counted in time"], 1)


@contextmanager
def as_another_user():
    """Root may read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_cannot_be_read_is_named(tmp_path):
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0)
    with as_another_user():
        size = measure(closed / "inner", set())
    closed.chmod(0o700)
    assert (size.unread, size.unread_count) == ([f"{closed / 'inner'}: Permission denied"], 1)
