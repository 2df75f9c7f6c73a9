"""The filter language: what it means, and how it says what is wrong."""

import pytest
from servicekit.errors import InvalidArgument
from trainyard_metrics.domain.filters import Among, Compare, Every, Field, Like, Not, Some, parse
from trainyard_metrics.domain.params import Param, flatten


def without_columns(node):
    match node:
        case Every(conditions) | Some(conditions):
            return type(node)(tuple(map(without_columns, conditions)))
        case Not(condition):
            return Not(without_columns(condition))
        case Compare(field, operator, value):
            return Compare(Field(field.group, field.name), operator, value)
        case Among(field, values, negated):
            return Among(Field(field.group, field.name), values, negated)
        case Like(field, pattern, negated):
            return Like(Field(field.group, field.name), pattern, negated)


LOSS, LR, TEAM, NAME = Field("metrics", "loss"), Field("params", "lr"), Field("tags", "team"), Field("", "name")


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("metrics.loss > 0.5", Compare(LOSS, ">", 0.5)),
        ("metrics['loss']>.5e0", Compare(LOSS, ">", 0.5)),
        ('metrics["val/acc \\"x\\""] = -inf', Compare(Field("metrics", 'val/acc "x"'), "=", float("-inf"))),
        ("metrics.val/acc == 1", Compare(Field("metrics", "val/acc"), "=", 1.0)),
        ("params.optimizer.betas.0 < 1", Compare(Field("params", "optimizer.betas.0"), "<", 1.0)),
        ("params.lr = true", Compare(LR, "=", True)),
        ("params.lr in (0.1, 'auto')", Among(LR, (0.1, "auto"), False)),
        ("tags.team NOT IN ('a')", Among(TEAM, ("a",), True)),
        ("name like 'a\\%b%'", Like(NAME, "a\\%b%", False)),
        ("not name like 'a'", Not(Like(NAME, "a", False))),
        ("not not name = 'a'", Compare(NAME, "=", "a")),
        (
            "name = 'a' or name = 'b' and name = 'c'",
            Some((Compare(NAME, "=", "a"), Every((Compare(NAME, "=", "b"), Compare(NAME, "=", "c"))))),
        ),
        (
            "(name = 'a' or name = 'b') and name = 'c'",
            Every((Some((Compare(NAME, "=", "a"), Compare(NAME, "=", "b"))), Compare(NAME, "=", "c"))),
        ),
        ("tags.order = 'and'", Compare(Field("tags", "order"), "=", "and")),
    ],
)
def test_a_filter_means_what_it_says(text, meaning):
    assert without_columns(parse(text)) == meaning


def test_an_empty_filter_is_no_condition():
    assert parse("  ") is None


@pytest.mark.parametrize(
    ("text", "where", "help_"),
    [
        ("metrics.loss lik 3", "column 14: 'lik'", "did you mean 'like'?"),
        ("matrics.loss > 3", "column 1: there is no 'matrics'", "did you mean 'metrics'?"),
        ("name = 'a' nad name = 'b'", "column 12: 'nad'", "did you mean 'and'?"),
        ("metrics.loss >", "column 15: the filter ends too early", "a number"),
        ("(name = 'a'", "column 12: the filter ends too early", ")"),
        ("name = $", "column 8: '$'", '"text"'),
        ("metrics.loss > 'a'", 'column 1: loss compared with "a"', "a number"),
        ("tags.team > 3", "column 1: team compared with 3.0", '"text"'),
        ("created > 'soon'", 'column 1: created compared with "soon"', '"2026-11-20"'),
        ("metrics.loss < nan", "column 1: loss < nan", "use = or !="),
        ("attempt like 'a'", "column 1: attempt is not text", "use =, !="),
    ],
)
def test_what_is_wrong_is_told_with_its_place_and_a_way_out(text, where, help_):
    with pytest.raises(InvalidArgument) as caught:
        parse(text)
    assert caught.value.reason == "BadFilter"
    assert where in caught.value.message
    assert help_ in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "name = '" + "x" * 5000 + "'",
        "(" * 60 + "name = 'a'" + ")" * 60 + " or " + " or ".join("id=''" for _ in range(300)),
        "name in (" + ",".join("'a'" for _ in range(257)) + ")",
    ],
    ids=["long", "many", "values"],
)
def test_filters_are_bounded(text):
    with pytest.raises(InvalidArgument):
        parse(text)


def test_deep_filters_are_refused_and_break_nothing():
    deep = "name = 'a'"
    for index in range(200):
        deep = f"({deep} {'or' if index % 2 else 'and'} id='')"
    with pytest.raises(InvalidArgument) as caught:
        parse(deep)
    assert caught.value.reason == "BadFilter"


def test_params_are_flattened_to_dotted_keys():
    params = {"lr": 0.1, "opt": {"name": "adam", "betas": [0.9, 1]}, "none": None, "on": True, "bad": float("nan")}
    assert flatten(params) == [
        Param("lr", "0.1", 0.1),
        Param("opt.name", "adam"),
        Param("opt.betas.0", "0.9", 0.9),
        Param("opt.betas.1", "1", 1.0),
        Param("on", "true"),
        Param("bad", "NaN"),
    ]


def test_texts_that_no_database_takes_are_mended():
    assert flatten({"a\0": "\ud800\0"}) == [Param("a\ufffd", "?\ufffd")]
