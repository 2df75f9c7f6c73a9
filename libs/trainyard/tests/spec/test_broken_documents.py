"""Every kind of mistake has its line, its field, what is allowed and, where one is near, what was meant."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from trainyard.spec import Problem, SpecError, load

CREDENTIALS_WORDS = (
    "the URL without user, password and query; give git what it asks for with spec.secrets, for instance as "
    "GIT_CONFIG_VALUE_0"
)
CREDENTIAL_WORDS = (
    "spec.secrets with this name, whose values are never stored; spec.allowPlain: true if it is no secret"
)
NAME_WORDS = "lower-case letters, digits and '-', beginning and ending with a letter or digit, at most 63 characters"
DURATION_WORDS = "a text with units ms, s, m, h, d or w, such as 30s, 1h30m or 7d"
CPU_WORDS = 'cores as a whole number, or a text such as "500m" (thousandths) or "1.5"'
MEMORY_WORDS = 'a text with a unit such as "512Mi", "2Gi" or "2G", or a whole number of bytes'
PATH_WORDS = "a relative path without '..'"
ENV_WORDS = "letters, digits and '_', not beginning with a digit"
ARTIFACT_WORDS = "an artifact: name, name@alias, name@3 or a version's id"
SPEC_KEYS = (
    "queue, priority, runtime, command, code, image, python, nodes, workersPerNode, resources, allowPlain, env, "
    "secrets, inputs, checkpoints, outputs, retries, deadline, hangTimeout, gracePeriod, ttl, kubernetes"
)
VOLUME = "kubernetes: {volumes: [{name: d, mountPath: /data"
VOLUME_SOURCES = "persistentVolumeClaim, configMap, secret, hostPath, emptyDir"
KUBERNETES_KEYS = (
    "nodeSelector, tolerations, volumes, sharedMemory, serviceAccount, pullSecrets, pullPolicy, topology, "
    "priorityClass, runAsUser, runAsGroup, fsGroup"
)


def problems(text: str | bytes) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        load(text, "job.yaml")
    return caught.value.problems


def document(spec: str) -> str:
    """A document that is right but for `spec`, whose first line is line 5."""
    head = "apiVersion: trainyard.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: digits}\nspec:\n"
    return head + "".join(f"  {line}\n" for line in spec.splitlines())


@dataclass(frozen=True)
class Case:
    title: str
    spec: str
    line: int
    field: str
    value: str
    message: str
    allowed: str
    suggestion: str = ""


CASES = [
    # keys
    Case("a misspelled key", "command: [a]\npriorty: 3", 6, "spec.priorty", "3", "unknown key", SPEC_KEYS, "priority"),
    Case(
        "a misspelled key that is required", "comand: [a]", 5, "spec.comand", '["a"]', "unknown key",
         SPEC_KEYS, "command",
    ),
    Case("a key in the style of Python", "command: [a]\nworkers_per_node: 2", 6, "spec.workers_per_node", "2",
         "unknown key", SPEC_KEYS, "workersPerNode"),
    Case("a key that belongs elsewhere", "command: [a]\ncpu: 2", 6, "spec.cpu", "2",
         "unknown key", SPEC_KEYS, "spec.resources.cpu"),
    Case("an unknown key", "command: [a]\nzzz: 2", 6, "spec.zzz", "2", "unknown key", SPEC_KEYS),
    Case("a key given twice", "command: [a]\nnodes: 1\nnodes: 2", 7, "spec.nodes", "1",
         "given twice, first on line 6", "each key once"),
    Case("a key without a value", "command: [a]\nttl:", 6, "spec.ttl", "", "has no value",
         "a value, or no such key"),
    Case("a variable without a value", "command: [a]\nenv: {A: }", 6, "spec.env.A", "", "has no value",
         "a value, or no such key", '""'),
    Case("a misspelled key of Kubernetes", "command: [a]\nkubernetes: {nodeselector: {a: b}}", 6,
         "spec.kubernetes.nodeselector", '{"a": "b"}', "unknown key", KUBERNETES_KEYS, "nodeSelector"),
    # kinds of value
    Case("no command", "nodes: 1", 4, "spec.command", "", "is required", "a list, each item a text"),
    Case("a command in one text", "command: python train.py --name 'a b'", 5, "spec.command",
         "python train.py --name 'a b'", "is a text", "a list, each item a text",
         '["python", "train.py", "--name", "a b"]'),
    Case("a command with a number", "command: [python, train.py, --epochs, 20]", 5, "spec.command[3]", "20",
         "is a number", "a text", '"20"'),
    Case("a number that keeps its spelling", "command:\n  - train\n  - 1e-3", 7, "spec.command[1]", "1e-3",
         "is a number with a fraction", "a text", '"1e-3"'),
    Case("a command with a boolean", "command: [train, --flag, true]", 5, "spec.command[2]", "true",
         "is true or false", "a text", '"true"'),
    Case("a command with a null", "command: [train, ~]", 5, "spec.command[1]", "~", "is empty", "a text", '"~"'),
    Case("a command with a mapping", "command:\n  - train\n  - lr: 1", 7, "spec.command[1]", '{"lr": 1}',
         "is a mapping", "a text"),
    Case("an empty command", "command: []", 5, "spec.command", "[]", "has too few entries", "a list, each item a text"),
    Case("an empty program", 'command: ["", a]', 5, "spec.command[0]", "", "the program is empty",
         "the name or path of a program"),
    Case("a shell line", 'command: ["python train.py --x"]', 5, "spec.command", '["python train.py --x"]',
         "is a whole shell line", "a list, each item one argument; there is no shell", '["python", "train.py", "--x"]'),
    Case("a shell line with a pipe", "command: ['python train.py | tee log']", 5, "spec.command",
         '["python train.py | tee log"]', "is a whole shell line", "a list, each item one argument; there is no shell",
         '["sh", "-c", "python train.py | tee log"]'),
    Case("a text with a pipe", "command: python train.py | tee log", 5, "spec.command", "python train.py | tee log",
         "is a text", "a list, each item a text", '["sh", "-c", "python train.py | tee log"]'),
    Case("a script without code", "command: [python, -u, train.py]", 5, "spec.command[2]", "train.py",
         "'train.py' will not be there: the job has no code and no inputs",
         "a script below code.path, or an absolute path", "code: {path: .}"),
    Case("a text for a number", 'command: [a]\nnodes: "2"', 6, "spec.nodes", "2", "is a text",
         "a whole number from 1 to 1024", "2"),
    Case("a fraction for a whole number", "command: [a]\nnodes: 2.0", 6, "spec.nodes", "2.0",
         "is a number with a fraction", "a whole number from 1 to 1024", "2"),
    Case("a boolean for a number", "command: [a]\nnodes: yes", 6, "spec.nodes", "yes", "is a text",
         "a whole number from 1 to 1024"),
    Case("not a number", "command: [a]\npriority: .nan", 6, "spec.priority", ".nan", "is a number with a fraction",
         "a whole number from 0 to 1000"),
    Case("a list for a mapping", "command: [a]\nresources: [1]", 6, "spec.resources", "[1]", "is a list",
         "a mapping with cpu, memory, gpu"),
    Case("a list of variables", "command: [a]\nenv: [A=b]", 6, "spec.env", '["A=b"]', "is a list",
         "a mapping of texts"),
    Case("a number for a variable", "command: [a]\nenv:\n  N: 010", 7, "spec.env.N", "010", "is a number", "a text",
         '"010"'),
    Case("one exit code for a list", "command: [a]\nretries: {rules: [{exitCodes: 3, action: fail}]}", 6,
         "spec.retries.rules[0].exitCodes", "3", "is a number", "a list, each item a whole number from 1 to 255",
         "[3]"),
    # bounds
    Case("no node", "command: [a]\nnodes: 0", 6, "spec.nodes", "0", "too small", "a whole number from 1 to 1024"),
    Case("too many workers", "command: [a]\nworkersPerNode: 5000", 6, "spec.workersPerNode", "5000", "too large",
         "a whole number from 1 to 128"),
    Case("a number beyond all bounds", f"command: [a]\nnodes: {'9' * 30}", 6, "spec.nodes", "9" * 30, "too large",
         "a whole number from 1 to 1024"),
    Case("a priority below the scale", "command: [a]\npriority: -1", 6, "spec.priority", "-1", "too small",
         "a whole number from 0 to 1000"),
    Case("too many retries", "command: [a]\nretries:\n  limit: 101", 7, "spec.retries.limit", "101", "too large",
         "a whole number from 0 to 100"),
    Case("half a GPU", "command: [a]\nresources: {gpu: 0.5}", 6, "spec.resources.gpu", "0.5",
         "is a number with a fraction", "a whole number from 0 to 64"),
    Case("an exit code that is no failure", "command: [a]\nretries: {rules: [{exitCodes: [0], action: fail}]}", 6,
         "spec.retries.rules[0].exitCodes[0]", "0", "too small", "a whole number from 1 to 255"),
    # names
    Case("a queue in capitals", "command: [a]\nqueue: Team_A", 6, "spec.queue", "Team_A", "not of the right form",
         NAME_WORDS, "team-a"),
    Case("a queue that is too long", f"command: [a]\nqueue: {'q' * 64}", 6, "spec.queue", "q" * 64, "is too long",
         NAME_WORDS),
    Case("a variable with a dash", "command: [a]\nenv: {LOG-LEVEL: x}", 6, "spec.env.LOG-LEVEL", "x",
         "not a name for an environment variable", ENV_WORDS, "LOG_LEVEL"),
    Case("a variable of the yard", "command: [a]\nenv: {TRAINYARD_RANK: x}", 6, "spec.env.TRAINYARD_RANK", "x",
         "variables that begin with TRAINYARD_ are set by the yard", "another name"),
    Case("a variable of torchrun", 'command: [a]\nruntime: torchrun\nenv: {RANK: "0"}', 7, "spec.env.RANK", "0",
         "set for each worker by the runtime torchrun", "another name"),
    Case("a variable that is a credential", "command: [a]\nenv: {API_KEY: hunter2}", 6, "spec.env.API_KEY", "",
         "is named like a credential, which everyone who sees the job could read", CREDENTIAL_WORDS),
    Case("a credential that is a number", "command: [a]\nenv: {WANDB_API_KEY: 1234}", 6, "spec.env.WANDB_API_KEY", "",
         "is a number", "a text"),
    Case("a list of variables", "command: [a]\nenv: [{db_password: hunter2}]", 6, "spec.env",
         '[{"db_password": "..."}]', "is a list", "a mapping of texts"),
    Case("a reference that is a path", "command: [a]\ncode: {artifact: ../x}", 6, "spec.code.artifact", "../x",
         "not of the right form", ARTIFACT_WORDS, "x"),
    Case("a repository that is an option", "command: [a]\ncode: {git: {url: --upload-pack=x, ref: main}}", 6,
         "spec.code.git.url", "--upload-pack=x", "not of the right form",
         "a text without spaces that does not begin with '-'", "upload-pack-x"),
    Case("a repository with a password", "command: [a]\ncode: {git: {url: 'https://u:p@x.org/y.git', ref: main}}", 6,
         "spec.code.git.url", "https://x.org/y.git", "has credentials, which everyone who sees the job could read",
         CREDENTIALS_WORDS),
    # choices
    Case("an unknown runtime", "command: [a]\nruntime: torch-run", 6, "spec.runtime", "torch-run",
         "not one of the values", "torchrun, deepspeed, process", "torchrun"),
    Case("an unknown action", "command: [a]\nretries: {rules: [{exitCodes: [1], action: retry_free}]}", 6,
         "spec.retries.rules[0].action", "retry_free", "not one of the values", "retry, retryFree, fail", "retryFree"),
    Case("a reason that does not exist", "command: [a]\nretries: {rules: [{reasons: [OOM], action: fail}]}", 6,
         "spec.retries.rules[0].reasons[0]", "OOM", "not one of the values",
         "WorkerFailed, OutOfMemory, Hung, AgentLost, AgentSilent, StartFailed, CodeUnavailable, EnvironmentFailed, "
         "InputUnavailable, SecretUnavailable, OutputsNotStored, Stopped, ImageUnavailable, VolumeUnavailable, "
         "Unschedulable, PodsRefused, NotAllowed, Evicted, NodeLost, PodDeleted"),
    # quantities
    Case("CPU with a fraction", "command: [a]\nresources: {cpu: 0.5}", 6, "spec.resources.cpu", "0.5",
         "not an amount of CPU", CPU_WORDS, '"500m"'),
    Case("CPU with a word", "command: [a]\nresources: {cpu: 2 cores}", 6, "spec.resources.cpu", "2 cores",
         "not an amount of CPU", CPU_WORDS, "2"),
    Case("no CPU", "command: [a]\nresources: {cpu: 0}", 6, "spec.resources.cpu", "0", "too little",
         "1m to 4096 cores"),
    Case("memory in another spelling", "command: [a]\nresources: {memory: 2GiB}", 6, "spec.resources.memory", "2GiB",
         "not an amount of memory", MEMORY_WORDS, "2Gi"),
    Case("memory in thousandths of a byte", "command: [a]\nresources: {memory: 512m}", 6, "spec.resources.memory",
         "512m", "not an amount of memory", MEMORY_WORDS, "512Mi"),
    Case("two bytes of memory", "command: [a]\nresources: {memory: 2}", 6, "spec.resources.memory", "2", "too little",
         '"1Mi" to "1Pi"', "2Gi"),
    Case("a duration without a unit", "command: [a]\ndeadline: 90", 6, "spec.deadline", "90",
         "a duration needs a unit", DURATION_WORDS, "90s"),
    Case("a duration in words", "command: [a]\nttl: 2 days", 6, "spec.ttl", "2 days", "not a duration",
         DURATION_WORDS, "2d"),
    Case("a deadline of nothing", "command: [a]\ndeadline: 0s", 6, "spec.deadline", "0s", "too little", "1ms to 365d"),
    Case("a grace without end", "command: [a]\ngracePeriod: 2d", 6, "spec.gracePeriod", "2d", "too much", "1ms to 1d"),
    Case("a backoff beyond its cap", "command: [a]\nretries: {backoff: 1h}", 6, "spec.retries.backoff", "1h",
         "too much", "0s to 5m; waits double from it, up to 5m"),
    # paths
    Case("a path that leaves the folder", "command: [a]\noutputs:\n  - {path: ../exports, artifact: m}", 7,
         "spec.outputs[0].path", "../exports", "has to stay inside the job's folder", PATH_WORDS, "exports"),
    Case("an absolute path", "command: [a]\ninputs:\n  - artifact: data\n    path: /data", 8, "spec.inputs[0].path",
         "/data", "has to stay inside the job's folder", PATH_WORDS, "data"),
    Case("a path of another system", r"command: [a]" "\n" r"python: {requirements: a\b.txt}", 6,
         "spec.python.requirements", r"a\b.txt", "not a path", PATH_WORDS, "a/b.txt"),
    # several fields at once
    Case("two sources of code", "command: [a]\ncode: {path: ., artifact: x}", 6, "spec.code",
         '{"path": ".", "artifact": "x"}', "has path and artifact", "exactly one of path, artifact, git"),
    Case("no source of code", "command: [a]\ncode: {}", 6, "spec.code", "{}", "has none of path, artifact, git",
         "exactly one of path, artifact, git"),
    Case("exclude without a path", "command: [a]\ncode:\n  artifact: x\n  exclude: [data/]", 8, "spec.code.exclude",
         '["data/"]', "only a packed path can leave something out", "exclude with path"),
    Case("a secret from nowhere", "command: [a]\nsecrets: [{name: A, from: {}}]", 6, "spec.secrets[0].from", "{}",
         "has none of env, file, secret", "exactly one of env, file, secret"),
    Case("a secret that is a variable too",
         "command: [a]\nenv: {A: x}\nsecrets:\n  - name: A\n    from: {env: B}", 8, "spec.secrets[0].name", "A",
         "set in spec.env as well", "each variable once"),
    Case("two secrets of one name",
         "command: [a]\nsecrets:\n  - {name: A, from: {env: B}}\n  - {name: A, from: {env: C}}", 8,
         "spec.secrets[1].name", "A", "the same as in item 0", "each only once"),
    Case("two outputs of one artifact",
         "command: [a]\noutputs:\n  - {path: a, artifact: m}\n  - {path: b, artifact: m}", 8,
         "spec.outputs[1].artifact", "m", "the same as in item 0", "each only once"),
    Case("two inputs in one place",
         "command: [a]\ninputs:\n  - {path: a, artifact: m}\n  - {path: ./a/, artifact: n}", 8,
         "spec.inputs[1].path", "./a/", "the same as in item 0", "each only once"),
    Case("a rule that matches nothing", "command: [a]\nretries:\n  rules:\n    - action: retry", 8,
         "spec.retries.rules[0]", '{"action": "retry"}', "matches nothing",
         "at least one of exitCodes, signals, logPattern, reasons"),
    # a cluster
    Case("an image with a space", "command: [a]\nimage: my image", 6, "spec.image", "my image", "not of the right form",
         "an image: name, name:tag, registry.example.com/team/name:tag or name@sha256:...", "my-image"),
    Case("a secret without its key", "command: [a]\nsecrets: [{name: A, from: {secret: {name: wandb}}}]", 6,
         "spec.secrets[0].from.secret.key", "", "is required", "letters, digits, '.', '_' and '-'"),
    Case("a volume of nothing", f"command: [a]\n{VOLUME}}}]}}", 6, "spec.kubernetes.volumes[0]",
         '{"name": "d", "mountPath": "/data"}', f"has none of {VOLUME_SOURCES}", f"exactly one of {VOLUME_SOURCES}"),
    Case("a volume of two things", f"command: [a]\n{VOLUME}, secret: a, configMap: b}}]}}", 6,
         "spec.kubernetes.volumes[0]", '{"name": "d", "mountPath": "/data", "secret": "a", "configMap": "b"}',
         "has configMap and secret", f"exactly one of {VOLUME_SOURCES}"),
    Case("a volume at a relative path", "command: [a]\nkubernetes: {volumes: [{name: d, mountPath: data, secret: s}]}",
         6, "spec.kubernetes.volumes[0].mountPath", "data", "not a path for a volume",
         "an absolute path without '..' and ':'"),
    Case("a volume over the yard's own", "command: [a]\nkubernetes:\n  volumes:\n    - name: d\n"
         "      mountPath: /opt/trainyard/bin\n      secret: s", 9, "spec.kubernetes.volumes[0].mountPath",
         "/opt/trainyard/bin", "the yard mounts this itself", "another path"),
    Case("shared memory as a volume", "command: [a]\nkubernetes:\n  volumes:\n    - name: d\n"
         "      mountPath: /dev/shm\n      emptyDir: {}", 9, "spec.kubernetes.volumes[0].mountPath",
         "/dev/shm", "the yard mounts this itself", "spec.kubernetes.sharedMemory for its size"),
    Case("a volume over everything", "command: [a]\nkubernetes: {volumes: [{name: d, mountPath: //, secret: s}]}", 6,
         "spec.kubernetes.volumes[0].mountPath", "//", "hides the whole image", "a folder below /"),
    Case("two volumes in one place",
         f"command: [a]\n{VOLUME}, secret: a}}, {{name: e, mountPath: /data/, secret: b}}]}}", 6,
         "spec.kubernetes.volumes[1].mountPath", "/data/", "the same as in item 0", "each only once"),
    Case("a toleration of nothing", "command: [a]\nkubernetes: {tolerations: [{effect: NoSchedule}]}", 6,
         "spec.kubernetes.tolerations[0]", '{"effect": "NoSchedule"}', "has no key",
         "a key, or operator: Exists for every taint"),
    Case("a toleration of any value with a value",
         "command: [a]\nkubernetes: {tolerations: [{key: a, operator: Exists, value: b}]}", 6,
         "spec.kubernetes.tolerations[0].value", "b", "a taint that only has to exist has no value here",
         "operator: Equal with it"),
    Case("a toleration that waits without an eviction",
         "command: [a]\nkubernetes: {tolerations: [{key: a, tolerationSeconds: 3}]}", 6,
         "spec.kubernetes.tolerations[0].tolerationSeconds", "3", "only evictions wait", "with effect: NoExecute"),
    Case("a text for a boolean", f"command: [a]\n{VOLUME}, secret: a, readOnly: \"yes\"}}]}}", 6,
         "spec.kubernetes.volumes[0].readOnly", "yes", "is a text", "true or false"),
    Case("root as the user", "command: [a]\nkubernetes: {runAsUser: 0}", 6, "spec.kubernetes.runAsUser", "0",
         "too small", "a whole number from 1 to 2147483647"),
    # expressions
    Case("a checkpoint without a step", "command: [a]\ncheckpoints: {path: c, pattern: last.pt}", 6,
         "spec.checkpoints.pattern", "last.pt", "has to contain {step} exactly once",
         "a file name such as step-{step}.pt", "last-{step}.pt"),
    Case("a checkpoint that is a path", 'command: [a]\ncheckpoints: {path: c, pattern: "a/{step}.pt"}', 6,
         "spec.checkpoints.pattern", "a/{step}.pt", "names an entry of checkpoints.path, not a path",
         "a file name such as step-{step}.pt"),
    Case("a log pattern with look-ahead", 'command: [a]\nretries: {rules: [{logPattern: "(?=x)", action: fail}]}', 6,
         "spec.retries.rules[0].logPattern", "(?=x)", "not a regular expression of RE2: invalid perl operator: (?=",
         "RE2 syntax: no look-around, no back references"),
    Case("a signal without its prefix", "command: [a]\nretries: {rules: [{signals: [KILL], action: retry}]}", 6,
         "spec.retries.rules[0].signals[0]", "KILL", "not one of the values",
         "SIGABRT, SIGALRM, SIGBUS, SIGFPE, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGPIPE, SIGQUIT, SIGSEGV, SIGSYS, "
         "SIGTERM, SIGTRAP, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ", "SIGKILL"),
    Case("a text no process can get", r'command: [a, "x\0y"]', 5, "spec.command[1]", "x\0y",
         "has a character that no text can hold", "text without \\0 and lone surrogates"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_mistake_is_explained_where_it_is(case: Case) -> None:
    expected = Problem("job.yaml", case.line, case.field, case.value, case.message, case.allowed, case.suggestion)
    assert problems(document(case.spec)) == [expected]


def test_a_mistake_in_a_list_is_found_beside_others() -> None:
    found = problems(document("command: [a]\nretries: {rules: [{reasons: [OOM, hung], action: fail}]}"))
    assert [(problem.field, problem.suggestion) for problem in found] == [
        ("spec.retries.rules[0].reasons[0]", ""),
        ("spec.retries.rules[0].reasons[1]", "Hung"),
    ]


def test_all_mistakes_are_reported_at_once_in_the_order_of_their_lines() -> None:
    text = document("nodes: 0\nqueue: A\nruntime: x\nenv: {A-B: 1, RANK: x}\ndeadline: 5\nzzz: 1\nttl:")
    assert [(problem.line, problem.field) for problem in problems(text)] == [
        (4, "spec.command"),
        (5, "spec.nodes"),
        (6, "spec.queue"),
        (7, "spec.runtime"),
        (8, "spec.env.A-B"),
        (8, "spec.env.A-B"),
        (9, "spec.deadline"),
        (10, "spec.zzz"),
        (11, "spec.ttl"),
    ]


@dataclass(frozen=True)
class Unreadable:
    title: str
    text: str | bytes
    line: int
    message: str
    field: str = ""
    allowed: str = ""


HEAD = "apiVersion: trainyard.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: a}\n"
GOOD = HEAD + "spec: {command: [a]}\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
TOP = "a mapping with apiVersion, kind, metadata, spec"

UNREADABLE = [
    Unreadable("an empty file", "", 0, "the document is empty", allowed=TOP),
    Unreadable("comments alone", "# nothing\n", 0, "the document is empty", allowed=TOP),
    Unreadable("a list at the top", "- a\n- b\n", 1, "the document is a list", allowed=TOP),
    Unreadable("a text at the top", "\nhello\n", 2, "the document is a text", allowed=TOP),
    Unreadable("two documents", GOOD + "---\n" + GOOD, 5, "a second document begins here", allowed="one job per file"),
    Unreadable("an open bracket", GOOD + "x: [a, b\n", 6,
               "not YAML: expected ',' or ']', but got '<stream end>' (column 1)",
               allowed="YAML or JSON"),
    Unreadable("a colon too many", HEAD + "spec: a: b\n", 4, "not YAML: mapping values are not allowed here (column 8)",
               allowed="YAML or JSON"),
    Unreadable("a tab", HEAD + "spec:\n\tcommand: [a]\n", 5, "a tab at column 1",
               allowed="spaces: YAML is not indented with tabs"),
    Unreadable("a control character", GOOD + "# \x01\n", 5, "not a text file: it has the character '\\x01'",
               allowed="YAML or JSON in UTF-8"),
    Unreadable("bytes that are no text", GOOD.encode() + b"\xff\xfe\x00", 5, "not a text file in UTF-8",
               allowed="YAML or JSON in UTF-8"),
    Unreadable("a file that is too large", "#" * (1 << 20) + "\n", 0, "larger than 1 MiB",
               allowed="a document of at most 1 MiB"),
    Unreadable("brackets without end", HEAD + "spec: " + "[" * 100_000, 4, "nested more than 32 deep", "spec[0]",
               "a flatter document"),
    Unreadable("an alias that explodes", BOMB, 5, "has more than 10000 values", "e[0]", "a smaller document"),
    Unreadable("an alias of nothing", HEAD + "spec: *x\n", 4, "*x stands for nothing", "spec", "an &x before it"),
    Unreadable("an alias of itself", HEAD + "spec: &x {command: *x}\n", 4, "*x contains itself", "spec.command",
               "an alias of something complete"),
    Unreadable("a tag that makes objects", HEAD + "spec: !!python/object:os.system {command: [a]}\n", 4,
               "the tag !!python/object:os.system is not supported", "spec", "plain values"),
    Unreadable("a key that is a list", HEAD + "spec: {[a]: b}\n", 4, "a key has to be a text", "spec", "key: value"),
]  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE, ids=lambda case: case.title)
def test_a_text_that_is_no_document_has_one_problem(case: Unreadable) -> None:
    (found,) = problems(case.text)
    assert (found.line, found.field, found.message, found.allowed) == (
        case.line,
        case.field,
        case.message,
        case.allowed,
    )


def test_another_version_is_named_with_the_one_that_is_known() -> None:
    (found,) = problems(GOOD.replace("v1alpha1", "v1"))
    assert (found.line, found.field, found.value) == (1, "apiVersion", "trainyard.dev/v1")
    assert found.suggestion == "trainyard.dev/v1alpha1"


def test_another_kind_of_document_has_one_problem_not_one_for_each_field() -> None:
    (found,) = problems("apiVersion: trainyard.dev/v1alpha1\nkind: Deployment\nmetadata: {}\nspec: {replicas: 3}\n")
    assert (found.line, found.field, found.allowed) == (2, "kind", "TrainingJob")


def test_a_document_without_its_head_is_told_what_to_write() -> None:
    found = problems("metadata: {name: a}\nspec: {command: [a]}\n")
    assert [(problem.field, problem.suggestion) for problem in found] == [
        ("apiVersion", "apiVersion: trainyard.dev/v1alpha1"),
        ("kind", "kind: TrainingJob"),
    ]


def test_labels_follow_the_rules_of_kubernetes() -> None:
    found = problems(GOOD.replace("{name: a}", "{name: a, labels: {team: 5, -x: y, ok: a b}}"))
    assert [problem.field for problem in found] == [
        "metadata.labels.team",
        "metadata.labels['-x']",
        "metadata.labels.ok",
    ]


def test_annotations_of_kubernetes_and_the_yard_are_refused_with_what_to_do() -> None:
    own = "kubectl.kubernetes.io/last-applied-configuration: x, app.k8s.io/a: x, trainyard.dev/facts: x"
    found = problems(
        GOOD.replace("{name: a}", f"{{name: a, annotations: {{{own}, example.com/kubernetes.io: any, -x: y}}}}")
    )
    assert [problem.field for problem in found] == [
        "metadata.annotations['kubectl.kubernetes.io/last-applied-configuration']",
        "metadata.annotations['app.k8s.io/a']",
        "metadata.annotations['trainyard.dev/facts']",
        "metadata.annotations['-x']",
    ]
    assert "pod template" in found[0].message
    assert "example.com/team" in found[0].allowed


def test_annotations_have_a_bound_together() -> None:
    texts = ", ".join(f"a{number}: {'x' * 20_000}" for number in range(4))
    (found,) = problems(GOOD.replace("{name: a}", f"{{name: a, annotations: {{{texts}}}}}"))
    assert (found.field, found.allowed) == ("metadata.annotations", "at most 65,536")


def test_mistakes_in_json_have_their_lines_too() -> None:
    text = '{\n  "apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob",\n  "metadata": {"name": "a"},\n'
    (found,) = problems(text + '  "spec": {"command": ["a"],\n    "nodes": "2"}\n}')
    assert (found.line, found.field, found.suggestion) == (5, "spec.nodes", "2")


def test_json_with_a_key_twice_or_with_null_is_refused() -> None:
    text = '{"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": %s}'
    (twice,) = problems(text % '{"command": ["a"], "nodes": 1, "nodes": 2}')
    assert (twice.field, twice.message) == ("spec.nodes", "given twice, first on line 1")
    (null,) = problems(text % '{"command": ["a"], "ttl": null}')
    assert (null.field, null.message) == ("spec.ttl", "has no value")


def test_half_a_surrogate_pair_in_json_is_refused() -> None:
    text = '{"apiVersion": "trainyard.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": %s}'
    (found,) = problems(text % r'{"command": ["\ud800"]}')
    assert (found.field, found.message) == ("spec.command[0]", "has a character that no text can hold")


def test_mistakes_inside_an_anchor_are_shown_where_it_is_used() -> None:
    found = problems(document("command: [a]\nretries: &r\n  limit: -1\nresources: *r"))
    assert [(problem.line, problem.field) for problem in found] == [
        (7, "spec.retries.limit"),
        (8, "spec.resources.limit"),
    ]


def test_an_error_reads_as_a_list_of_problems() -> None:
    with pytest.raises(SpecError) as caught:
        load(document("command: [a]\nnodes: 0\nruntime: torchrum"), "job.yaml")
    assert str(caught.value) == (
        "the document has 2 problems:\n"
        "  job.yaml:6: spec.nodes: too small; allowed: a whole number from 1 to 1024\n"
        "  job.yaml:7: spec.runtime: not one of the values; allowed: torchrun, deepspeed, process; "
        "did you mean torchrun?"
    )


@pytest.mark.parametrize(
    "url",
    [
        "https://token@example.org/x.git",
        "HTTPS://me:s3cret@example.org/x.git",
        "https://example.org/x.git?private_token=s3cret",
        "ssh://git:s3cret@example.org/x.git",
        "https://me:wrong/s3cret@example.org/x.git",
        "https://me:w@s3cret@example.org/x.git",
        "me:s3cret@example.org/x.git",
        "ftp://s3cret@example.org/x.git",
        "ftps://example.org/x.git?token=s3cret",
        "git://s3cret@example.org/x.git",
        "//me:s3cret@example.org/x.git",
        "//me:wrong/s3cret@example.org/x.git",
        "//s3cret@example.org/x.git",
        "https:/me:s3cret@example.org/x.git",
        "https:///me:s3cret@example.org/x.git",
        "https:me:s3cret@example.org/x.git",
        "https:s3cret@example.org/x.git",
        "http::https://s3cret@example.org/x.git",
        "ssh://git%3As3cret@example.org/x.git",
    ],
)
def test_a_repository_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    (problem,) = problems(document(f"command: [a]\ncode: {{git: {{url: '{url}', ref: main}}}}"))
    assert problem.field == "spec.code.git.url"
    assert "s3cret" not in str(problem) + problem.value
    assert "token@" not in problem.value
    both = problems(document(f"command: [a]\ncode: {{path: x, git: {{url: '{url}', ref: main}}, what: 1}}"))
    assert not any("s3cret" in str(problem) + problem.value for problem in both)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org:8443/x@y.git",
        "ssh://git@example.org:22/x.git",
        "git@example.org:x.git",
        "file:///x/y@z:1@2",
        "ssh://git@[2001:db8::1]:22/x@y.git",
        "example.org:x/y@z.git",
        "git@example.org:x@y.git",
        "git+ssh://git@example.org/x.git",
        "/x@y/z.git",
    ],
)
def test_a_repository_without_credentials_is_taken(url: str) -> None:
    git = load(document(f"command: [a]\ncode: {{git: {{url: '{url}', ref: main}}}}")).spec.code.git  # type: ignore[union-attr]
    assert git is not None
    assert git.url == url
