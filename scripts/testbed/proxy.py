"""nginx as the one endpoint of a yard whose services run apart: gRPC is routed by the name of the service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.testbed import fetch
from scripts.testbed.server import Server

ROUTES = {
    "scheduler": (
        "trainyard.v1.SchedulerService",
        "trainyard.v1.AttemptService",
        "trainyard.v1.SchedulerAdminService",
        "trainyard.v1.YardService",
    ),
    "launcher": ("trainyard.v1.LauncherService", "trainyard.v1.AgentService"),
    "metrics": ("trainyard.v1.MetricsService", "trainyard.v1.MetricsAdminService"),
    "artifacts": ("trainyard.v1.ArtifactService", "trainyard.v1.ArtifactAdminService"),
}
"""Which service of the yard answers which gRPC services."""

_TEMPLATE = """\
# Streams live for as long as jobs do, in both directions, and may be silent; messages have no size here (the services
# bound them); errors carry the problems of a document, up to some hundred kilobytes.
daemon off;
master_process off;
worker_rlimit_nofile 65536;
pid nginx.pid;
error_log stderr warn;
events {{ worker_connections 16384; }}

http {{
    access_log off;
    server_tokens off;
    client_body_temp_path temp;
    proxy_temp_path temp;
    fastcgi_temp_path temp;
    uwsgi_temp_path temp;
    scgi_temp_path temp;

    client_max_body_size 0;
    client_body_buffer_size 1m;
    http2_body_preread_size 1m;
    large_client_header_buffers 4 16k;
    http2_max_concurrent_streams 100000;
    keepalive_requests 1000000000;
    keepalive_time 365d;
    keepalive_timeout 1h;
    client_body_timeout 7d;
    send_timeout 7d;

    grpc_buffer_size 512k;
    grpc_read_timeout 7d;
    grpc_send_timeout 7d;
    grpc_connect_timeout 5s;
    grpc_socket_keepalive on;

{upstreams}
    server {{
        listen 127.0.0.1:{port} http2 so_keepalive=on;
{locations}    }}
}}
"""
# One that stands by refuses connections, and the next one is asked.
_UPSTREAM = """\
    upstream {name} {{
{servers}        keepalive 64;
        keepalive_requests 1000000000;
        keepalive_time 365d;
    }}
"""
_LOCATION = """\
        location /{route}/ {{ error_page 502 503 504 = @{name}; grpc_pass grpc://{name}; }}
"""
_UNREACHABLE = """\
        location @{name} {{
            internal;
            default_type application/grpc;
            add_header grpc-status 14 always;
            add_header grpc-message "the yard's {name} service is not reachable" always;
            return 204;
        }}
"""


def configuration(port: int, services: Mapping[str, Sequence[str]]) -> str:
    """nginx's configuration.

    Args:
        port: of 127.0.0.1, for clients.
        services: addresses of each service, by its name in ROUTES.
    """
    upstreams = "".join(
        _UPSTREAM.format(name=name, servers="".join(f"        server {each} max_fails=0;\n" for each in addresses))
        for name, addresses in services.items()
    )
    locations = "".join(
        _UNREACHABLE.format(name=name) + "".join(_LOCATION.format(name=name, route=route) for route in ROUTES[name])
        for name in services
    )
    return _TEMPLATE.format(port=port, upstreams=upstreams, locations=locations)


NGINX = ("nginx", "/usr/sbin/nginx")
STREAM_MODULE = ("libnginx-mod-stream", "/usr/lib/nginx/modules/ngx_stream_module.so")
"""Debian's package of each, and where it is."""


class Nginx(Server):
    """The endpoint.

    Args:
        services: addresses of each service.
    """

    name = "nginx"

    def __init__(self, folder: Path, services: Mapping[str, Sequence[str]], port: int = 0) -> None:
        super().__init__(folder, port)
        self._services = services
        self._program = fetch.debian(*NGINX)

    def prepare(self) -> None:
        (self.folder / "temp").mkdir(exist_ok=True)
        (self.folder / "nginx.conf").write_text(configuration(self.port, self._services))

    def command(self) -> list[str]:
        return [str(self._program.path), "-p", str(self.folder), "-e", "stderr", "-c", "nginx.conf"]

    def environ(self) -> Mapping[str, str]:
        return self._program.environ()
