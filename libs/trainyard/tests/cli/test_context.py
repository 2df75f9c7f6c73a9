"""`yard context`: which yard commands talk to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libs.trainyard.tests.cli.commandline import run


async def test_a_context_is_added_listed_used_and_removed(tmp_path: Path) -> None:
    home = {"TRAINYARD_HOME": str(tmp_path)}
    added = await run(
        *("context", "add", "lab", "--endpoint", "127.0.0.1:9", "--token-file", "-"), stdin="secret\n", **home
    )
    assert (added.code, added.lines[0]) == (0, "lab is 127.0.0.1:9")
    assert (await run("context", "use", "lab", **home)).code == 0
    listed = await run("context", "list", **home)
    assert listed.lines == ["  local  the yard of this machine", "* lab  127.0.0.1:9"]
    assert "secret" not in (await run("context", "list", "-o", "json", **home)).out
    assert (await run("jobs", **home)).code == 4  # nobody listens there
    assert (await run("context", "remove", "lab", **home)).code == 0
    assert (await run("context", "list", **home)).lines == ["* local  the yard of this machine"]


async def test_a_context_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    ended = await run("context", "use", "lub", TRAINYARD_HOME=str(tmp_path))
    assert ended.code == 3
    assert "there is: local" in ended.err


async def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    arguments = ("context", "add", "lab", "--endpoint", "127.0.0.1:9", "--token-file", "-")
    assert (await run(*arguments, TRAINYARD_HOME=str(tmp_path))).code == 2


async def test_a_release_of_the_chart_is_added_by_its_name(tmp_path: Path) -> None:
    home = {"TRAINYARD_HOME": str(tmp_path)}
    words = ("--release", "yard", "--namespace", "trainyard", "--kube-context", "big")
    added = await run("context", "add", "lab", *words, **home)
    assert (added.code, added.lines[0]) == (0, "lab is release yard in namespace trainyard (kube context big)")
    listed = json.loads((await run("context", "list", "-o", "json", **home)).out)
    assert listed[1] == {
        "name": "lab",
        "endpoint": "",
        "release": "yard",
        "namespace": "trainyard",
        "kube_context": "big",
        "kubeconfig": "",
        "current": False,
    }


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--endpoint", "127.0.0.1:9"),
        ("--endpoint", "127.0.0.1:9", "--token-file", "-", "--release", "yard"),
        ("--endpoint", "127.0.0.1:9", "--token-file", "-", "--namespace", "trainyard"),
        ("--release", "yard", "--ca-file", "ca.crt"),
    ],
)
async def test_what_cannot_go_together_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = await run("context", "add", "lab", *words, stdin="secret", TRAINYARD_HOME=str(tmp_path))
    assert ended.code == 2
    assert not (tmp_path / "contexts.json").exists()


async def test_a_kube_context_that_does_not_exist_is_told_before_anything_is_tried(tmp_path: Path) -> None:
    home = {"TRAINYARD_HOME": str(tmp_path), "TRAINYARD_CONTEXT": "lab"}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(KUBECONFIG))
    words = ("--release", "yard", "--kubeconfig", str(kubeconfig), "--kube-context")
    assert (await run("context", "add", "lab", *words, "big", **home)).code == 0
    ended = await run("jobs", **home)
    assert ended.code == 3
    assert "big" in ended.err
    assert "kubectl config get-contexts" in ended.err


async def test_a_cluster_that_does_not_answer_is_told(tmp_path: Path) -> None:
    home = {"TRAINYARD_HOME": str(tmp_path), "TRAINYARD_CONTEXT": "lab"}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(KUBECONFIG))
    words = ("--release", "yard", "--kubeconfig", str(kubeconfig))
    assert (await run("context", "add", "lab", *words, **home)).code == 0
    ended = await run("run", "-", stdin=JOB, **home)
    assert ended.code == 4
    assert "release yard in namespace default: the cluster does not answer" in ended.err
    assert f"kubectl --kubeconfig {kubeconfig} --namespace default get pods" in ended.err


KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "small", "cluster": {"server": "http://127.0.0.1:9"}}],  # nobody listens there
    "users": [{"name": "me", "user": {}}],
    "contexts": [{"name": "small", "context": {"cluster": "small", "user": "me"}}],
    "current-context": "small",
}
JOB = """
apiVersion: trainyard.dev/v1alpha1
kind: TrainingJob
metadata: {name: hello}
spec: {runtime: process, command: [echo, hello]}
"""
