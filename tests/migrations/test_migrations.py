"""The schema of every service, made from nothing or from an earlier one, is what its code expects."""

import json
from pathlib import Path

import pytest
import sqlalchemy
import trainyard_artifacts.app
import trainyard_artifacts.tables
import trainyard_metrics.app
import trainyard_metrics.tables
import trainyard_scheduler.app
import trainyard_scheduler.tables
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from servicekit.migrate import upgrade
from sqlmodel import SQLModel
from trainyard_metrics.domain.params import flatten
from trainyard_scheduler.domain.admission import NOTHING, Amount
from trainyard_scheduler.domain.matching import Toleration, Wishes
from trainyard_scheduler.policy import read_policy
from trainyard_scheduler.tables import Pool
from trainyard_scheduler.transitions.pools import read_pool

SERVICES = {
    "scheduler": (trainyard_scheduler.app.MIGRATIONS, trainyard_scheduler.tables),
    "metrics": (trainyard_metrics.app.MIGRATIONS, trainyard_metrics.tables),
    "artifacts": (trainyard_artifacts.app.MIGRATIONS, trainyard_artifacts.tables),
}


def revisions(migrations: Path) -> list[str]:
    return sorted(path.stem.partition("_")[0] for path in (migrations / "versions").glob("[0-9]*.py"))


STARTS = [(name, start) for name, (migrations, _) in SERVICES.items() for start in ["", *revisions(migrations)[:-1]]]


@pytest.fixture
def engine(database_url):
    engine = sqlalchemy.create_engine(database_url)
    yield engine
    engine.dispose()


@pytest.mark.parametrize(("service", "start"), STARTS)
def test_an_upgrade_makes_the_schema_that_the_service_expects(service, start, engine):
    migrations, tables = SERVICES[service]
    if start:
        upgrade(engine, migrations, to=start)
    upgrade(engine, migrations)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": False, "include_object": _is_compared})
        assert _differences(context, tables) == []


@pytest.mark.parametrize("service", SERVICES)
def test_an_upgrade_of_the_newest_schema_changes_nothing(service, engine):
    migrations, _ = SERVICES[service]
    upgrade(engine, migrations)
    upgrade(engine, migrations)
    with engine.connect() as connection:
        newest = connection.execute(sqlalchemy.text("SELECT version_num FROM alembic_version")).scalar()
    assert newest == revisions(migrations)[-1]


def test_an_upgrade_parts_the_spec_of_a_job_from_the_params_of_its_script(engine):
    migrations, _ = SERVICES["metrics"]
    upgrade(engine, migrations, to="0006")
    document = {"kind": "TrainingJob", "metadata": {"name": "a", "labels": {"team": "b"}}}
    document["spec"] = {"nodes": 2, "env": {"SEED": "1"}}
    params = {"job": {**document, "lr": 0.1}, "script": {"lr": 0.1, "spec": {"nodes": 3}}}
    run = "INSERT INTO metrics_run (id, workspace, job_id, fence, name, created_ns, updated_ns, params, tags, notes, "
    run += (
        "context, superseded, logs_removed, dirty) VALUES (:id, 'default', :job, 1, '', 1, 1, :params, '{}', '', '{}', "
    )
    run += "false, false, false)"
    param = "INSERT INTO metrics_param (key, run_id, text, number) VALUES (:key, :id, :text, :number)"
    with engine.begin() as connection:
        for name, values in params.items():
            job = "job" if name == "job" else ""
            connection.execute(sqlalchemy.text(run), {"id": name, "job": job, "params": json.dumps(values)})
            for each in flatten(values):
                found = {"key": each.key, "id": name, "text": each.text, "number": each.number}
                connection.execute(sqlalchemy.text(param), found)
    upgrade(engine, migrations)
    with engine.connect() as connection:
        rows = connection.execute(sqlalchemy.text("SELECT id, params, spec FROM metrics_run ORDER BY id")).all()
        indexed = {
            table: set(connection.execute(sqlalchemy.text(f"SELECT run_id, key, text, number FROM metrics_{table}")))
            for table in ("param", "spec")
        }
    assert [(name, json.loads(left), json.loads(spec)) for name, left, spec in rows] == [
        ("job", {"lr": 0.1}, {"nodes": 2, "env": ["SEED"], "labels": {"team": "b"}}),
        ("script", {"lr": 0.1, "spec": {"nodes": 3}}, {}),
    ]
    assert indexed["param"] == {
        ("job", "lr", "0.1", 0.1),
        ("script", "lr", "0.1", 0.1),
        ("script", "spec.nodes", "3", 3.0),
    }
    assert indexed["spec"] == {("job", "nodes", "2", 2.0), ("job", "labels.team", "b", None)}


def test_an_upgrade_numbers_the_jobs_of_each_name(engine):
    migrations, _ = SERVICES["scheduler"]
    upgrade(engine, migrations, to="0005")
    columns = sqlalchemy.inspect(engine).get_columns("jobs")
    texts = {column["name"] for column in columns if isinstance(column["type"], sqlalchemy.String)}
    empty = {column["name"]: "" if column["name"] in texts else 0 for column in columns} | {"exit": b""}
    names = {"id-1": "digits", "id-2": "words", "id-3": "digits"}
    with engine.begin() as connection:
        jobs = sqlalchemy.Table("jobs", sqlalchemy.MetaData(), autoload_with=connection)
        for job_id, name in names.items():
            row = {"id": job_id, "name": name, "workspace": "default", "idempotency_key": job_id}
            connection.execute(jobs.insert(), empty | row)
    upgrade(engine, migrations)
    with engine.connect() as connection:
        numbers = connection.execute(sqlalchemy.text("SELECT id, number FROM jobs ORDER BY id")).all()
        newest = connection.execute(sqlalchemy.text("SELECT name, newest FROM job_numbers ORDER BY name")).all()
    assert (numbers, newest) == ([("id-1", 1), ("id-2", 1), ("id-3", 2)], [("digits", 2), ("words", 1)])


def _differences(context, tables):
    """What Alembic would change, of the tables that this service has."""
    ours = [
        sqlalchemy.inspect(value).local_table
        for value in vars(tables).values()
        if isinstance(value, type) and issubclass(value, SQLModel) and hasattr(value, "__table__")
    ]
    names = {table.name for table in ours}
    assert names
    return [each for each in compare_metadata(context, ours[0].metadata) if _table_of(each) in names]


def _table_of(difference):
    if isinstance(difference, list):  # of one column
        return difference[0][2]
    thing = difference[1]
    return thing.name if isinstance(thing, sqlalchemy.Table) else getattr(getattr(thing, "table", None), "name", None)


def _is_compared(thing, name, kind, reflected, compare_to):
    # Not indexes: SQLite does not tell the condition of one.
    return kind in ("table", "column")


def test_versions_of_before_stay_the_newest_of_their_artifacts(engine):
    migrations, _ = SERVICES["artifacts"]
    upgrade(engine, migrations, to="0003")
    values = {"id": "v", "workspace": "w", "name": "n", "number": 1, "kind": "output", "digest": b"", "size": 0}
    values |= {"files": 0, "created_ns": 7, "job_id": "", "attempt_id": "", "fence": 1}
    values |= {"labels": "{}", "inputs": "[]", "metrics": "{}"}
    names = ", ".join(values), ", ".join(f":{name}" for name in values)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("INSERT INTO artifact_version ({}) VALUES ({})".format(*names)), values)
    upgrade(engine, migrations)
    with engine.connect() as connection:
        assert connection.execute(sqlalchemy.text("SELECT published_ns FROM artifact_version")).scalar() == 7


def test_pools_and_jobs_of_before_keep_what_placement_needs(engine):
    migrations, _ = SERVICES["scheduler"]
    upgrade(engine, migrations, to="0003")
    pool = {"name": "p", "launcher_id": "l", "lease_s": 30.0, "alive": True, "seen_ns": 7}
    pool["machines"] = json.dumps({"m": [4000, 8, 1], "n": [2000, 4, 0, 1000, 2, 0]})
    wishes = {"nodeSelector": {"gpu": "a100"}, "tolerations": [{"key": "team", "operator": "Exists", "effect": None}]}
    with engine.begin() as connection:
        _insert(connection, "pools", pool)
        for name, state, kubernetes in (("waits", 1, wishes), ("plain", 1, None), ("over", 6, wishes)):
            _insert(connection, "jobs", _job(name, state))
            spec = json.dumps({"spec": {"kubernetes": kubernetes}})
            _insert(connection, "documents", {"job_id": name, "spec": spec})
    upgrade(engine, migrations)
    with engine.connect() as connection:
        row = connection.execute(sqlalchemy.text("SELECT * FROM pools")).one()
        policies = dict(connection.execute(sqlalchemy.text("SELECT id, policy FROM jobs")).all())
    live = read_pool(Pool.model_construct(**row._mapping))
    assert {name: (each.total, each.others) for name, each in live.offer.machines.items()} == {
        "m": (Amount(4000, 8, 1), NOTHING),
        "n": (Amount(2000, 4, 0), Amount(1000, 2, 0)),
    }
    waits = read_policy(policies.pop("waits")).wishes
    assert waits == Wishes((("gpu", "a100"),), (Toleration("team", "Exists", "", ""),))
    assert [read_policy(text).wishes for text in policies.values()] == [Wishes(), Wishes()]


def _job(name, state):
    policy = {"limit": 0, "backoff_s": 0, "rules": [], "grace_s": 30, "deadline_s": None, "ttl_s": None}
    texts = ("workspace", "owner_kind", "owner_id", "queue", "reason", "message", "attempt_id")
    numbers = ("priority", "nodes", "workers_per_node", "cpu_milli", "memory_bytes", "gpu", "created_ns", "attempt")
    times = ("not_before_ns", "deadline_ns", "updated_ns", "started_ns", "ended_ns", "expires_ns", "event_seq")
    return {
        **dict.fromkeys(texts, ""),
        **dict.fromkeys((*numbers, *times, "retries_used", "free_retries_used"), 0),
        **{"id": name, "name": name, "idempotency_key": name, "state": state, "policy": json.dumps(policy)},
        **{"labels": "{}", "exit": b"", "rejected_checkpoints": "[]"},
    }


def _insert(connection, table, values):
    names = ", ".join(values), ", ".join(f":{name}" for name in values)
    connection.execute(sqlalchemy.text("INSERT INTO {} ({}) VALUES ({})".format(table, *names)), values)
