"""What is read, written and read again is the same, whatever it contains."""

from __future__ import annotations

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st
from trainyard.credentials import named_like_a_credential
from trainyard.spec import (
    Best,
    Checkpoints,
    Code,
    EmptyDir,
    GitSource,
    Input,
    Keep,
    Kubernetes,
    Metadata,
    Output,
    Python,
    Resources,
    Retries,
    RetryRule,
    Secret,
    SecretKeyReference,
    SecretSource,
    Spec,
    SpecError,
    Toleration,
    TrainingJob,
    Volume,
    load,
)
from trainyard.spec.emit import to_yaml
from trainyard.spec.schema import json_schema, structural_schema
from trainyard.spec.yaml_reader import read_yaml

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
TRAPS = st.sampled_from(
    ["yes", "NO", "null", "~", "",
     "1e3", "0x1F", "0xa", "0o7", "1_000", "12:30:00", "2026-11-20", ".inf", "-", "--", "---",
     "...", "- a", "a: b", "a #b", "#", "&a", "*a", "!x", "%", "@", "`", "|", ">",
     "'", '"', "{}", "[]", "\t", "\n", "a\nb",
     " a ", "\u2028", "\x85", "\ufeff", "\x7f", "😀", "<<", "=", "5s", "2Gi", "--epochs", "-1", ".5", "1."]
)  # fmt: skip
NAMES = st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?\Z")
VARIABLES = st.from_regex(r"\A[A-SU-Z_a-z][A-Za-z0-9_]{0,12}\Z").filter(lambda name: not named_like_a_credential(name))
ARTIFACTS = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,12}\Z")
SELECTORS = st.from_regex(r"\A([a-z][a-z0-9._-]{0,12}|[0-9]{1,3})\Z")
REFERENCES = st.one_of(ARTIFACTS, st.tuples(ARTIFACTS, SELECTORS).map("@".join))
PATHS = st.lists(st.from_regex(r"\A[a-z ][a-z. -]{0,5}\Z"), min_size=1, max_size=3).map("/".join)
DURATIONS = st.builds("{}{}".format, st.integers(1, 300), st.sampled_from(["ms", "s"]))
RULES = st.builds(
    RetryRule,
    exit_codes=st.lists(st.integers(1, 255), min_size=1, max_size=3).map(tuple),
    signals=st.none() | st.just(("SIGKILL", "SIGSEGV")),
    log_pattern=st.none() | st.sampled_from(["out of memory", r"loss: (nan|inf)\b", "é+"]),
    reasons=st.none() | st.just(("Hung",)),
    action=st.sampled_from(["retry", "retryFree", "fail"]),
)
CODE = st.one_of(
    st.builds(Code, path=TEXT.filter(bool), exclude=st.lists(TEXT.filter(bool), max_size=2).map(tuple)),
    st.builds(Code, artifact=REFERENCES),
    st.builds(Code, git=st.builds(GitSource, url=st.just("https://x/y.git"), ref=ARTIFACTS, path=PATHS)),
)
IMAGES = st.from_regex(r"\A([a-z]{1,5}:[0-9]{2}/)?[a-z]{1,5}(/[a-z]{1,5})?(:[A-Za-z0-9]{1,5})?\Z")
KUBERNETES = st.builds(
    Kubernetes,
    node_selector=st.dictionaries(NAMES, st.from_regex(r"\A[A-Za-z0-9]{0,9}\Z"), max_size=2),
    tolerations=st.just(()) | st.just((Toleration(operator="Exists"), Toleration(key="a/b", value="c"))),
    volumes=st.just(())
    | st.builds(Volume, name=NAMES, mountPath=PATHS.map("/data/{}".format), read_only=st.booleans(), secret=NAMES).map(
        lambda one: (one,)
    )
    | st.just((Volume(name="a", mount_path="/a", empty_dir=EmptyDir()),)),
    shared_memory=st.none() | st.sampled_from(["2Gi", 2**20]),
    pull_secrets=st.lists(NAMES, max_size=2).map(tuple),
    topology=st.sampled_from([None, "spread", "pack"]),
    run_as_user=st.none() | st.integers(1, 2**31 - 1),
)
SPECS = st.builds(
    Spec,
    queue=NAMES,
    priority=st.integers(0, 1000),
    runtime=st.just("process"),
    command=st.lists(TEXT | TRAPS, max_size=5).map(lambda arguments: ("program", *arguments)),
    code=st.none() | CODE,
    python=st.none() | st.builds(Python, requirements=PATHS),
    nodes=st.integers(1, 1024),
    workers_per_node=st.integers(1, 128),
    resources=st.builds(
        Resources,
        cpu=st.integers(1, 64) | st.sampled_from(["500m", "1.5"]),
        memory=st.integers(2**20, 2**40) | st.sampled_from(["2Gi", "1.5G"]),
        gpu=st.integers(0, 8),
    ),
    env=st.dictionaries(VARIABLES, TEXT | TRAPS, max_size=4),
    secrets=st.just(())
    | st.just((Secret(name="TOKEN", from_=SecretSource(file="/etc/token")),))
    | st.just((Secret(name="TOKEN", from_=SecretSource(secret=SecretKeyReference(name="hub", key="token"))),)),
    inputs=st.builds(Input, artifact=REFERENCES, path=PATHS).map(lambda one: (one,)),
    checkpoints=st.none()
    | st.builds(
        Checkpoints,
        path=PATHS,
        pattern=st.just("step-{step}.pt"),
        keep=st.builds(Keep, last=st.integers(1, 9), best=st.none() | st.just(Best(metric="val/loss", mode="min"))),
    ),
    outputs=st.builds(Output, path=PATHS, artifact=ARTIFACTS).map(lambda one: (one,)),
    retries=st.builds(
        Retries, limit=st.integers(0, 9), backoff=DURATIONS, rules=st.lists(RULES, max_size=2).map(tuple)
    ),
    deadline=st.none() | DURATIONS,
    hang_timeout=st.none() | DURATIONS,
    grace_period=DURATIONS,
    ttl=st.none() | DURATIONS,
    image=st.none() | IMAGES,
    kubernetes=st.none() | KUBERNETES,
)
JOBS = st.builds(
    TrainingJob,
    metadata=st.builds(
        Metadata, name=NAMES, labels=st.dictionaries(NAMES, st.from_regex(r"\A[A-Za-z0-9]{0,9}\Z"), max_size=3)
    ),
    spec=SPECS.filter(lambda spec: "TOKEN" not in spec.env),
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXT | TRAPS,
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(TEXT.filter(lambda key: key != "<<"), below, max_size=3)
    ),
    max_leaves=20,
)


def test_a_name_that_looks_like_a_number_stays_a_name() -> None:
    assert read_yaml(to_yaml({"artifact": "0xa"})).data == {"artifact": "0xa"}


@given(JOBS)
@settings(deadline=None)
def test_a_job_written_as_yaml_reads_back_the_same(job: TrainingJob) -> None:
    assert load(job.to_yaml()) == job


@given(JOBS)
@settings(deadline=None)
def test_a_job_written_as_json_reads_back_the_same(job: TrainingJob) -> None:
    assert load(job.to_json()) == job
    assert TrainingJob.from_json(job.to_json()) == job


@given(JOBS)
@settings(deadline=None)
def test_every_job_fits_both_schemas(job: TrainingJob) -> None:
    document = read_yaml(job.to_yaml()).data
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    jsonschema.Draft202012Validator(structural_schema()).validate(document)


@given(st.dictionaries(TEXT.filter(lambda key: key != "<<"), PLAIN, max_size=4))
@settings(deadline=None)
def test_any_plain_data_written_as_yaml_reads_back_the_same(data: dict[str, object]) -> None:
    assert (read_yaml(to_yaml(data)).data or {}) == data


@given(st.text(max_size=200) | st.binary(max_size=200))
@settings(deadline=None)
def test_no_text_does_more_than_refuse_itself(text: str | bytes) -> None:
    try:
        load(text)
    except SpecError as error:
        assert error.problems


@given(JOBS, st.data())
@settings(deadline=None)
def test_no_cut_in_a_document_does_more_than_refuse_it(job: TrainingJob, data: st.DataObject) -> None:
    text = job.to_yaml()
    start = data.draw(st.integers(0, len(text)))
    try:
        load(text[:start] + data.draw(TRAPS) + text[start + data.draw(st.integers(0, 30)) :])
    except SpecError as error:
        assert error.problems
