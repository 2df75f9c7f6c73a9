"""The git context of a folder, asked of real repositories, also of hostile ones."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from trainyard.source import DIFF_BYTES, from_labels, git_context, redacted, to_labels, without_credentials


def git(folder: Path, *arguments: str) -> str:
    identity = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    identity |= {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    command = ["git", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **identity}, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit of `train.py` and `lib/model.py`."""
    root = tmp_path / "project"
    (root / "lib").mkdir(parents=True)
    (root / "train.py").write_text("print(1)\n")
    (root / "lib" / "model.py").write_text("layers = 2\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return root


def test_a_clean_folder_is_its_commit(repository: Path) -> None:
    git(repository, "remote", "add", "origin", "https://me:secret@example.org/team/project.git")
    assert git_context(repository / "lib") == {
        "commit": git(repository, "rev-parse", "HEAD"),
        "branch": "main",
        "remote": "https://example.org/team/project.git",
        "dirty": False,
    }


def test_outside_of_a_repository_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert git_context(tmp_path) == {}


def test_without_git_there_is_nothing_to_say(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_context(repository) == {}


def test_before_the_first_commit_there_is_a_branch_alone(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "new.py").write_text("")
    assert git_context(tmp_path) == {
        "commit": "",
        "branch": "main",
        "remote": "",
        "dirty": False,
        "untracked": ["new.py"],
    }


def test_a_detached_head_has_no_branch(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "--detach")
    assert git_context(repository)["branch"] == ""


def test_the_diff_applied_to_the_commit_gives_the_files_as_they_are(repository: Path, tmp_path: Path) -> None:
    (repository / "train.py").write_text("print(2)\n")
    git(repository, "add", "train.py")  # staged or not makes no difference
    (repository / "lib" / "model.py").unlink()
    context = git_context(repository)
    assert context["dirty"]
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "--quiet", str(repository), str(copy))
    (tmp_path / "patch").write_text(context["diff"])
    git(copy, "apply", str(tmp_path / "patch"))
    assert (copy / "train.py").read_text() == "print(2)\n"
    assert not (copy / "lib" / "model.py").exists()


def test_settings_of_the_user_do_not_change_the_diff(repository: Path) -> None:
    for setting in ("diff.noprefix=true", "diff.mnemonicPrefix=true", "color.ui=always", "diff.relative=true"):
        git(repository, "config", *setting.split("="))
    (repository / "train.py").write_text("print(2)\n")
    diff = git_context(repository / "lib")["diff"]
    assert diff.startswith("diff --git a/train.py b/train.py\n")
    assert "\x1b" not in diff


def test_a_diff_that_is_too_large_ends_with_a_mark(repository: Path) -> None:
    (repository / "train.py").write_text("x = 1\n" * DIFF_BYTES)
    diff = git_context(repository)["diff"]
    assert len(diff) < DIFF_BYTES + 100
    assert diff.splitlines()[-1] == "... cut here: only the first 256 KiB are kept"
    assert diff.splitlines()[-2] == "+x = 1"


def test_untracked_files_are_named_but_not_ignored_ones(repository: Path) -> None:
    (repository / ".gitignore").write_text("data/\n")
    (repository / "data").mkdir()
    (repository / "data" / "big.bin").write_text("x")
    (repository / "lib" / "new.py").write_text("")
    assert git_context(repository)["untracked"] == [".gitignore", "lib/new.py"]
    for number in range(150):
        (repository / f"n{number:03}.py").write_text("")
    untracked = git_context(repository)["untracked"]
    assert (len(untracked), untracked[-1]) == (101, "... and 52 more")


def test_only_the_files_asked_for_appear(repository: Path) -> None:
    (repository / "lib" / "secret.env").write_text("KEY=old\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "second")
    (repository / "lib" / "secret.env").write_text("KEY=hidden\n")
    (repository / "lib" / "model.py").write_text("layers = 3\n")
    (repository / "lib" / "other.env").write_text("")
    (repository / "lib" / "new.py").write_text("")
    (repository / "train.py").unlink()
    context = git_context(repository / "lib", paths=["model.py", "new.py"])
    assert "+layers = 3" in context["diff"]
    assert context["untracked"] == ["lib/new.py"]
    assert context["dirty"]
    for hidden in ("secret", "hidden", "other", "train.py"):
        assert hidden not in str(context)


def test_what_looks_like_credentials_is_in_no_diff(repository: Path) -> None:
    (repository / "lib" / ".env").write_text("KEY=old\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "second")
    (repository / "lib" / ".env").write_text("KEY=hidden\n")
    assert "diff" not in git_context(repository)
    (repository / "train.py").write_text("print(2)\n")
    (repository / "lib" / ".env").unlink()
    diff = git_context(repository)["diff"]
    assert "+print(2)" in diff
    assert "KEY" not in diff


def test_texts_for_others_lose_the_credentials_of_urls() -> None:
    told = "fetch of 'https://me:pw@example.org/x.git?token=t' and ssh://git@example.org/y failed: is it there?"
    assert redacted(told) == "fetch of 'https://example.org/x.git?' and ssh://example.org/y failed: is it there?"
    assert redacted("no@url?here") == "no@url?here"
    assert redacted("clone https://me:p/w@x@example.org/x.git: no") == "clone https://example.org/x.git: no"
    assert redacted("https://example.org:8443/x@y is there") == "https://example.org:8443/x@y is there"
    assert redacted("me:pw@example.org/x.git") == "example.org/x.git"


def test_names_are_names_and_never_patterns(repository: Path) -> None:
    (repository / "lib" / "*").write_text("star\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "second")
    (repository / "lib" / "*").write_text("changed\n")
    (repository / "lib" / "model.py").write_text("layers = 3\n")
    diff = git_context(repository / "lib", paths=["*"])["diff"]
    assert "+changed" in diff
    assert "layers" not in diff


@pytest.mark.parametrize("word", ["off", "0", "no", "False"])
def test_the_diff_can_be_left_out(repository: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    (repository / "train.py").write_text("print('secret')\n")
    assert "diff" not in git_context(repository, diff=False)
    monkeypatch.setenv("TRAINYARD_GIT_DIFF", word)
    context = git_context(repository)
    assert context["dirty"]
    assert "diff" not in context


def test_nothing_that_a_repository_configures_is_run_and_nothing_is_written(repository: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$0 $@" >> {ran}\ncat\n')
    program.chmod(0o755)
    hooks = repository / ".git" / "hooks"
    for hook in ("post-index-change", "fsmonitor-watchman", "post-checkout", "reference-transaction"):
        (hooks / hook).write_bytes(program.read_bytes())
        (hooks / hook).chmod(0o755)
    for key in (
        "core.fsmonitor",
        "diff.external",
        "diff.evil.command",
        "diff.evil.textconv",
        "filter.evil.clean",
        "filter.evil.smudge",
        "filter.a=b.clean",
        "filter.long.process",
        "core.pager",
        "pager.diff",
        "core.sshCommand",
        "core.askPass",
    ):
        git(repository, "config", key, str(program))
    git(repository, "config", "filter.evil.required", "true")
    (repository / ".gitattributes").write_text("*.py filter=evil diff=evil\n*.txt filter=a=b\n*.md filter=long\n")
    for name in ("train.py", "a.txt", "b.md"):
        (repository / name).write_text("print(3)\n")
    (repository / ".git" / "index.lock.probe").touch()
    before = {path: path.stat().st_mtime_ns for path in (repository / ".git").rglob("*")}
    context = git_context(repository)
    assert "+print(3)" in context["diff"]
    assert "problem" not in context
    assert not ran.exists(), ran.read_text()
    assert {path: path.stat().st_mtime_ns for path in (repository / ".git").rglob("*")} == before


def test_a_bare_repository_that_lies_in_a_folder_is_not_taken_for_its_own(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--bare", "inside")
    context = git_context(tmp_path / "inside")
    assert list(context) == ["problem"]


def test_variables_of_a_surrounding_git_do_not_lead_elsewhere(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "--quiet", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "/bin/false")
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'diff.external'='/bin/false'")
    (repository / "train.py").write_text("print(2)\n")
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        assert git_context(repository)["commit"], name
    assert "+print(2)" in git_context(repository)["diff"]


@pytest.mark.parametrize("hangs", ["read never", "exec >&-; read never", "while echo x; do :; done"])
def test_a_git_that_takes_too_long_is_ended_and_said_so(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    os.mkfifo(tmp_path / "never")
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\n{hangs} < {tmp_path}/never\n" if "never" in hangs else f"#!/bin/sh\n{hangs}\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    (problem,) = git_context(repository, timeout_s=0.2).values()
    assert problem in ("git took too long", "git rev-parse prints more than 8388608 bytes")


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://user:token@example.org/a.git", "https://example.org/a.git"),
        ("https://token@example.org:8443/a.git", "https://example.org:8443/a.git"),
        ("https://example.org/a.git?private_token=x#y", "https://example.org/a.git"),
        ("ssh://git:password@example.org:22/a.git", "ssh://git@example.org:22/a.git"),
        ("git@example.org:team/a.git", "git@example.org:team/a.git"),
        ("https://u:p@[::1]:8000/a", "https://[::1]:8000/a"),
        ("/srv/git/a.git", "/srv/git/a.git"),
        ("file:///srv/git/a.git", "file:///srv/git/a.git"),
        ("ext::ssh -i key u:p@host %S a", ""),
        ("https://u:p@host:notaport/a", ""),
        ("ftp://token@example.org/a.git", "ftp://example.org/a.git"),
        ("u:p@example.org/a.git", ""),
        ("//u:p@example.org/a.git", ""),
        ("", ""),
    ],
)
def test_credentials_never_stay_in_the_url_of_a_remote(url: str, kept: str) -> None:
    assert without_credentials(url) == kept


def test_a_context_survives_as_labels_of_an_artifact(repository: Path) -> None:
    (repository / "train.py").write_text("print(2)\n")
    context = git_context(repository)
    labels = to_labels(context, "project-diff@3")
    assert all(len(name) + len(value) <= 256 for name, value in labels.items())
    del context["diff"]
    assert from_labels({**labels, "team": "vision"}) == context | {"diff_artifact": "project-diff@3"}


def test_without_a_repository_there_are_no_labels() -> None:
    assert to_labels({}) == {}
    assert to_labels({"problem": "git took too long"}) == {}
    assert from_labels({"team": "vision"}) == {}
