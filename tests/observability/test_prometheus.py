"""A real Prometheus scrapes a yard whose services run apart: with the token, over TLS, and its rules see the series."""

import re
import subprocess

import yaml
from cryptography import x509

from scripts.testbed.observability import Prometheus, Scrape, prometheus
from tests.conftest import REPOSITORY, wait_until
from tests.observability.conftest import PATIENCE_S, RULES

ALERTS_TEST = REPOSITORY / "tests" / "observability" / "alerts_test.yaml"
NAMES = re.compile(r"\btrainyard_[a-z_]+")


def promtool(*arguments):
    program = prometheus().beside("promtool")
    return subprocess.run([program.path, *arguments], capture_output=True, text=True, cwd=REPOSITORY)


def alerts():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_every_service_is_scraped_with_its_token(watched, yard):
    for service in yard.split.services:
        assert watched.prometheus.query(
            f'up{{job="trainyard"}} and on (instance) trainyard_ready{{service="{service}"}}'
        )


def test_without_the_token_nothing_is_scraped(yard, tmp_path):
    (tmp_path / "token").write_text("another-token-of-some-length")
    address = f"127.0.0.1:{yard.split.services['metrics'].metrics_port}"
    stranger = Prometheus(tmp_path, [Scrape("trainyard", [address], tmp_path / "token")])
    try:
        stranger.start()
        wait_until(
            lambda: any("401" in target["lastError"] for target in stranger.targets()), "the refusal", PATIENCE_S
        )
        assert stranger.query("trainyard_ready") == []
    finally:
        stranger.kill()


def test_over_tls_the_end_of_the_served_certificate_is_shown(watched):
    query = 'trainyard_certificate_expiry_seconds{job="trainyard-secure", listener="http"}'
    wait_until(lambda: watched.prometheus.query(query), "the certificate", PATIENCE_S)
    ends = x509.load_pem_x509_certificate(watched.certificate.read_bytes()).not_valid_after_utc
    assert float(watched.prometheus.query(query)[0]["value"][1]) == ends.timestamp()


def test_training_values_carry_the_job_they_are_of(watched):
    query = f'trainyard_run_value{{job="{watched.job.id}", name="loss", rank="0", workspace="default", attempt="1"}}'
    watched.until_shown(query)


def test_the_rules_are_valid():
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_alert_fires_when_it_is_due_and_not_before():
    tested = promtool("test", "rules", ALERTS_TEST)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_no_alert_is_without_a_test_in_which_it_fires():
    text = ALERTS_TEST.read_text()
    assert [rule["alert"] for rule in alerts() if f'alertname="{rule["alert"]}"' not in text] == []


def test_every_alert_says_how_grave_it_is_and_what_to_do():
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "action"}


def test_the_rules_speak_of_series_that_a_yard_has(watched):
    for name in sorted({name for rule in alerts() for name in NAMES.findall(rule["expr"])}):
        watched.until_shown(f"count({name})")


def test_a_job_that_fits_nowhere_is_on_its_way_to_an_alert(watched):
    def due():
        return {alert["labels"]["alertname"] for alert in watched.prometheus.alerts()}

    wait_until(lambda: "TrainyardJobsFitNowhere" in due(), "the alert to be pending", PATIENCE_S)
