"""Yards by name: kept for this user alone, and used by every command."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainyard import errors
from trainyard.client.connection import find
from trainyard.client.contexts import LOCAL, Context, Contexts, Release

LAB = Context("lab.example.com:443", "secret", "/etc/lab.crt")
CLUSTER = Release("yard", "trainyard", "big", "/etc/kubeconfig", "secret")


def known(folder: Path, **environ: str) -> Contexts:
    return Contexts(folder, environ)


def test_without_any_the_yard_of_this_machine_is_the_current_one(tmp_path: Path) -> None:
    contexts = known(tmp_path / "none")
    assert (contexts.names, contexts.current, contexts.chosen()) == ([LOCAL], LOCAL, None)


def test_a_context_is_kept_and_used(tmp_path: Path) -> None:
    known(tmp_path / "home").add("lab", LAB)
    assert known(tmp_path / "home").chosen() is None
    known(tmp_path / "home").use("lab")
    assert known(tmp_path / "home").chosen() == LAB
    assert known(tmp_path / "home").names == [LOCAL, "lab"]


def test_the_release_of_a_chart_is_kept_beside_addresses(tmp_path: Path) -> None:
    known(tmp_path).add("lab", LAB)
    known(tmp_path).add("cluster", CLUSTER)
    known(tmp_path).use("cluster")
    assert known(tmp_path).chosen() == CLUSTER
    assert known(tmp_path).get("lab") == LAB
    assert "secret" not in repr(CLUSTER) + str(CLUSTER)


@pytest.mark.parametrize("release", [Release("Yard", "a"), Release("yard", ""), Release("", "a"), Release("a/b", "a")])
def test_a_release_or_namespace_that_cannot_be_is_refused(tmp_path: Path, release: Release) -> None:
    with pytest.raises(errors.InvalidArgument, match="no name of a release or a namespace"):
        known(tmp_path).add("lab", release)


def test_tokens_are_for_their_user_alone(tmp_path: Path) -> None:
    known(tmp_path).add("lab", LAB)
    assert (tmp_path / "contexts.json").stat().st_mode & 0o777 == 0o600
    assert "secret" not in repr(LAB)


def test_the_environment_chooses_for_one_command(tmp_path: Path) -> None:
    known(tmp_path).add("lab", LAB)
    assert known(tmp_path, TRAINYARD_CONTEXT="lab").chosen() == LAB
    with pytest.raises(errors.NotFound, match="no context 'lub'"):
        known(tmp_path, TRAINYARD_CONTEXT="lub").chosen()


def test_removing_the_current_one_goes_back_to_this_machine(tmp_path: Path) -> None:
    contexts = known(tmp_path)
    contexts.add("lab", LAB)
    contexts.use("lab")
    contexts.remove("lab")
    assert (known(tmp_path).current, known(tmp_path).names) == (LOCAL, [LOCAL])


@pytest.mark.parametrize("name", ["", LOCAL, "../x", "a b", "-x", "x" * 64])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="cannot be the name"):
        known(tmp_path).add(name, LAB)


@pytest.mark.parametrize("endpoint", ["lab.example.com", "::1:443"])
def test_an_endpoint_that_is_not_host_and_port_is_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="is not host:port"):
        known(tmp_path).add("lab", Context(endpoint, "secret"))


def test_this_machine_stays(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match="stays"):
        known(tmp_path).remove(LOCAL)


@pytest.mark.parametrize("content", ["", "[]", '{"current": "a"}', '{"current": "a", "contexts": {"a": {"x": 1}}}'])
def test_a_broken_file_is_told_and_not_taken_for_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "contexts.json").write_text(content)
    with pytest.raises(errors.InvalidArgument, match=r"contexts\.json cannot be read"):
        known(tmp_path)


def test_a_client_goes_to_the_current_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TOKEN", "CA_FILE", "CONTEXT"):
        monkeypatch.delenv(f"TRAINYARD_{name}", raising=False)
    monkeypatch.setenv("TRAINYARD_HOME", str(tmp_path))
    known(tmp_path).add("lab", LAB)
    with pytest.raises(errors.NotRunning):
        find()
    known(tmp_path).use("lab")
    target = find()
    assert (target.endpoint, target.token, target.ca_file) == (LAB.endpoint, LAB.token, Path(LAB.ca))
    assert find("127.0.0.1:1", token="other").endpoint == "127.0.0.1:1"
