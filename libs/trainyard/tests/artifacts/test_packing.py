"""What of a folder is code."""

import os
import subprocess

import pytest
from trainyard.artifacts import TreeTooLarge, UnsafePath, pack_code
from trainyard.results import ResultPaths

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n"
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


@pytest.fixture
def folder(tmp_path):
    def make(files):
        for name, content in files.items():
            path = tmp_path / "code" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path / "code"

    return make


def packed(root, *exclude, **limits):
    return names(pack_code(root, exclude, **limits).packed)


def names(paths):
    return [path.as_posix() for path in paths]


def test_everything_is_packed_but_what_is_never_code(folder):
    root = folder({"train.py": "", "a/b.py": "", ".git/HEAD": "", "a/__pycache__/b.pyc": "", ".venv/bin/python": ""})
    assert packed(root) == ["a/b.py", "train.py"]


def test_ignore_files_and_exclusions_leave_out(folder):
    root = folder(
        {
            "train.py": "",
            ".gitignore": "*.log\n/data/\n",
            ".yardignore": "notes/\n",
            "run.log": "",
            "data/x": "",
            "a/data/kept": "",
            "notes/x": "",
            "big/x.bin": "",
        }
    )
    assert packed(root, "*.bin") == [".gitignore", ".yardignore", "a/data/kept", "train.py"]


def test_deeper_ignore_files_win_and_can_take_back(folder):
    root = folder(
        {".gitignore": "*.txt\n", "a/.gitignore": "!keep.txt\n", "a/keep.txt": "", "a/drop.txt": "", "b.txt": ""}
    )
    assert packed(root) == [".gitignore", "a/.gitignore", "a/keep.txt"]


def test_yardignore_can_take_back_what_gitignore_left_out_but_not_an_exclusion(folder):
    root = folder({".gitignore": "*.bin\n", ".yardignore": "!*.bin\n", "model.bin": "", "other.bin": ""})
    assert packed(root, "other.bin") == [".gitignore", ".yardignore", "model.bin"]


def test_ignore_files_of_the_repository_around_count(folder):
    root = folder({".git/HEAD": "", ".gitignore": "*.log\n", "jobs/train.py": "", "jobs/run.log": ""})
    assert packed(root / "jobs") == ["train.py"]


def test_git_would_pack_the_same(folder, tmp_path):
    files = {
        ".gitignore": "*.o\n!keep.o\nbuild/\n/top\ndocs/**/*.html\n\\#odd\n",
        "sub/.gitignore": "*.c\n!main.c\n",
        **dict.fromkeys(
            ["a.o", "keep.o", "build/x", "top/x", "sub/top", "sub/main.c", "sub/x.c", "docs/a/b.html"], "x"
        ),
        **dict.fromkeys(["docs/a/b.md", "#odd", "sub/deep/x.c", "sub/deep/build/y", "plain file.txt"], "x"),
    }
    root = folder(files)
    subprocess.run(["git", "init", "-q", root], check=True)
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert packed(root) == sorted(filter(None, listed.stdout.split("\0")))


def test_too_much_is_refused_and_the_largest_are_named(folder):
    root = folder({"train.py": "x", "data/huge.bin": "x" * 5000, "data/more.bin": "x" * 2000, "ckpt.pt": "x" * 3000})
    with pytest.raises(TreeTooLarge, match=r"Largest: data .* in 2 files\), ckpt\.pt") as caught:
        pack_code(root, max_bytes=1000)
    assert ".yardignore" in caught.value.hint
    with pytest.raises(TreeTooLarge, match="4 files"):
        pack_code(root, max_files=3)


def test_links_stay_links_and_may_not_point_outside(folder):
    root = folder({"a/train.py": ""})
    (root / "entry.py").symlink_to("a/train.py")
    assert packed(root) == ["a/train.py", "entry.py"]
    (root / "data").symlink_to("/mnt/data")
    with pytest.raises(UnsafePath, match="'data' points to the absolute path"):
        pack_code(root)
    assert packed(root, "data") == ["a/train.py", "entry.py"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        pack_code(tmp_path / "nothing")


def test_what_lies_where_the_job_writes_its_results_is_no_code(folder):
    root = folder(
        {
            "train.py": "",
            "exports/model.bin": "old",
            "exports/deep/x": "",
            "exported.py": "",
            "ckpt/step-9.pt": "old",
            "a/model.pt": "old",
            "a/model.py": "",
            ".yardignore": "!exports/\n",
        }
    )
    results = ResultPaths.of(["./exports/", "a/model.pt"], "ckpt", "step-{step}.pt")
    found = pack_code(root, results=results)
    assert names(found.packed) == [".yardignore", "a/model.py", "exported.py", "train.py"]
    assert names(found.results) == ["a/model.pt", "ckpt/step-9.pt", "exports/deep/x", "exports/model.bin"]


def test_of_checkpoints_beside_the_code_only_checkpoints_are_left_out(folder):
    root = folder({"train.py": "", "step-9.pt": "old", "step-10.pt/part": "old", "step-x.pt": "", "deep/step-9.pt": ""})
    found = pack_code(root, results=ResultPaths.of(["."], ".", "step-{step}.pt"))
    assert names(found.packed) == ["deep/step-9.pt", "step-x.pt", "train.py"]
    assert names(found.results) == ["step-10.pt/part", "step-9.pt"]


def test_results_do_not_count_as_code_that_is_too_large(folder):
    root = folder({"train.py": "x", "exports/model.bin": "x" * 5000})
    assert packed(root, results=ResultPaths.of(["exports"]), max_bytes=1000) == ["train.py"]


def test_what_looks_like_credentials_is_left_out_and_no_ignore_file_takes_it_back(folder):
    secret = {
        **dict.fromkeys([".env", ".env.local", "a/.ENV.production", ".netrc", "a/.aws/config", "id_ed25519"], "x"),
        **dict.fromkeys([".docker/config.json", "a/.docker/config.json", "store.p12"], "x"),
        "a/server.key": KEY,
        "anything": f"\n{KEY}",
        "bundle.pem": CERTIFICATE + KEY,
        "account.json": '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMIIE"}',
    }
    code = {
        **dict.fromkeys([".env.example", ".env.local.sample", "id_ed25519.pub", "env", "a/aws/config"], "x"),
        "ca.pem": CERTIFICATE,
        "test_keys.py": f'KEY = """{KEY}"""\n',
        ".yardignore": "!.env\n!*\n",
    }
    found = pack_code(folder({**secret, **code}))
    assert names(found.packed) == sorted(code)
    assert names(found.credentials) == sorted(secret)


def test_what_is_ignored_or_excluded_is_not_told_as_left_out(folder):
    root = folder({".gitignore": ".env\n", ".env": "x", "exports/model.bin": "x", "key.p12": "x"})
    found = pack_code(root, ["exports/", "*.p12"], results=ResultPaths.of(["exports"]))
    assert (names(found.packed), found.results, found.credentials) == ([".gitignore"], [], [])


def test_a_name_that_is_not_utf_8_is_refused_as_it_is_and_can_be_left_out(folder):
    root = folder({"train.py": "", "data/a": ""})
    (root / os.fsdecode(b"data/caf\xe9.txt")).touch()
    with pytest.raises(UnsafePath, match=r"'data/caf\\xe9\.txt' is not valid UTF-8") as caught:
        packed(root)
    assert ".yardignore" in caught.value.hint
    (root / ".yardignore").write_bytes(b"caf\xe9*\n")
    assert packed(root) == [".yardignore", "data/a", "train.py"]
    assert packed(root, "*.txt") == [".yardignore", "data/a", "train.py"]
