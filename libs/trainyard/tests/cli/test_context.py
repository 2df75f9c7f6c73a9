"""`yard context`: which yard commands talk to."""

from __future__ import annotations

from pathlib import Path

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
