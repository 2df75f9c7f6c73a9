"""The workers of a node: their commands and their environment.

`torchrun` and `deepspeed` jobs get torchrun's environment contract (static rendezvous) from the agent itself, without
importing torch. A command that names `torchrun` runs the stock one, once per node, with its options given as PET_*.
"""

# pathlib takes longer to import than a worker may wait.
# ruff: noqa: PTH100, PTH103, PTH104, PTH115, PTH118, PTH119, PTH120, PTH211

from __future__ import annotations

import os
import sys

from trainyard.agent import deepspeed
from trainyard.agent.plan import Plan
from trainyard.agent.spawn import Command, Worker

# What the launcher gives the agent for itself, and must not reach the user's program.
_OF_THE_AGENT = frozenset({"MALLOC_ARENA_MAX", "GRPC_ENABLE_FORK_SUPPORT"})
# About the Python that the agent runs in; what an image says of its own Python is the program's.
_OF_ITS_PYTHON = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})


def workers_of(plan: Plan, folder: str, *, cwd: str = "", python_bin: str = "", resume_from: str = "") -> list[Worker]:
    """The workers this node has to start.

    Args:
        folder: the node's folder.
        cwd: where the workers run; the node's work folder unless code says otherwise.
        python_bin: folder of the `python` to use; the agent's own by default.
        resume_from: the restored checkpoint, absolute; "" for none.

    Raises:
        CannotStart: the command cannot be run under this runtime.
    """
    cwd = cwd or f"{folder}/work"
    shared = _shared(plan, folder, cwd, python_bin or own_python(plan), resume_from)
    if names_torchrun(plan.command):
        # It copies there what the worker that failed first has recorded.
        recorded = {"TORCHELASTIC_ERROR_FILE": error_file(folder, plan.first_rank)}
        environment = {**shared, **_torchrun_options(plan), **_gpus(plan, None), **recorded}
        return [_worker(plan, folder, 0, list(plan.command), environment, cwd)]
    command = _command(plan, folder, cwd, shared)
    return [
        _worker(plan, folder, local_rank, command, {**shared, **_of_worker(plan, folder, local_rank, shared)}, cwd)
        for local_rank in range(plan.workers_per_node)
    ]


def error_file(folder: str, rank: int) -> str:
    """Where torch's `record` decorator leaves the exception of a worker."""
    return f"{folder}/out/error-{rank}.json"


def output_file(folder: str, rank: int) -> str:
    """The raw output of a worker."""
    return f"{folder}/out/rank-{rank}.log"


def _worker(plan: Plan, folder: str, local_rank: int, argv: list[str], env: dict[str, str], cwd: str) -> Worker:
    rank = plan.first_rank + local_rank
    env = {**env, "TRAINYARD_RANK": str(rank)}
    return Worker(rank, local_rank, Command(argv, env, cwd, output_file(folder, rank)))


def own_python(plan: Plan) -> str:
    """Folder of the agent's `python`, for workers that bring none; an image brings its own."""
    return "" if plan.in_image else os.path.dirname(sys.executable)


def names_torchrun(command: list[str]) -> bool:
    """Whether a command is the installed torchrun, which starts the workers of a node itself."""
    return os.path.basename(command[0]) == "torchrun" or command[1:3] == ["-m", "torch.distributed.run"]


def _command(plan: Plan, folder: str, cwd: str, shared: dict[str, str]) -> list[str]:
    command = list(plan.command)
    if plan.runtime == "deepspeed":
        command = deepspeed.command_of(command)
        deepspeed.check_configuration(command, cwd, plan.world_size)
        deepspeed.write_hostfile(shared["DLTS_HOSTFILE"], plan)
    if plan.runtime != "process" and command[0].endswith(".py"):
        command.insert(0, "python")  # as torchrun does
    return command


def _shared(plan: Plan, folder: str, cwd: str, python_bin: str, resume_from: str) -> dict[str, str]:
    dropped = _OF_THE_AGENT if plan.in_image else _OF_THE_AGENT | _OF_ITS_PYTHON
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    environment = {**inherited, "PYTHONUNBUFFERED": "1"}
    if plan.runtime == "deepspeed":
        environment |= {"DLTS_HOSTFILE": f"{folder}/hostfile"} | deepspeed.accelerator(plan)
    environment |= plan.env
    # Libraries would take as many as the machine has cores, whatever the limit. A torchrun of the user decides itself.
    if plan.threads and not names_torchrun(plan.command):
        environment.setdefault("OMP_NUM_THREADS", str(plan.threads))
    environment["PATH"] = os.pathsep.join(filter(None, [python_bin, environment.get("PATH", os.defpath)]))
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [environment.get("PYTHONPATH", ""), tracker_path(plan, folder)])
    )
    environment |= {
        "TRAINYARD_JOB_ID": plan.job_id,
        "TRAINYARD_JOB_NAME": plan.job_name,
        "TRAINYARD_ATTEMPT": str(plan.fence),
        "TRAINYARD_ATTEMPT_ID": plan.attempt_id,
        "TRAINYARD_NODE": str(plan.node),
        "TRAINYARD_TRACKER_DIR": f"{folder}/tracker",
    }
    environment.pop("TRAINYARD_RESUME_FROM", None)
    if plan.checkpoints:
        environment["TRAINYARD_CHECKPOINT_DIR"] = os.path.join(cwd, plan.checkpoints.path)
    if resume_from:
        environment["TRAINYARD_RESUME_FROM"] = resume_from
    return environment


def _of_worker(plan: Plan, folder: str, local_rank: int, shared: dict[str, str]) -> dict[str, str]:
    if plan.runtime == "process":
        return _gpus(plan, local_rank)
    rank, world, local = str(plan.first_rank + local_rank), str(plan.world_size), str(plan.workers_per_node)
    contract = {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(plan.node),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local,
        "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(plan.nodes),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(plan.master_port),
        "TORCHELASTIC_RUN_ID": plan.attempt_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file(folder, int(rank)),
    }
    if plan.workers_per_node > 1 and "OMP_NUM_THREADS" not in shared:
        contract["OMP_NUM_THREADS"] = "1"  # as torchrun does: several workers would fight for the cores
    return contract | _gpus(plan, None)


def _torchrun_options(plan: Plan) -> dict[str, str]:
    return {
        "PET_NNODES": str(plan.nodes),
        "PET_NODE_RANK": str(plan.node),
        "PET_NPROC_PER_NODE": str(plan.workers_per_node),
        "PET_MASTER_ADDR": plan.master_addr,
        "PET_MASTER_PORT": str(plan.master_port),
    }


def _gpus(plan: Plan, local_rank: int | None) -> dict[str, str]:
    """The devices a worker may see: its own, or, for torchrun (None), all of the node's, as LOCAL_RANK picks."""
    if "CUDA_VISIBLE_DEVICES" in plan.env:
        return {}
    gpus = plan.gpus
    if local_rank is not None:
        first = local_rank * plan.gpus_per_worker
        gpus = gpus[first : first + plan.gpus_per_worker]
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def tracker_path(plan: Plan, folder: str) -> str:
    """A folder that holds this package alone: workers find the tracker, and no other module of ours."""
    base = f"{plan.state_dir or folder}/tracker-path"
    link = f"{base}/trainyard"
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        if os.readlink(link) == package:
            return base
    except OSError:
        os.makedirs(base, exist_ok=True)
    draft = f"{link}.{os.getpid()}"
    os.symlink(package, draft)
    os.rename(draft, link)
    return base
