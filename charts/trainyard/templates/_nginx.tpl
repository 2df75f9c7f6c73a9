{{- /* The gateway: gRPC is routed by the name of the service. */ -}}
{{- define "trainyard.routes" -}}
scheduler: [SchedulerService, AttemptService, SchedulerAdminService, YardService]
launcher: [LauncherService, AgentService]
metrics: [MetricsService, MetricsAdminService]
artifacts: [ArtifactService, ArtifactAdminService]
{{- end -}}

{{- define "trainyard.nginx" -}}
{{- $full := include "trainyard.fullname" . -}}
{{- $routes := include "trainyard.routes" . | fromYaml -}}
# Streams live for as long as jobs do, in both directions, and may be silent; messages have no size here (the services
# bound them); errors carry the problems of a document, up to some hundred kilobytes.
daemon off;
worker_processes 2;
pid nginx.pid;
error_log stderr warn;
events { worker_connections 16384; }

http {
    access_log off;
    server_tokens off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;

    client_max_body_size 0;
    client_body_buffer_size 1m;
    http2_body_preread_size 1m;
    large_client_header_buffers 4 1m;
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
    grpc_ssl_verify on;
    grpc_ssl_trusted_certificate /etc/trainyard/tls/ca.crt;
    grpc_ssl_server_name on;

    # By way of a variable they are read at each handshake: a renewed certificate needs no restart.
    map $ssl_server_name $certificate { default /etc/trainyard/tls/tls.crt; }
    map $ssl_server_name $certificate_key { default /etc/trainyard/tls/tls.key; }
{{- range $name, $_ := $routes }}
{{- $replicas := int (index $.Values $name).replicas }}

    upstream {{ $name }} {
        {{- if gt $replicas 1 }}
        {{- range $number := until $replicas }}
        server {{ $full }}-{{ $name }}-{{ $number }}.{{ $.Release.Namespace }}.svc:7443 max_fails=0;
        {{- end }}
        {{- else }}
        server {{ $full }}-{{ $name }}.{{ $.Release.Namespace }}.svc:7443 max_fails=0;
        {{- end }}
        keepalive 64;
        keepalive_requests 1000000000;
        keepalive_time 365d;
    }
{{- end }}

    server {
        listen 8443 ssl http2 so_keepalive=on;
        ssl_certificate $certificate;
        ssl_certificate_key $certificate_key;
        ssl_protocols TLSv1.2 TLSv1.3;
        # A service that is away is an UNAVAILABLE like any other.
        error_page 502 503 504 = @away;
        location @away {
            internal;
            default_type application/grpc;
            add_header grpc-status 14 always;
            add_header grpc-message "this service of the yard is not up" always;
            return 204;
        }
        location = /healthz { return 200 "ok\n"; }
{{- range $name, $services := $routes }}
{{- range $services }}
        location /trainyard.v1.{{ . }}/ {
            grpc_ssl_name {{ $full }}-{{ $name }}.{{ $.Release.Namespace }}.svc;
            grpc_pass grpcs://{{ $name }};
        }
{{- end }}
{{- end }}
    }
}
{{- end -}}
