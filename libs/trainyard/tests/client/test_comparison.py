"""What differs between runs, without a yard."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainyard.client import Run, compare
from trainyard.client.comparison import Code, change_between, flattened

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())
PARAMS = st.recursive(
    st.dictionaries(st.text("ab", min_size=1), LEAVES, max_size=3),
    lambda inner: st.dictionaries(st.text("ab", min_size=1), inner, max_size=3),
    max_leaves=8,
)
DIFF = """diff --git a/train.py b/train.py
index 1111111..2222222 100644
--- a/train.py
+++ b/train.py
@@ -1 +1 @@
-print(1)
+print(2)
"""


def run(identifier: str = "1", **fields: Any) -> Run:
    return Run(id=identifier, name="digits", **fields)


def facts(*runs: Run, **options: Any) -> dict[str, tuple[Any, ...]]:
    return {f"{row.part}.{row.name}": row.values for row in compare(runs, **options).rows}


def test_only_what_differs_is_shown() -> None:
    first = run(params={"lr": 0.1, "optimizer": {"name": "sgd", "momentum": 0.9}}, tags={"team": "vision"})
    second = run(params={"lr": 0.2, "optimizer": {"name": "adam", "momentum": 0.9}}, tags={"team": "vision"})
    assert facts(first, second) == {"params.lr": (0.1, 0.2), "params.optimizer.name": ("sgd", "adam")}


def test_with_everything_what_is_the_same_is_shown_too() -> None:
    same = run(params={"lr": 0.1}, values={"system/cpu": 1.0, "loss": 2.0})
    assert facts(same, same) == {}
    assert facts(same, same, everything=True) == {
        "params.lr": (0.1, 0.1),
        "metrics.loss": (2.0, 2.0),
        "metrics.system/cpu": (1.0, 1.0),
    }


def test_what_a_run_lacks_differs() -> None:
    assert facts(run(params={"a": 1}), run(), run(params={"a": 1})) == {"params.a": (1, None, 1)}


def test_parts_come_in_a_fixed_order_with_names_sorted() -> None:
    first = run(values={"loss": 1.0}, notes="better", tags={"b": "1", "a": "1"}, context={"host": "x"})
    second = run(values={"loss": 2.0}, tags={"b": "2", "a": "2"}, context={"host": "y"})
    assert list(facts(first, second)) == ["tags.a", "tags.b", "notes.", "context.host", "metrics.loss"]


def test_commits_are_compared_and_diffs_are_summed_up() -> None:
    git = {"commit": "aaa", "branch": "main", "dirty": True, "diff_artifact": "digits-diff@1"}
    other = git | {"commit": "bbb", "diff_artifact": "digits-diff@2"}
    runs = run(context={"git": git}), run(context={"git": other})
    found = facts(*runs, diffs=(DIFF, DIFF.replace("print(2)", "print(3)")))
    assert found.keys() == {"git.commit", "git.diff"}
    assert found["git.diff"][0].startswith("1 file, +1 -1 (")
    assert found["git.diff"][0] != found["git.diff"][1]


def test_the_same_change_on_other_blobs_is_no_difference() -> None:
    runs = run(context={"git": {"diff_artifact": "d@1"}}), run(context={"git": {"diff_artifact": "d@2"}})
    rebased = DIFF.replace("1111111..2222222", "3333333..4444444")
    assert facts(*runs, diffs=(DIFF, rebased)) == {}
    assert change_between(DIFF, rebased) == ""


def test_a_diff_that_was_deleted_is_said_to_be() -> None:
    runs = run(context={"git": {"diff_artifact": "d@1"}}), run()
    assert facts(*runs) == {"git.diff": ("d@1, which was deleted", None)}


def test_the_change_between_two_diffs_is_a_diff_of_them() -> None:
    change = change_between(DIFF, DIFF.replace("print(2)", "print(3)")).splitlines()
    assert change[-2:] == ["-+print(2)", "++print(3)"]


def spec(reference: str) -> dict[str, Any]:
    return {"code": {"artifact": reference}}


def test_the_same_code_is_the_same_whatever_its_version_is_called() -> None:
    runs = run(spec=spec("d@1")), run(spec=spec("d@2"))
    same = Code("d@1", "aa" * 32), Code("d@2", "aa" * 32)
    assert facts(*runs, codes=same) == {}
    assert facts(*runs, codes=same, everything=True)["code.artifact"] == ("d@1", "d@2")


def test_different_code_differs_without_git_in_its_files() -> None:
    runs = run(spec=spec("d@1")), run(spec=spec("e@1"))
    codes = Code("d@1", "aa" * 32, {"a.py": "1", "same.py": "0"}), Code("e@1", "bb" * 32, {"b.py": "2", "same.py": "0"})
    assert facts(*runs, codes=codes) == {
        "code.digest": ("aa" * 6, "bb" * 6),
        "code.files.a.py": ("1", None),
        "code.files.b.py": (None, "2"),
    }


def test_code_that_was_deleted_is_told_as_not_known() -> None:
    codes = Code("d@1"), Code("d@2", "bb" * 32)
    assert facts(run(), run(), codes=codes) == {"code.digest": ("not known: d@1 was deleted", "bb" * 6)}


CLEAN = {"commit": "aaa", "dirty": False}


@pytest.mark.parametrize(
    ("git", "diff", "code", "unknown"),
    [
        ({}, "", Code(), "the code, which was in no git repository"),
        ({}, "", Code(digest="aa" * 32), "modules other than the script"),
        ({}, "", Code("d@1", "aa" * 32), ""),
        (CLEAN, "", Code(), ""),
        (CLEAN | {"untracked": ["model.py"]}, "", Code(), "files that git does not track"),
        (CLEAN | {"dirty": True}, DIFF, Code(), ""),
        (CLEAN | {"dirty": True}, "", Code(), "changes that were not committed"),
        (CLEAN | {"dirty": True}, f"{DIFF}... cut here: only the first", Code(), "changes that were not committed"),
    ],
)
def test_code_that_was_not_recorded_is_named(git: dict[str, Any], diff: str, code: Code, unknown: str) -> None:
    """So that nobody takes it for the same."""
    same = run(context={"git": git} if git else {})
    found = compare([same, same], [diff, diff], [code, code])
    assert (found.rows, found.unknown) == ((), (unknown, unknown))


@given(PARAMS)
def test_a_run_never_differs_from_itself(params: dict[str, Any]) -> None:
    same = run(params=params, values={"nan": math.nan})
    assert compare([same, same]).rows == ()


@given(PARAMS)
def test_every_leaf_is_found_under_the_names_that_lead_to_it(params: dict[str, Any]) -> None:
    for name, value in flattened(params):
        found: Any = params
        for part in name.split(".") if name else ():
            found = found[part]
        assert found is value


@pytest.mark.parametrize("git", [5, "text", [1], None])
def test_a_context_that_means_nothing_is_left_out(git: Any) -> None:
    assert compare([Run("a", "a", context={"git": git}), Run("b", "b", context={"git": {"commit": "c"}})]).rows
