"""The models behind a `TrainingJob` document, `trainyard.dev/v1alpha1`.

They are the only source: the JSON Schema for editors, the schema of the custom resource, the reference page and the
validation all come from them. The shape rules of a structural schema hold throughout: no field that is either a number
or an object, no union with null (an absent field is absent), quantities int-or-string, durations strings. A field
enters when it works.
"""

from __future__ import annotations

from posixpath import normpath
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from trainyard.credentials import named_like_a_credential
from trainyard.spec import quantities
from trainyard.spec.amounts import Backoff, Cpu, Duration, Grace, Memory
from trainyard.spec.checks import exactly_one, one_required, refuse, refuse_all, unique
from trainyard.spec.cluster import Kubernetes
from trainyard.spec.commands import as_list
from trainyard.spec.fields import (
    CREDENTIAL_REMEDY,
    Annotations,
    ArtifactName,
    ArtifactReference,
    Env,
    EnvName,
    Image,
    Labels,
    LogPattern,
    MetricName,
    Name,
    ObjectName,
    RelativePath,
    RepositoryUrl,
    SecretKey,
    StepPattern,
    Undashed,
    Variable,
    is_stored,
)
from trainyard.spec.part import Part

API_VERSION: Final = "trainyard.dev/v1alpha1"
KIND: Final = "TrainingJob"

Runtime = Literal["torchrun", "deepspeed", "process"]
Action = Literal["retry", "retryFree", "fail"]
Reason = Literal[
    "WorkerFailed",
    "OutOfMemory",
    "Hung",
    "AgentLost",
    "AgentSilent",
    "StartFailed",
    "CodeUnavailable",
    "EnvironmentFailed",
    "InputUnavailable",
    "SecretUnavailable",
    "OutputsNotStored",
    "Stopped",
    "ImageUnavailable",
    "VolumeUnavailable",
    "Unschedulable",
    "PodsRefused",
    "NotAllowed",
    "Evicted",
    "NodeLost",
    "PodDeleted",
]
SignalName = Literal[
    "SIGABRT", "SIGALRM", "SIGBUS", "SIGFPE", "SIGHUP", "SIGILL", "SIGINT", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSEGV",
    "SIGSYS", "SIGTERM", "SIGTRAP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGXFSZ",
]  # fmt: skip

TORCHRUN_VARIABLES = frozenset(
    [
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    ]
)
"""What the runtimes torchrun and deepspeed set for every worker."""


class Metadata(Part):
    name: Name = Field(
        description="Name of the job. Several jobs may share one; each has an id of its own.", examples=["digits"]
    )
    labels: Labels = Field(
        default_factory=dict,
        description="Free labels, to find jobs by. On a cluster pods carry them as well, except those of Kubernetes "
        "(`kubernetes.io/`, `k8s.io/`) and the yard (`trainyard.dev/`).",
        examples=[{"team": "vision"}],
    )
    annotations: Annotations = Field(
        default_factory=dict,
        exclude_if=lambda given: not given,  # so that versions that do not know them read documents without them
        description="Annotations of the job's pods, for what runs on the cluster beside the yard: a service mesh, a "
        "cost report. Those of Kubernetes (`kubernetes.io/`, `k8s.io/`) and the yard (`trainyard.dev/`) are refused. "
        "Of a resource, those are not passed on, because Kubernetes itself writes some of them.",
        examples=[{"sidecar.istio.io/inject": "false"}],
    )


class GitSource(Part):
    url: RepositoryUrl = Field(
        description="Repository to clone, on the machine where the workers run. It must hold no credentials: variables "
        "of `env` and `secrets` that begin with `GIT_` are given to git.",
        examples=["https://example.com/team/train.git"],
    )
    ref: Undashed = Field(description="Commit, tag or branch. A commit makes the job repeatable.", examples=["v1.4.0"])
    path: RelativePath = Field(default=".", description="Folder of the repository in which the workers run.")


class Code(Part):
    model_config = ConfigDict(json_schema_extra=one_required("path", "artifact", "git"))

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None,
        description="Folder on the submitting machine, relative to the document. It is packed (without what "
        "`.gitignore` and `.yardignore` name, what looks like credentials, and what lies where the job writes outputs "
        "and checkpoints), stored, and unpacked where the workers run.",
        examples=["."],
    )
    exclude: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=256)] = Field(
        default=(),
        description="With `path`: patterns, as in `.gitignore`, of what is not packed.",
        examples=[["data/"]],
    )
    artifact: ArtifactReference | None = Field(
        default=None, description="Code that is already stored.", examples=["digits-code@3"]
    )
    git: GitSource | None = Field(default=None, description="Code in a git repository.")

    _one_source = model_validator(mode="after")(exactly_one("path", "artifact", "git"))

    @model_validator(mode="after")
    def _excludes_from_a_path(self) -> Code:
        if self.exclude and self.path is None:
            refuse("only a packed path can leave something out", allowed="exclude with path", at=("exclude",))
        return self


class Python(Part):
    requirements: RelativePath = Field(
        description="A requirements file inside the code. Its environment is built once per content and kept.",
        examples=["requirements.txt"],
    )


class Resources(Part):
    cpu: Cpu = Field(default=1, description='Cores: `2`, `"500m"`, `"1.5"`.', examples=[2])
    memory: Memory = Field(default="1Gi", description='Memory: `"512Mi"`, `"2Gi"`, `"2G"`, or bytes.', examples=["2Gi"])
    gpu: Annotated[int, Field(ge=0, le=64)] = Field(default=0, description="Whole GPUs, for this worker alone.")


class SecretKeyReference(Part):
    name: ObjectName = Field(description="Name of the Secret, in the namespace of the jobs.", examples=["wandb"])
    key: SecretKey = Field(description="Its key that holds the value.", examples=["api-key"])


class SecretSource(Part):
    model_config = ConfigDict(json_schema_extra=one_required("env", "file", "secret"))

    env: EnvName | None = Field(
        default=None, description="A variable of the launcher's environment.", examples=["WANDB_API_KEY"]
    )
    file: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="A file on the launcher's machine; its content without the last line end."
    )
    secret: SecretKeyReference | None = Field(
        default=None,
        description="A Secret of the cluster; only where jobs run on one.",
        examples=[{"name": "wandb", "key": "api-key"}],
    )

    _one_source = model_validator(mode="after")(exactly_one("env", "file", "secret"))


class Secret(Part):
    name: Variable = Field(description="Variable that holds the value for the workers.", examples=["WANDB_API_KEY"])
    from_: SecretSource = Field(
        alias="from", description="Where the launcher finds the value.", examples=[{"env": "WANDB_API_KEY"}]
    )


class Input(Part):
    artifact: ArtifactReference = Field(description="What to fetch.", examples=["digits-data@latest"])
    path: RelativePath = Field(description="Where it is unpacked, in the workers' folder.", examples=["data"])


class Output(Part):
    path: RelativePath = Field(description="File or folder to store, in the workers' folder.", examples=["exports"])
    artifact: ArtifactName = Field(description="Artifact of which it becomes a new version.", examples=["digits-model"])


class Best(Part):
    metric: MetricName = Field(description="Tracked metric that compares checkpoints.", examples=["val/accuracy"])
    mode: Literal["max", "min"] = Field(description="Whether more or less of it is better.", examples=["max"])


class Keep(Part):
    last: Annotated[int, Field(ge=1, le=10000)] = Field(default=3, description="How many of the newest are kept.")
    best: Best | None = Field(default=None, description="The best one is kept as well.")


class Checkpoints(Part):
    path: RelativePath = Field(description="Folder in which the script writes checkpoints.", examples=["checkpoints"])
    pattern: StepPattern = Field(
        description="Name of one checkpoint (a file or a folder); `{step}` stands for its step.",
        examples=["step-{step}.pt"],
    )
    keep: Keep = Field(default=Keep(), description="What is kept in the artifact store; the rest is removed.")


class RetryRule(Part):
    exit_codes: (
        Annotated[tuple[Annotated[int, Field(ge=1, le=255)], ...], Field(min_length=1, max_length=255)] | None
    ) = Field(default=None, description="Exit code of the first failing worker.", examples=[[143]])
    signals: Annotated[tuple[SignalName, ...], Field(min_length=1, max_length=32)] | None = Field(
        default=None, description="Signal that ended the first failing worker.", examples=[["SIGKILL"]]
    )
    log_pattern: LogPattern | None = Field(
        default=None,
        description="Expression in RE2's syntax, searched in every line of output.",
        examples=["CUDA out of memory"],
    )
    reasons: Annotated[tuple[Reason, ...], Field(min_length=1, max_length=32)] | None = Field(
        default=None, description="Why the attempt ended.", examples=[["Hung", "AgentLost"]]
    )
    action: Action = Field(
        description="`retry` spends the budget, `retryFree` does not (at most 10 times), `fail` ends the job.",
        examples=["retryFree"],
    )

    @model_validator(mode="after")
    def _has_a_matcher(self) -> RetryRule:
        if all(matcher is None for matcher in (self.exit_codes, self.signals, self.log_pattern, self.reasons)):
            refuse("matches nothing", allowed="at least one of exitCodes, signals, logPattern, reasons")
        return self


class Retries(Part):
    limit: Annotated[int, Field(ge=0, le=100)] = Field(
        default=0, description="How many failures are tried again.", examples=[3]
    )
    backoff: Backoff = Field(default="5s", description="Wait before the first retry; it doubles with each, up to 5m.")
    rules: Annotated[tuple[RetryRule, ...], Field(max_length=32)] = Field(
        default=(),
        description="The first rule that matches a failure decides; without one it spends the budget. A rule matches "
        "when each of its matchers does.",
        examples=[
            [{"exitCodes": [143], "action": "retryFree"}, {"logPattern": "CUDA out of memory", "action": "fail"}]
        ],
    )


class Spec(Part):
    queue: Name = Field(default="default", description="Queue in which the job waits.")
    priority: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=50, description="Higher starts first; equal ones by age."
    )
    runtime: Runtime = Field(
        default="process",
        description="How workers are started: `torchrun` and `deepspeed` give them torchrun's environment, `process` "
        "runs the plain command.",
        examples=["torchrun"],
    )
    command: Annotated[tuple[str, ...], Field(min_length=1, max_length=1000)] = Field(
        description="Program and arguments of every worker, without a shell. Quote numbers.",
        examples=[["python", "train.py", "--epochs", "20"]],
    )
    code: Code | None = Field(
        default=None, description="What the workers run, one of `path`, `artifact`, `git`. Absent: only the command."
    )
    image: Image | None = Field(
        default=None,
        description="Container image of the workers, on a cluster. Absent: the one the launcher was set up with. On "
        "one machine it is not used.",
        examples=["trainyard/worker:latest"],
    )
    python: Python | None = Field(
        default=None, description="Python environment of the workers. Absent: the launcher's own."
    )
    nodes: Annotated[int, Field(ge=1, le=1024)] = Field(default=1, description="Nodes; several may share one machine.")
    workers_per_node: Annotated[int, Field(ge=1, le=128)] = Field(
        default=1, description="Worker processes on each node.", examples=[2]
    )
    resources: Resources = Field(default=Resources(), description="What each worker needs.")
    allow_plain: bool = Field(
        default=False,
        description="Takes variables in `env` whose names end in `_TOKEN`, `_KEY` or `_SECRET` or contain `PASSWORD`: "
        "everyone who sees the job can read them.",
    )
    env: Env = Field(
        default_factory=dict,
        description="Environment variables. Quote numbers. Credentials belong into `secrets`.",
        examples=[{"OMP_NUM_THREADS": "1"}],
    )
    secrets: Annotated[tuple[Secret, ...], Field(max_length=64), unique(lambda secret: secret.name, "name")] = Field(
        default=(),
        description="Environment variables whose values stay on the launcher's machine and are never stored.",
    )
    inputs: Annotated[tuple[Input, ...], Field(max_length=64), unique(lambda entry: normpath(entry.path), "path")] = (
        Field(default=(), description="Artifacts that are there when the workers start.")
    )
    checkpoints: Checkpoints | None = Field(
        default=None, description="Stored while the job runs; a new attempt starts from the newest verified one."
    )
    outputs: Annotated[tuple[Output, ...], Field(max_length=64), unique(lambda entry: entry.artifact, "artifact")] = (
        Field(default=(), description="What is stored when the workers end.")
    )
    retries: Retries = Field(default=Retries(), description="What happens after a failure.")
    deadline: Duration | None = Field(
        default=None,
        description="Time the job may take from its first start, all attempts together. Absent: no limit.",
        examples=["2h"],
    )
    hang_timeout: Duration | None = Field(
        default=None,
        description="Time without progress after which the job counts as hung: stacks are kept, the attempt fails "
        "with the reason `Hung`. Absent: not watched.",
        examples=["10m"],
    )
    grace_period: Grace = Field(default="30s", description="Time from SIGTERM to SIGKILL when the job is stopped.")
    ttl: Duration | None = Field(
        default=None, description="Time after its end when the job is forgotten. Absent: kept.", examples=["7d"]
    )
    kubernetes: Kubernetes | None = Field(
        default=None, description="What only Kubernetes has. On one machine it is not used."
    )

    # A check of two fields is a validator of the later one, so that it runs however wrong the others are.

    @field_validator("command")
    @classmethod
    def _names_a_program(cls, command: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not command[0].strip():
            refuse("the program is empty", allowed="the name or path of a program", at=(0,))
        if len(command) == 1 and len(command[0].split()) > 1 and not is_stored(info):
            allowed = "a list, each item one argument; there is no shell"
            refuse("is a whole shell line", allowed=allowed, suggestion=as_list(command[0]))
        return command

    @field_validator("env")
    @classmethod
    def _leaves_torchrun_its_variables(cls, env: Env, info: ValidationInfo) -> Env:
        runtime = info.data.get("runtime")
        if runtime in ("torchrun", "deepspeed"):
            message = f"set for each worker by the runtime {runtime}"
            refuse_all([((name,), message, "another name", "") for name in env if name in TORCHRUN_VARIABLES])
        return env

    @field_validator("env")
    @classmethod
    def _holds_no_credentials(cls, env: Env, info: ValidationInfo) -> Env:
        if not info.data.get("allow_plain", True) and not is_stored(info):
            message = "is named like a credential, which everyone who sees the job could read"
            refuse_all([((name,), message, CREDENTIAL_REMEDY, "") for name in env if named_like_a_credential(name)])
        return env

    @field_validator("secrets")
    @classmethod
    def _differ_from_env(cls, secrets: tuple[Secret, ...], info: ValidationInfo) -> tuple[Secret, ...]:
        env = info.data.get("env", ())
        doubled = [index for index, secret in enumerate(secrets) if secret.name in env]
        refuse_all([((index, "name"), "set in spec.env as well", "each variable once", "") for index in doubled])
        return secrets


class TrainingJob(Part):
    """A job as one document describes it, with every default filled in. Immutable.

    Make one with `trainyard.spec.load`, or in Python: `TrainingJob(metadata=Metadata(name=...), spec=Spec(...))`.
    """

    api_version: Literal["trainyard.dev/v1alpha1"] = Field(default=API_VERSION, description="Version of this format.")
    kind: Literal["TrainingJob"] = Field(default=KIND, description="Kind of document.")
    metadata: Metadata = Field(description="What the job is called.", examples=[{"name": "digits"}])
    spec: Spec = Field(description="What to run.")

    @classmethod
    def from_json(cls, text: str | bytes, *, stored: bool = False) -> TrainingJob:
        """Reads what `to_json` wrote. For text of a user, `load` explains what is wrong.

        Args:
            stored: the document was accepted before, maybe by an earlier version: what is only refused since then is
                taken.

        Raises:
            pydantic.ValidationError: the text is no valid document.
        """
        return cls.model_validate_json(text, by_alias=True, by_name=False, context={"stored": stored})

    def to_json(self) -> str:
        """The resolved document as JSON, every default in."""
        return self.model_dump_json(by_alias=True, exclude_none=True)

    def to_yaml(self) -> str:
        """The resolved document as YAML, every default in; `load` reads it back to an equal job."""
        from trainyard.spec.emit import to_yaml

        return to_yaml(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    def per_worker(self) -> tuple[float, int, int]:
        """What one worker needs: cores, bytes of memory, GPUs."""
        needs = self.spec.resources
        return quantities.cpu_cores(needs.cpu), quantities.memory_bytes(needs.memory), needs.gpu

    def with_packed_code(self, reference: str) -> TrainingJob:
        """This job with `code.path` replaced by the artifact its folder was packed into.

        Raises:
            pydantic.ValidationError: `reference` is no artifact reference.
        """
        spec = self.spec.model_copy(update={"code": Code(artifact=reference)})
        return self.model_copy(update={"spec": spec})
