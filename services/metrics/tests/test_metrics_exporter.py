"""What Prometheus is shown of runs: their newest values, as many series as there is room for."""

from services.metrics.tests.metrics_kit import append, open_run, points, run_id


def shown(ingestor, what, number=1, job="job", **labels):
    run = {"workspace": "default", "job": job, "run": run_id(number), "attempt": "1"}
    return ingestor.app.registry.get_sample_value(what, run | labels)


async def test_the_newest_value_and_step_of_a_run_are_shown(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), points([3.0, 1.5]), points([7.0], writer="b", rank=1))
    assert shown(ingestor, "trainyard_run_value", name="loss", rank="0") == 1.5
    assert shown(ingestor, "trainyard_run_value", name="loss", rank="1") == 7
    assert shown(ingestor, "trainyard_run_step") == 1
    await append(ingestor.user(), points([0.5], first=2))
    assert shown(ingestor, "trainyard_run_value", name="loss", rank="0") == 0.5
    assert shown(ingestor, "trainyard_run_step") == 2


async def test_values_that_are_not_numbers_are_shown_as_such(ingestor):
    await open_run(ingestor.user())
    await append(ingestor.user(), points([float("nan")]))
    assert str(shown(ingestor, "trainyard_run_value", name="loss", rank="0")) == "nan"


async def test_what_is_beyond_the_limit_is_left_out_and_counted(ingestor):
    await ingestor.restart(max_exported_series=2)
    for number in (1, 2):
        await open_run(ingestor.user(), number, job=f"job-{number}")
        names = ["a", "b"] if number == 2 else ["a", "b", "c"]
        await append(ingestor.user(), *(points([1.0], first=i, run=number, name=name) for i, name in enumerate(names)))
    assert shown(ingestor, "trainyard_run_value", 2, "job-2", name="a", rank="0") == 1
    assert shown(ingestor, "trainyard_run_value", 1, "job-1", name="a", rank="0") is None
    assert ingestor.counted("trainyard_run_series_left_out") == 3


async def test_a_run_that_has_been_quiet_is_not_shown(ingestor):
    await ingestor.restart(exported_s=0)
    await open_run(ingestor.user())
    await append(ingestor.user(), points([1.0]))
    assert shown(ingestor, "trainyard_run_value", name="loss", rank="0") is None


async def test_failed_writes_are_counted_from_0_so_that_an_alert_sees_the_first(ingestor):
    for reason in ("DiskFull", "StorageFailed"):
        assert ingestor.app.registry.get_sample_value("trainyard_metrics_write_errors_total", {"reason": reason}) == 0
