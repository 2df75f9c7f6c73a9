"""What a command line says in place of a document, and where its problems are."""

import pytest
from trainyard.spec import SpecError
from trainyard.spec.overrides import load_with, overrides

DOCUMENT = """\
apiVersion: trainyard.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec:
  command: [python, train.py]
  inputs:
    - {artifact: digits-data, path: data}
"""


def loaded(text: str = DOCUMENT, **said: object):
    return load_with(text, "job.yaml", overrides(**said))


def problems(text: str = DOCUMENT, **said: object):
    with pytest.raises(SpecError) as refused:
        loaded(text, **said)
    return [(problem.file, problem.line, problem.field) for problem in refused.value.problems]


def test_values_replace_those_of_the_document_and_are_yaml() -> None:
    job = loaded(
        name="words",
        assignments=[
            "spec.resources.cpu=2",
            "spec.resources.memory=2Gi",
            "spec.retries={limit: 3}",
            "spec.inputs[0].artifact=words-data",
            "spec.inputs[1]={artifact: more, path: more}",
            "metadata.labels['example.com/team']=vision",
        ],
        env=["SEED=1", "EMPTY="],
        arguments=["--epochs", "3"],
    )
    spec = job.spec
    assert (job.metadata.name, job.metadata.labels) == ("words", {"example.com/team": "vision"})
    assert (float(spec.resources.cpu), spec.retries.limit) == (2, 3)
    assert [each.artifact for each in spec.inputs] == ["words-data", "more"]
    assert spec.env == {"SEED": "1", "EMPTY": ""}
    assert list(spec.command) == ["python", "train.py", "--epochs", "3"]


def test_problems_of_an_option_name_the_option_and_the_field_and_others_keep_their_line() -> None:
    wrong = DOCUMENT.replace("path: data", "path: /data")
    assert sorted(problems(wrong, assignments=["spec.nodes=0", "spec.resourcs.cpu=1"], env=["1X=y"])) == [
        ("--env 1X", 0, "spec.env['1X']"),
        ("--set spec.nodes", 0, "spec.nodes"),
        ("--set spec.resourcs.cpu", 0, "spec.resourcs"),
        ("job.yaml", 7, "spec.inputs[0].path"),
    ]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("spec.nodes", ""),
        ("nodes=2", ""),
        ("spec=2", ""),
        ("spec..nodes=2", ""),
        ("spec.nodes=[1", "spec.nodes"),
        ("spec.command.first=x", "spec.command.first"),
        ("spec.inputs[5].path=x", "spec.inputs[5].path"),
        ("spec.command[0].x=y", "spec.command[0].x"),
    ],
)
def test_what_sets_no_field_is_refused(text: str, field: str) -> None:
    assert problems(assignments=[text]) == [(f"--set {text.partition('=')[0]}", 0, field)]


def test_the_value_of_a_variable_that_looks_like_a_credential_is_in_no_problem() -> None:
    with pytest.raises(SpecError) as refused:
        loaded(assignments=["spec.env.API_KEY=[secret-value]"])
    assert "secret-value" not in str([refused.value, *refused.value.problems])


def test_a_document_without_a_command_takes_no_arguments() -> None:
    text = DOCUMENT.replace("  command: [python, train.py]\n", "")
    assert problems(text, arguments=["--epochs"]) == [("--", 0, "spec.command")]
