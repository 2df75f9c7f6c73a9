"""Folders of services."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from servicekit.disk import require_writable

OTHER = 65532


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """As a service's pod, which does not run as root."""
    if os.geteuid():
        yield
        return
    os.setegid(OTHER)
    os.seteuid(OTHER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder that its owner alone may enter, or nobody when that is this user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "volume"
        folder.mkdir(mode=0o555 if os.geteuid() else 0o755)
        yield folder


@pytest.mark.parametrize("home", [".", "scheduler"])
def test_a_volume_that_ignores_the_pods_group_is_refused_by_name_with_what_to_do(volume: Path, home: str) -> None:
    with as_somebody_else(), pytest.raises(RuntimeError) as refused:
        require_writable(volume / home)
    message = str(refused.value)
    assert message.startswith("FolderNotWritable")
    for word in (str(volume), "fsGroup", "chown -R 65532:65532", "podSecurityContext", f"user {volume.stat().st_uid}"):
        assert word in message


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    require_writable(tmp_path / "home")
    assert list((tmp_path / "home").iterdir()) == []


def test_a_full_disk_does_not_keep_a_service_from_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    require_writable(tmp_path)
