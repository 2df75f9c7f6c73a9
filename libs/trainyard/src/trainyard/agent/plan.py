"""What the launcher wrote for this node: `plan.json`, a `NodePlan` of launcher.proto in JSON.

Read without protobuf and dataclasses, because the workers wait for it.
"""

from __future__ import annotations

import json

PLAN_FILE = "plan.json"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Input:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.artifact: str = fields["artifact"]
        self.path: str = fields["path"]


class Output(Input):
    """A path below the work folder, and the artifact it becomes."""


class Checkpoints:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.path: str = fields["path"]
        self.pattern: str = fields["pattern"]
        self.keep_last: int = fields.get("keep_last", 0)
        self.best_metric: str = fields.get("best_metric", "")
        self.best_mode: str = fields.get("best_mode", "")
        self.settle_s: float = fields.get("settle_s", 0.0) or 1.0


class CodeGit:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.url: str = fields["url"]
        self.ref: str = fields.get("ref", "")
        self.path: str = fields.get("path", "")


class LogRule:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.rule: int = fields.get("rule", 0)
        self.pattern: str = fields["pattern"]


class Plan:
    """See `NodePlan` for what the fields mean."""

    def __init__(self, fields: dict[str, Any]) -> None:
        get = fields.get
        self.workspace: str = get("workspace", "")
        self.job_id: str = get("job_id", "")
        self.job_name: str = get("job_name", "")
        self.attempt_id: str = fields["attempt_id"]
        self.fence: int = get("fence", 0)
        self.node: int = get("node", 0)
        self.nodes: int = get("nodes", 0) or 1
        self.workers_per_node: int = get("workers_per_node", 0) or 1
        self.runtime: str = get("runtime", "") or "process"
        self.command: list[str] = get("command", [])
        self.env: dict[str, str] = get("env", {})
        self.gpus: list[int] = get("gpus", [])
        self.gpus_per_worker: int = get("gpus_per_worker", 0)
        self.master_addr: str = get("master_addr", "")
        self.master_port: int = get("master_port", 0)
        self.code_artifact: str = get("code_artifact", "")
        self.code_git = CodeGit(fields["code_git"]) if "code_git" in fields else None
        self.requirements: str = get("requirements", "")
        self.inputs = [Input(each) for each in get("inputs", [])]
        self.checkpoints = Checkpoints(fields["checkpoints"]) if "checkpoints" in fields else None
        self.outputs = [Output(each) for each in get("outputs", [])]
        self.log_rules = [LogRule(each) for each in get("log_rules", [])]
        self.grace_s: float = get("grace_s", 0.0)
        self.hang_timeout_s: float = get("hang_timeout_s", 0.0)
        self.token: str = get("token", "")
        self.endpoint: str = get("endpoint", "")
        self.endpoint_file: str = get("endpoint_file", "")
        self.rejected_checkpoints: list[str] = get("rejected_checkpoints", [])
        self.tied_to_pid: int = get("tied_to_pid", 0)
        self.tied_to_start_time = int(get("tied_to_start_time", 0))
        self.cgroup_procs: list[str] = get("cgroup_procs", [])
        self.state_dir: str = get("state_dir", "")
        self.ca_file: str = get("ca_file", "")
        self.run_name: str = get("run_name", "") or self.job_name
        self.spec_json: str = get("spec_json", "")
        self.in_image: bool = get("in_image", False)
        self.memory_bytes = int(get("memory_bytes", 0))
        self.threads: int = get("threads", 0)
        self.drain_timeout_s: float = get("drain_timeout_s", 0.0)
        self.finalize_timeout_s: float = get("finalize_timeout_s", 0.0) or 600.0

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def first_rank(self) -> int:
        """The lowest global rank of this node."""
        return self.node * self.workers_per_node

    @property
    def ranks(self) -> range:
        """The global ranks of this node."""
        return range(self.first_rank, self.first_rank + self.workers_per_node)

    @property
    def needs_preparation(self) -> bool:
        """Whether anything has to be fetched or built before the workers can start."""
        resumes = self.checkpoints is not None and self.fence > 1
        return bool(self.code_artifact or self.code_git or self.requirements or self.inputs or resumes)


def read_plan(folder: str) -> Plan:
    """The plan in a node's folder.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError, KeyError: it is damaged.
    """
    with open(f"{folder}/{PLAN_FILE}", "rb") as file:
        return Plan(json.load(file))
