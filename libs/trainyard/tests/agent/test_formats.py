"""A checkpoint counts when it is whole."""

import json
import zipfile

import pytest
from trainyard.agent.candidates import Pattern
from trainyard.agent.formats import is_sharded, is_whole


def zip_file(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"x" * 1000)
    return path


def safetensors(path, size):
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    return path


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt"])
def test_a_whole_zip_is_whole_and_a_cut_one_is_not(tmp_path, suffix):
    path = zip_file(tmp_path / f"model{suffix}")
    assert is_whole(path)
    path.write_bytes(path.read_bytes()[:-10])
    assert not is_whole(path)


def test_safetensors_are_whole_when_all_their_bytes_are_there(tmp_path):
    assert is_whole(safetensors(tmp_path / "a.safetensors", 8))
    assert not is_whole(safetensors(tmp_path / "b.safetensors", 7))


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"\x02" + bytes(7) + b"[]"])
def test_what_is_no_safetensors_is_not_whole(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    assert not is_whole(tmp_path / "a.safetensors")


def test_an_empty_file_is_no_checkpoint(tmp_path):
    (tmp_path / "model.bin").touch()
    assert not is_whole(tmp_path / "model.bin")


def test_a_file_that_somebody_still_writes_is_not_whole(tmp_path):
    with (tmp_path / "model.bin").open("wb") as file:
        file.write(b"some")
        file.flush()
        assert not is_whole(tmp_path / "model.bin")
    assert is_whole(tmp_path / "model.bin")


def test_a_distributed_checkpoint_is_whole_with_its_metadata(tmp_path):
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"x")
    assert not is_whole(folder)
    (folder / ".metadata").write_bytes(b"x")
    assert is_whole(folder)
    assert is_sharded(folder)


def test_a_folder_of_one_process_is_not_sharded(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "model.bin").write_bytes(b"x")
    assert not is_sharded(tmp_path / "step-1")


def test_a_checkpoint_of_trainkit_is_sharded_where_files_of_other_processes_are_elsewhere(tmp_path):
    first, second = tmp_path / "step-1", tmp_path / "other" / "step-1"
    for rank, folder in enumerate((first, second)):
        folder.mkdir(parents=True)
        (folder / f"rank-0000{rank}.safetensors").write_bytes(b"x")
    assert is_sharded(second) and is_sharded(first)
    files = [{"name": f"rank-0000{rank}.safetensors"} for rank in range(2)]
    (first / "manifest.json").write_text(json.dumps({"files": files}))
    assert is_sharded(first)
    (first / "rank-00001.safetensors").write_bytes(b"x")
    assert not is_sharded(first)


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("step-{step}.pt", "step-12.pt", 12),
        ("step-{step}.pt", "step-0012.pt", 12),
        ("step-{step}.pt", "step-.pt", None),
        ("step-{step}.pt", "step-1.pt.tmp", None),
        ("step-{step}.pt", "xstep-1.pt", None),
        ("step-{step}.pt", "step-1xpt", None),
        ("*-{step}-*.ckpt", "model-7-best.ckpt", 7),
        ("{step}", "5", 5),
    ],
)
def test_a_pattern_is_a_glob_with_a_step_in_it(pattern, name, step):
    assert Pattern(pattern).step(name) == step
