"""Commands and environments of workers."""

import json
import os
import sys
from pathlib import Path

import pytest
from trainyard.agent import deepspeed
from trainyard.agent.contract import workers_of
from trainyard.agent.plan import Plan
from trainyard.agent.spawn import CannotStart


def plan(**fields):
    return Plan({"attempt_id": "a", "job_id": "j", "runtime": "torchrun", "command": ["python", "t.py"], **fields})


def env_of(tmp_path, rank=0, **fields):
    return workers_of(plan(**fields), str(tmp_path))[rank].env


def test_path_begins_with_the_interpreters_folder(tmp_path):
    assert env_of(tmp_path)["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_pythonpath_holds_the_tracker_and_nothing_inherited(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    [folder] = env_of(tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert [path.name for path in Path(folder).iterdir()] == ["trainyard"]


def test_the_users_pythonpath_comes_first(tmp_path):
    assert env_of(tmp_path, env={"PYTHONPATH": "src"})["PYTHONPATH"].startswith("src:")


def test_what_an_image_says_of_its_python_is_for_the_workers(tmp_path, monkeypatch):
    said = {"PYTHONPATH": "/opt/theirs", "PYTHONHOME": "/usr", "VIRTUAL_ENV": "/opt/venv"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    in_image = env_of(tmp_path, in_image=True)
    assert in_image["PYTHONPATH"].startswith("/opt/theirs:")
    assert (in_image["PYTHONHOME"], in_image["VIRTUAL_ENV"]) == ("/usr", "/opt/venv")
    assert env_of(tmp_path, in_image=True, env={"PYTHONPATH": "src"})["PYTHONPATH"].startswith("src:")
    here = env_of(tmp_path)
    assert not here.keys() & {"PYTHONHOME", "VIRTUAL_ENV"}
    assert "/opt/theirs" not in here["PYTHONPATH"]


def test_the_users_thread_count_is_kept(tmp_path):
    assert env_of(tmp_path, workers_per_node=2, env={"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def test_a_single_worker_may_use_all_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in env_of(tmp_path)


@pytest.mark.parametrize("fields", [{}, {"runtime": "process"}])
def test_a_worker_with_a_limit_for_itself_is_told_its_cores_unless_the_user_said_otherwise(
    tmp_path, monkeypatch, fields
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert env_of(tmp_path, threads=3, **fields)["OMP_NUM_THREADS"] == "3"
    assert env_of(tmp_path, threads=3, env={"OMP_NUM_THREADS": "4"}, **fields)["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # by the image, for instance
    assert env_of(tmp_path, threads=3, **fields)["OMP_NUM_THREADS"] == "2"


def test_a_command_that_names_torchrun_leaves_the_threads_to_it(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in env_of(tmp_path, threads=3, command=["torchrun", "--nproc-per-node", "4", "t.py"])


def test_torchrun_workers_see_all_devices_of_their_node(tmp_path):
    workers = workers_of(plan(workers_per_node=2, gpus=[4, 5], gpus_per_worker=1), str(tmp_path))
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["4,5", "4,5"]


def test_plain_workers_see_their_own_devices(tmp_path):
    fields = {"runtime": "process", "workers_per_node": 2, "gpus": [4, 5, 6, 7], "gpus_per_worker": 2}
    workers = workers_of(plan(**fields), str(tmp_path))
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["4,5", "6,7"]


def test_without_devices_none_is_visible(tmp_path):
    assert env_of(tmp_path)["CUDA_VISIBLE_DEVICES"] == ""


def test_a_command_that_names_torchrun_runs_the_stock_one_once_with_its_options(tmp_path):
    fields = {"command": ["torchrun", "t.py"], "workers_per_node": 4, "nodes": 2, "node": 1, "master_port": 29500}
    [worker] = workers_of(plan(**fields), str(tmp_path))
    assert worker.argv == ["torchrun", "t.py"]
    assert worker.rank == 4
    assert (worker.env["PET_NPROC_PER_NODE"], worker.env["PET_NNODES"], worker.env["PET_NODE_RANK"]) == ("4", "2", "1")
    assert "RANK" not in worker.env


def test_a_script_alone_is_run_by_python(tmp_path):
    assert workers_of(plan(command=["train.py", "-x"]), str(tmp_path))[0].argv == ["python", "train.py", "-x"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["deepspeed", "train.py", "--a"], ["python", "train.py", "--a"]),
        (["deepspeed", "--num_gpus", "2", "--master_port=1", "train.py"], ["python", "train.py"]),
        (["deepspeed", "--module", "pkg.train"], ["python", "-m", "pkg.train"]),
        (["python", "train.py", "--deepspeed"], ["python", "train.py", "--deepspeed"]),
    ],
)
def test_the_deepspeed_launchers_command_becomes_one_workers(command, expected):
    assert deepspeed.command_of(command) == expected


def test_an_unknown_option_of_the_deepspeed_launcher_is_refused_with_advice():
    with pytest.raises(CannotStart, match="'--autotuning' of the deepspeed launcher is not supported"):
        deepspeed.command_of(["deepspeed", "--autotuning", "run", "train.py"])


def test_deepspeed_uses_the_accelerator_the_job_was_given(tmp_path):
    assert env_of(tmp_path, runtime="deepspeed")["DS_ACCELERATOR"] == "cpu"
    assert env_of(tmp_path, runtime="deepspeed", gpus=[0])["DS_ACCELERATOR"] == "cuda"


def test_a_hostfile_names_all_workers(tmp_path):
    environment = env_of(tmp_path, runtime="deepspeed", workers_per_node=2, master_addr="127.0.0.1")
    with open(environment["DLTS_HOSTFILE"]) as file:
        assert file.read() == "127.0.0.1 slots=2\n"


def check(tmp_path, configuration, world_size):
    (tmp_path / "ds.json").write_text(json.dumps(configuration))
    deepspeed.check_configuration(["python", "t.py", "--deepspeed_config", "ds.json"], str(tmp_path), world_size)


def test_batch_sizes_that_do_not_fit_the_workers_are_refused_before_the_start(tmp_path):
    with pytest.raises(CannotStart, match=r"train_batch_size is 32, but .* 8 x .* 1 x 2 workers is 16"):
        check(tmp_path, {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8}, 2)
    with pytest.raises(CannotStart, match="no multiple"):
        check(tmp_path, {"train_batch_size": 33}, 2)


def test_batch_sizes_that_fit_are_accepted(tmp_path):
    check(tmp_path, {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 16}, 2)
    check(tmp_path, {"train_batch_size": "auto"}, 2)


def test_a_configuration_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CannotStart, match=r"'ds\.json' cannot be read: No such file"):
        deepspeed.check_configuration(["python", "t.py", "--deepspeed_config=ds.json"], str(tmp_path), 1)
