from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError
from trainyard.spec import Code, Metadata, Problem, Spec, SpecError, TrainingJob, load
from trainyard.spec.problems import field_path

from scripts.testbed.patience import PATIENCE_S

SMALLEST = "apiVersion: trainyard.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: a}\nspec: {command: [a]}\n"

FULL = """\
# yaml-language-server: $schema=trainingjob.schema.json
apiVersion: trainyard.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits, labels: {team: vision, example.com/stage: dev}}
spec:
  queue: default
  priority: 50
  runtime: torchrun
  command: [python, train.py, --epochs, "20"]
  code: {path: ., exclude: [data/]}
  python: {requirements: requirements.txt}
  nodes: 2
  workersPerNode: 2
  resources: {cpu: 500m, memory: 2Gi, gpu: 1}
  env: {OMP_NUM_THREADS: "1"}
  secrets: [{name: TOKEN, from: {env: MY_TOKEN}}]
  inputs: [{artifact: digits-data@latest, path: data}]
  checkpoints:
    path: checkpoints
    pattern: "step-{step}.pt"
    keep: {last: 3, best: {metric: val/accuracy, mode: max}}
  outputs: [{path: exports, artifact: digits-model}]
  retries:
    limit: 3
    backoff: 5s
    rules: [{exitCodes: [143], action: retryFree}, {logPattern: "CUDA out of memory", action: fail}]
  deadline: 2h
  hangTimeout: 10m
  gracePeriod: 30s
  ttl: 7d
  image: registry.example.com:5000/team/train:v1
  kubernetes:
    nodeSelector: {example.com/gpu: a100}
    tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}]
    volumes:
      - {name: data, mountPath: /data, readOnly: true, persistentVolumeClaim: datasets}
      - {name: scratch, mountPath: /scratch, emptyDir: {sizeLimit: 10Gi}}
    sharedMemory: 1Gi
    serviceAccount: trainer
    pullSecrets: [registry]
    pullPolicy: IfNotPresent
    topology: spread
    runAsUser: 1000
"""


def test_the_smallest_document_gets_every_default() -> None:
    job = load(SMALLEST)
    assert job == TrainingJob(metadata=Metadata(name="a"), spec=Spec(command=("a",)))
    assert (job.spec.queue, job.spec.priority, job.spec.runtime) == ("default", 50, "process")
    assert (job.spec.nodes, job.spec.workers_per_node, job.per_worker()) == (1, 1, (1.0, 2**30, 0))
    assert (job.spec.retries.limit, job.spec.retries.backoff, job.spec.grace_period) == (0, "5s", "30s")
    assert (job.spec.deadline, job.spec.ttl, job.spec.hang_timeout, job.spec.checkpoints) == (None, None, None, None)


def test_every_field_of_a_full_document_is_read() -> None:
    spec = load(FULL).spec
    assert spec.command == ("python", "train.py", "--epochs", "20")
    assert spec.code == Code(path=".", exclude=("data/",))
    assert spec.secrets[0].from_.env == "MY_TOKEN"
    assert spec.checkpoints is not None and spec.checkpoints.keep.best is not None
    assert [rule.action for rule in spec.retries.rules] == ["retryFree", "fail"]
    assert spec.image == "registry.example.com:5000/team/train:v1"
    assert spec.kubernetes is not None and spec.kubernetes.node_selector == {"example.com/gpu": "a100"}
    assert [volume.mount_path for volume in spec.kubernetes.volumes] == ["/data", "/scratch"]
    assert load(FULL).per_worker() == (0.5, 2 * 2**30, 1)


@pytest.mark.parametrize("ending", ["---\n", "...\n", "\n# the end\n", "---\n# nothing more\n"])
def test_a_trailing_separator_is_no_second_document(ending: str) -> None:
    assert load("---\n" + SMALLEST + ending) == load(SMALLEST)


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm() -> None:
    assert load(b"\xef\xbb\xbf" + SMALLEST.replace("\n", "\r\n").encode()) == load(SMALLEST)


def test_json_with_tabs_and_escapes_is_read() -> None:
    text = load(SMALLEST).to_json().replace(",", ",\n\t").replace('["a"]', r'["\ud83d\ude00", "\u00e9"]')
    assert load(text).spec.command == ("😀", "é")


def test_anchors_and_merge_keys_are_read() -> None:
    text = "apiVersion: trainyard.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: &n a, labels: {n: *n}}\nspec:\n"
    text += "  command: [a]\n  inputs:\n    - &d {artifact: data, path: one}\n    - {<<: *d, path: two}\n"
    job = load(text)
    assert job.metadata.labels == {"n": "a"}
    assert [(entry.artifact, entry.path) for entry in job.spec.inputs] == [("data", "one"), ("data", "two")]


def test_words_that_older_yaml_takes_for_booleans_are_texts() -> None:
    assert load(SMALLEST.replace("[a]", "[a, yes, no, on, off, y, 12:30:00, 2026-11-20]")).spec.command[1:] == (
        "yes", "no", "on", "off", "y", "12:30:00", "2026-11-20",
    )  # fmt: skip


def test_a_job_does_not_change() -> None:
    job = load(FULL)
    with pytest.raises(ValidationError):
        job.spec.nodes = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        job.spec.env["A"] = "x"  # type: ignore[index]
    with pytest.raises(TypeError):
        job.metadata.labels["a"] = "x"  # type: ignore[index]


def test_packed_code_takes_the_place_of_the_path_and_nothing_else_changes() -> None:
    job = load(FULL)
    packed = job.with_packed_code("digits-code@3")
    assert packed.spec.code == Code(artifact="digits-code@3")
    assert packed.model_copy(update={"spec": packed.spec.model_copy(update={"code": job.spec.code})}) == job


def test_a_job_made_in_python_is_checked_as_well() -> None:
    with pytest.raises(ValidationError, match="has to contain"):
        TrainingJob.model_validate(
            {
                "apiVersion": "trainyard.dev/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "a"},
                "spec": {"command": ("a",), "checkpoints": {"path": "c", "pattern": "x"}},
            }
        )


def test_yaml_is_imported_only_when_yaml_is_read() -> None:
    program = (
        "import sys, trainyard.spec as spec\n"
        f"spec.load({load(SMALLEST).to_json()!r}).to_yaml()\n"
        "assert not [name for name in sys.modules if name.startswith('ruamel')]\n"
        f"spec.load({SMALLEST!r})\n"
        "assert 'ruamel.yaml' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


def test_paths_of_fields_read_as_people_write_them() -> None:
    assert field_path(("spec", "command", 3)) == "spec.command[3]"
    assert field_path(("metadata", "labels", "a/b")) == "metadata.labels['a/b']"
    assert field_path(()) == ""


def test_a_problem_says_where_what_and_what_instead() -> None:
    problem = Problem("job.yaml", 3, "spec.nodes", "0", "too small", "1 to 5", "1")
    assert str(problem) == "job.yaml:3: spec.nodes: too small; allowed: 1 to 5; did you mean 1?"
    assert str(Problem(message="the document is empty")) == "the document is empty"
    assert "1 problem:" in str(SpecError([problem]))


def test_variables_named_like_credentials_are_taken_where_they_are_said_to_be_plain() -> None:
    job = load(SMALLEST.replace("[a]", "[a], allowPlain: true, env: {SORT_KEY: x, MONKEY: y}"))
    assert dict(job.spec.env) == {"SORT_KEY": "x", "MONKEY": "y"}
    assert TrainingJob.from_json(job.to_json()) == job


def test_a_job_that_an_earlier_version_took_is_read_as_it_is() -> None:
    code = {"git": {"url": "https://user:secret@host.example/code.git", "ref": "main"}}
    old = {"metadata": {"name": "a"}, "spec": {"command": ["a"], "env": {"API_TOKEN": "x"}, "code": code}}
    assert TrainingJob.from_json(json.dumps(old), stored=True).spec.env["API_TOKEN"] == "x"
    with pytest.raises(ValidationError):
        TrainingJob.from_json(json.dumps(old))
