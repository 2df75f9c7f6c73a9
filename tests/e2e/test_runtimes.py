"""How workers are started: torchrun's contract, several nodes on one machine, real collectives, plain commands."""

import sys
import textwrap

import pytest

from tests.jobs import WAIT_S, document, output, python

CONTRACT = """
    import os
    names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_RANK"]
    print(*(f"{name}={os.environ[name]}" for name in names))
    print("master", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
"""


def test_ranks_count_over_all_nodes(client):
    job = client.submit(document(python(CONTRACT), runtime="torchrun", nodes=2, workersPerNode=2))
    job.wait(WAIT_S)
    for rank in range(4):
        ranks, master = output(job, rank)
        assert ranks == (
            f"RANK={rank} LOCAL_RANK={rank % 2} GROUP_RANK={rank // 2} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 "
            f"GROUP_WORLD_SIZE=2 ROLE_RANK={rank}"
        )
        assert master == output(job, 0)[1]


ALL_REDUCE = """
    import os
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    # One write: the workers of the stock torchrun share a file.
    os.write(1, f"sum {value.item()} of {dist.get_world_size()}\\n".encode())
    dist.destroy_process_group()
"""
ROOM_FOR_TORCH = {"cpu": "500m", "memory": "1Gi"}


def test_workers_of_two_nodes_reduce_together(client):
    job = client.submit(document(python(ALL_REDUCE), runtime="torchrun", nodes=2, resources=ROOM_FOR_TORCH))
    job.wait(WAIT_S)
    assert sorted(output(job)) == ["sum 3.0 of 2"] * 2


def test_a_command_that_names_torchrun_gets_the_stock_one(client, tmp_path):
    (tmp_path / "reduce.py").write_text(textwrap.dedent(ALL_REDUCE))
    command = ["torchrun", "reduce.py"]
    code = {"path": str(tmp_path)}
    job = client.submit(document(command, runtime="torchrun", workersPerNode=2, resources=ROOM_FOR_TORCH, code=code))
    job.wait(WAIT_S)
    assert sorted(line for line in output(job) if line.startswith("sum")) == ["sum 3.0 of 2"] * 2


PLAIN = "import os; print(os.environ['TRAINYARD_RANK'], os.environ['TRAINYARD_NODE'], 'RANK' in os.environ)"


def test_plain_processes_are_told_their_rank_by_the_yard_alone(client):
    job = client.submit(document(python(PLAIN), runtime="process", nodes=2, workersPerNode=2))
    job.wait(WAIT_S)
    assert [output(job, rank) for rank in range(4)] == [[f"{rank} {rank // 2} False"] for rank in range(4)]


def test_a_command_of_any_kind_runs(client):
    job = client.submit(document(["sh", "-c", "echo out; echo err >&2; printf 'no line end'"]))
    job.wait(WAIT_S)
    assert output(job) == ["out", "err", "no line end"]


@pytest.mark.parametrize(
    "command",
    [
        ["deepspeed", "train.py", "--flag"],
        ["deepspeed", "--num_gpus=2", "--master_port", "29501", "train.py", "--flag"],
        ["train.py", "--flag"],
    ],
)
def test_the_deepspeed_command_runs_its_script_in_every_worker(client, tmp_path, command):
    script = """
        import os, sys
        print(sys.argv[1:], os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["DS_ACCELERATOR"])
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    code = {"path": str(tmp_path)}
    job = client.submit(document(command, runtime="deepspeed", workersPerNode=2, code=code))
    job.wait(WAIT_S)
    assert [output(job, rank) for rank in (0, 1)] == [[f"['--flag'] {rank} 2 cpu"] for rank in (0, 1)]


def test_a_deepspeed_configuration_that_cannot_work_is_refused_before_the_start(client, tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text('{"train_batch_size": 7}')
    command = ["deepspeed", "train.py", "--deepspeed_config", "ds.json"]
    job = client.submit(document(command, runtime="deepspeed", workersPerNode=2, code={"path": str(tmp_path)}))
    ended = job.wait(WAIT_S, check=False)
    assert ended.reason == "StartFailed"
    assert "train_batch_size" in ended.message


def test_workers_use_the_interpreter_of_the_yard(client):
    job = client.submit(document(python("import sys; print(sys.executable)")))
    job.wait(WAIT_S)
    assert output(job) == [sys.executable]
