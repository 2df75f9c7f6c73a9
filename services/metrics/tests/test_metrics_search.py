"""A search finds what a model in plain Python finds, on SQLite and PostgreSQL, in any order and page by page."""

import base64
import json
import math
import operator
import random
import re

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from servicekit.auth import Principal
from servicekit.errors import InvalidArgument
from servicekit.store import Store
from sqlmodel import Session
from trainyard_metrics import runs, summary_rows
from trainyard_metrics.app import MIGRATIONS
from trainyard_metrics.domain.filters import Among, Compare, Every, Field, Like, Not, Some
from trainyard_metrics.domain.params import flatten
from trainyard_metrics.domain.summary import Summary
from trainyard_metrics.search import search
from trainyard_metrics.settings import Settings
from trainyard_protos.v1 import metrics_pb2 as pb

from services.metrics.tests.metrics_kit import block, run_id

OPERATORS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
NUMBERS = [-math.inf, -1.5, -0.0, 0.25, 1.0, 1e300, math.inf]
TEXTS = ["", "a", "A", "ä", "a%b", "a_b", "a*b", "[a]", "a\\b", "'\"", "zz", "日本"]
PATTERNS = ["%", "a%", "%b", "a_b", "A", "_", "a\\%b", "[a]", "a*b", "%\\\\%", "", "%本"]
METRICS = ["loss", "val/acc", 'odd "name"']


def make_run(rng, number):
    """What is known of a run, as the model keeps it."""
    params = {
        "lr": rng.choice([None, 0.1, 1, True, False, "auto", "0.1", math.nan, math.inf]),
        "opt": rng.choice([None, {"name": rng.choice(TEXTS)}, {"lr": rng.choice([0.25, 1])}]),
    }
    return {
        "id": run_id(number),
        "name": rng.choice(TEXTS),
        "job": rng.choice(["", f"job-{number}"]),
        "attempt": rng.choice([0, 1, 2]),
        "notes": rng.choice(TEXTS),
        "created": rng.choice([1_000_000_000, 2_000_000_000, 2**62]),
        "params": {key: value for key, value in params.items() if rng.random() < 0.8},
        "spec": {"lr": rng.choice([0.25, "auto"]), "nodes": rng.choice([1, 2])} if rng.random() < 0.8 else {},
        "tags": {key: rng.choice(TEXTS) for key in ("team", "a.b") if rng.random() < 0.7},
        "metrics": {
            name: {rank: rng.choice([*NUMBERS, math.nan]) for rank in rng.sample([0, 1, 2], rng.randint(1, 3))}
            for name in METRICS
            if rng.random() < 0.7
        },
    }


def store_run(session, run):
    opened = pb.Run(id=run["id"], workspace="default", job_id=run["job"], fence=run["attempt"], name=run["name"])
    opened.created_ns, opened.notes, opened.params = run["created"], run["notes"], json.dumps(run["params"])
    opened.spec = json.dumps(run["spec"])
    opened.tags.update(run["tags"])
    runs.open_run(session, opened, Settings(), Principal("user"))
    summary = Summary()
    for name, by_rank in run["metrics"].items():
        for rank, value in by_rank.items():
            summary.add_rows(pb.Rows(rank=rank, count=1, blocks=[block({name: [value]}, first_step=rank)]))
    session.flush()
    saved = summary_rows.Saved(run["id"], summary.pack(), summary.last_time_ns, dict(summary.leads()), True)
    summary_rows.save(session, [saved])


@pytest.fixture
async def known(database_url):
    """A store with 40 runs, and the model's idea of them."""
    rng = random.Random(4)
    model = [make_run(rng, number) for number in range(1, 41)]
    store = Store(database_url, migrations=MIGRATIONS, name="metrics")
    await store.open()
    for run in model:
        await store.write(lambda session, run=run: store_run(session, run))
    yield store, model
    await store.close()


def ask(store, **request):
    with Session(store.engine) as session:
        return search(session, "default", pb.SearchRunsRequest(**request))


# The model


def values_of(run, field):
    """What a run has there: (number or None, text or None)."""
    if field.group == "metrics":
        by_rank = run["metrics"].get(field.name)
        return None if by_rank is None else (by_rank[min(by_rank)], None)
    if field.group in ("params", "spec"):
        found = {param.key: param for param in flatten(run[field.group])}.get(field.name)
        return None if found is None else (math.nan if found.text == "NaN" else found.number, found.text)
    if field.group == "tags":
        return (None, run["tags"][field.name]) if field.name in run["tags"] else None
    value = run[field.name]
    return (None, value) if isinstance(value, str) else (value, None)


def compare(found, name, value):
    number, text = found
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, str):
        return text is not None and OPERATORS[name](text.encode(), value.encode())
    if number is None:
        return False
    if math.isnan(value):
        return math.isnan(number) == (name == "=")
    return not math.isnan(number) and OPERATORS[name](number, value)


def like(text, pattern):
    expression, escaped = "", False
    for character in pattern:
        if escaped:
            expression, escaped = expression + re.escape(character), False
        elif character == "\\":
            escaped = True
        else:
            expression += {"%": ".*", "_": "."}.get(character, re.escape(character))
    return re.fullmatch(expression, text, re.DOTALL) is not None


def holds(condition, run):
    match condition:
        case Every(conditions):
            return all(holds(each, run) for each in conditions)
        case Some(conditions):
            return any(holds(each, run) for each in conditions)
        case Not(inner):
            return not holds(inner, run)
    found = values_of(run, condition.field)
    if found is None:
        return False
    match condition:
        case Compare(_, name, value):
            return compare(found, name, value)
        case Among(_, values, negated):
            return (
                all(compare(found, "!=", v) for v in values) if negated else any(compare(found, "=", v) for v in values)
            )
        case Like(_, pattern, negated):
            return found[1] is not None and like(found[1], pattern) != negated


# Conditions, and how they are written


def quoted(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def written_value(value):
    if isinstance(value, bool):
        return str(value).lower()
    return quoted(value) if isinstance(value, str) else repr(value)


def written_field(field):
    return f"{field.group}[{quoted(field.name)}]" if field.group else field.name


def written(condition):
    match condition:
        case Every(conditions):
            return "(" + " and ".join(map(written, conditions)) + ")"
        case Some(conditions):
            return "(" + " or ".join(map(written, conditions)) + ")"
        case Not(inner):
            return f"not ({written(inner)})"
        case Compare(field, name, value):
            return f"{written_field(field)} {name} {written_value(value)}"
        case Among(field, values, negated):
            listed = ", ".join(map(written_value, values))
            return f"{written_field(field)} {'not ' * negated}in ({listed})"
        case Like(field, pattern, negated):
            # A backslash means something to the text and to the pattern.
            text = re.sub(r"\\(.)", lambda found: "\\" + found[1] if found[1] in "%_\\" else found[0], pattern)
            return f'{written_field(field)} {"not " * negated}like "{text}"'


numbers = st.sampled_from([*NUMBERS, 0.1])
any_number = st.one_of(numbers, st.just(math.nan))
texts = st.sampled_from(TEXTS)
metric_fields = st.sampled_from([Field("metrics", name) for name in [*METRICS, "nothing"]])
param_fields = st.sampled_from(
    [
        *(Field("params", key) for key in ("lr", "opt.name", "opt.lr", "nothing")),
        Field("spec", "lr"),
        Field("spec", "nodes"),
    ]
)
text_fields = st.sampled_from(
    [Field("tags", "team"), Field("tags", "a.b"), *(Field("", n) for n in ("name", "job", "notes"))]
)
attempts = st.just(Field("", "attempt"))
equality, ordering = st.sampled_from(["=", "!="]), st.sampled_from(list(OPERATORS))
leaves = st.one_of(
    st.builds(Compare, st.one_of(metric_fields, param_fields, attempts), ordering, numbers),
    st.builds(Compare, st.one_of(metric_fields, param_fields), equality, st.just(math.nan)),
    st.builds(Compare, st.one_of(param_fields, text_fields), ordering, texts),
    st.builds(Compare, param_fields, equality, st.booleans()),
    st.builds(Among, metric_fields, st.lists(any_number, min_size=1, max_size=3).map(tuple), st.booleans()),
    st.builds(Among, text_fields, st.lists(texts, min_size=1, max_size=3).map(tuple), st.booleans()),
    st.builds(Like, st.one_of(param_fields, text_fields), st.sampled_from(PATTERNS), st.booleans()),
)
several = st.lists(st.deferred(lambda: conditions), min_size=2, max_size=3).map(tuple)
conditions = st.one_of(
    leaves, leaves, st.builds(Not, st.deferred(lambda: conditions)), st.builds(Every, several), st.builds(Some, several)
)


def newest_first(model):
    return sorted(model, key=lambda run: (run["created"], run["id"]), reverse=True)


@examples(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(condition=conditions)
async def test_a_search_finds_what_the_model_finds(known, condition):
    store, model = known
    found = [each.run.id for each in ask(store, filter=written(condition), page_size=1000).runs]
    assert found == [run["id"] for run in newest_first(model) if holds(condition, run)], written(condition)


def order_key(run, field):
    """None for what a run lacks: such runs come last."""
    found = values_of(run, field)
    if found is None or (found[1] is None and math.isnan(found[0])):
        return None
    number, text = found
    if field.group in ("params", "spec"):
        return (number is None or math.isnan(number), 0 if number is None else number, text.encode())
    return number if text is None else text.encode()


orders = st.lists(st.tuples(st.one_of(metric_fields, text_fields, attempts), st.booleans()), max_size=3)


@examples(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=orders, page_size=st.integers(1, 15))
async def test_pages_in_any_order_hold_every_run_once_in_that_order(known, order, page_size):
    store, model = known
    expected = newest_first(model)
    for field, descending in reversed(order):
        has = [run for run in expected if order_key(run, field) is not None]
        lacks = [run for run in expected if order_key(run, field) is None]
        expected = sorted(has, key=lambda run, f=field: order_key(run, f), reverse=False) + lacks
        if descending:
            keys = sorted({order_key(run, field) for run in has}, reverse=True)
            expected = [run for key in keys for run in has if order_key(run, field) == key] + lacks
    text = ", ".join(written_field(field) + " desc" * descending for field, descending in order)
    found, token = [], ""
    while True:
        page = ask(store, order_by=text, page_size=page_size, page_token=token)
        found += [each.run.id for each in page.runs]
        token = page.next_page_token
        if not token:
            break
    assert found == [run["id"] for run in expected]


async def test_numbers_come_before_texts_when_params_are_ordered(known):
    store, model = known
    found = [each.run.id for each in ask(store, order_by="params.lr", page_size=1000).runs]
    by_id = {run["id"]: order_key(run, Field("params", "lr")) for run in model}
    has = [by_id[run] for run in found if by_id[run] is not None]
    assert len(found) == len(model)
    assert has == sorted(has)
    assert all(by_id[run] is None or by_id[run][0] for run in found[len(has) :])


async def test_last_values_are_those_of_the_lowest_rank(known):
    store, model = known
    names = [*METRICS, "nothing"]
    for found, run in zip(ask(store, names=names, page_size=1000).runs, newest_first(model), strict=True):
        for name, value, step, count in zip(names, found.last_value, found.last_step, found.count, strict=True):
            by_rank = run["metrics"].get(name)
            if by_rank is None:
                assert (math.isnan(value), step, count) == (True, 0, 0)
            else:
                lowest = min(by_rank)
                assert (repr(value), step, count) == (repr(by_rank[lowest]), lowest, 1)


async def test_a_search_may_be_among_some_runs(known):
    store, _ = known
    some = [run_id(3), run_id(7), run_id(99)]
    assert {each.run.id for each in ask(store, run_ids=some).runs} == {run_id(7), run_id(3)}


async def test_a_token_of_another_order_is_refused(known):
    store, _ = known
    token = ask(store, order_by="name", page_size=1).next_page_token
    for order_by, bad in (("created", token), ("name", "nonsense"), ("name", "W10=")):
        with pytest.raises(InvalidArgument) as caught:
            ask(store, order_by=order_by, page_token=bad)
        assert caught.value.reason == "BadPageToken"


@pytest.mark.parametrize(
    "content",
    [
        "5",
        "null",
        "true",
        "[" * 100_000,
        '["", 1, "\\ud800"]',
        '["", 1, "\\u0000"]',
        '["", 1, true]',
        '["", 1, [1]]',
        '["", 1, {}]',
    ],
    ids=lambda content: content[:12],
)
async def test_a_token_that_somebody_made_up_is_refused(known, content):
    with pytest.raises(InvalidArgument) as caught:
        ask(known[0], page_token=base64.urlsafe_b64encode(content.encode()).decode())
    assert caught.value.reason == "BadPageToken"


@pytest.mark.parametrize("field", ["name", "params.lr", "tags.team", "metrics.loss", "attempt", "created"])
async def test_the_longest_list_fits_into_the_database(known, field):
    value = {"attempt": "1", "metrics.loss": "1", "params.lr": "1"}.get(field, '"2026-11-20"')
    values = ", ".join([value] * 255)
    for word in ("in", "not in"):
        ask(known[0], filter=f"name = 'a' or {field} {word} ({values})", order_by="metrics.loss, params.lr")


@pytest.mark.parametrize("order_by", ["nothing", "metrics.a sideways", ",", "name,,job", "name; drop", "a,b,c,d,e"])
async def test_an_order_that_means_nothing_is_refused(known, order_by):
    with pytest.raises(InvalidArgument):
        ask(known[0], order_by=order_by)


async def test_a_refused_order_says_which_part_and_names_both_directions(known):
    with pytest.raises(InvalidArgument, match=r"^order by 'metrics\.a sideways': .*'sideways'") as caught:
        ask(known[0], order_by="created, metrics.a sideways")
    assert "asc or desc" in caught.value.hint


async def test_times_are_compared_in_utc(known):
    store, model = known
    found = {each.run.id for each in ask(store, filter='created > "1970-01-01T00:00:01.5"', page_size=1000).runs}
    assert found == {run["id"] for run in model if run["created"] > 1_500_000_000}
