"""What DeepSpeed's launcher does beside torchrun's contract. No ssh: every node has its agent."""

# pathlib takes longer to import than a worker may wait.
# ruff: noqa: PTH118, PTH119

from __future__ import annotations

import json
import os

from trainyard.agent.plan import Plan
from trainyard.agent.spawn import CannotStart

# Options of the `deepspeed` command that say how many and where, which the spec says: with a value, and without.
_WITH_VALUE = frozenset(
    {"-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators",
     "--master_port", "--master_addr", "--node_rank", "--launcher", "--launcher_args", "--min_elastic_nodes",
     "--max_elastic_nodes", "--bind_core_list", "--ssh_port", "--venv_script"}
)  # fmt: skip
_WITHOUT_VALUE = frozenset(
    {"--no_ssh", "--no_ssh_check", "--force_multi", "--no_local_rank", "--save_pid", "--bind_cores_to_rank"}
)


def command_of(command: list[str]) -> list[str]:
    """`deepspeed [options] train.py args` as the command of one worker; other commands stay as they are.

    Raises:
        CannotStart: an option of the deepspeed launcher that the agent does not follow.
    """
    if os.path.basename(command[0]) not in ("deepspeed", "ds"):
        return command
    rest = command[1:]
    interpreter = ["python"]
    while rest and rest[0].startswith("-"):
        name, has_value, _ = rest[0].partition("=")
        if name == "--module":
            interpreter = ["python", "-m"]
        elif name == "--no_python":
            interpreter = []
        elif name in _WITH_VALUE and not has_value:
            rest = rest[1:]
        elif name not in _WITH_VALUE | _WITHOUT_VALUE:
            raise CannotStart(
                f"'{name}' of the deepspeed launcher is not supported here: nodes, workersPerNode and resources of the "
                "spec say what runs where. Put the script's own options behind the script"
            )
        rest = rest[1:]
    if not rest:
        raise CannotStart("the command is 'deepspeed' without a script: write [deepspeed, train.py, ...]")
    return [*interpreter, *rest]


def accelerator(plan: Plan) -> dict[str, str]:
    """The accelerator is what the job was given, not what the machine has."""
    return {"DS_ACCELERATOR": "cuda" if plan.gpus else "cpu"}


def write_hostfile(path: str, plan: Plan) -> None:
    """For scripts that read DLTS_HOSTFILE: all workers are reached at the master's address."""
    with open(path, "w") as file:
        file.write(f"{plan.master_addr or 'localhost'} slots={plan.world_size}\n")


def check_configuration(command: list[str], cwd: str, world_size: int) -> None:
    """Refuses a DeepSpeed configuration that cannot work, before torch is loaded.

    Raises:
        CannotStart: the file named by --deepspeed_config (or --deepspeed FILE) is missing, no JSON, or has batch sizes
            that do not fit the number of workers.
    """
    path = _configuration_file(command)
    if path is None:
        return
    try:
        with open(os.path.join(cwd, path)) as file:
            configuration = json.load(file)
    except OSError as error:
        raise CannotStart(f"the DeepSpeed configuration '{path}' cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CannotStart(f"the DeepSpeed configuration '{path}' is not JSON: {error}") from error
    if not isinstance(configuration, dict):
        raise CannotStart(f"the DeepSpeed configuration '{path}' is not a JSON object")
    _check_batch(path, configuration, world_size)


def _configuration_file(command: list[str]) -> str | None:
    for index, argument in enumerate(command):
        name, has_value, value = argument.partition("=")
        if name not in ("--deepspeed_config", "--deepspeed-config", "--deepspeed"):
            continue
        if not has_value:
            value = command[index + 1] if index + 1 < len(command) else ""
        if value.endswith(".json"):
            return value
    return None


def _check_batch(path: str, configuration: dict[str, object], world_size: int) -> None:
    total, micro = configuration.get("train_batch_size"), configuration.get("train_micro_batch_size_per_gpu")
    steps = configuration.get("gradient_accumulation_steps", 1)
    if not (isinstance(total, int) and isinstance(steps, int)):
        return
    if isinstance(micro, int) and total != micro * steps * world_size:
        raise CannotStart(
            f"'{path}': train_batch_size is {total}, but train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {world_size} workers is {micro * steps * world_size}"
        )
    if micro is None and total % (steps * world_size):
        raise CannotStart(
            f"'{path}': train_batch_size {total} is no multiple of "
            f"gradient_accumulation_steps {steps} x {world_size} workers"
        )
