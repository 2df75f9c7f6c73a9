"""Grafana's dashboards of a yard, built in code: `python -m scripts.grafana` renders them into the chart."""
