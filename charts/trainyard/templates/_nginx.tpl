{{- /* The gateway: gRPC is routed by the name of the service, within limits. docs/decisions/0038-limits-of-the-gateway.md */ -}}

{{- /* By service of the yard, the gRPC services it answers. Of each, the methods that take more than a request of 256 KiB:
       the size of the request in MiB, or `stream` for a stream of requests without a total limit. The services have the
       same sizes (servicekit.requests). */ -}}
{{- define "trainyard.routes" -}}
scheduler:
  SchedulerService: {Submit: 4, SubmitBatch: 16, Plan: 4}
  AttemptService: {RegisterPool: 16, ClaimAttempts: 1, ReportAttempt: 4, ReportAttempts: 16}
  SchedulerAdminService: {}
  YardService: {Attach: stream}
launcher:
  LauncherService: {Follow: 1, Shell: stream}
  AgentService: {Session: stream}
metrics:
  MetricsService: {OpenRun: 8, Append: stream, CloseAttempt: 4, SearchRuns: 1, ListSeries: 1, QuerySeries: 1, WatchSeries: 1}
  MetricsAdminService: {}
artifacts:
  ArtifactService: {FindMissing: 1, GetChunks: 1, PutChunks: stream, Commit: 16, CommitPart: 16}
  ArtifactAdminService: {}
{{- end -}}

{{- /* Ends a call with an error: (dict "status" 14 "message" "..." "reason" "..." "hint" "..."). The last two travel as an
       ErrorInfo (proto/trainyard/v1/common.proto), of fewer than 128 bytes each. */ -}}
{{- define "trainyard.grpcError" -}}
internal;
default_type application/grpc;
add_header grpc-status {{ .status }} always;
add_header grpc-message "{{ .message }}" always;
add_header trainyard-error-bin {{ printf "\n%c%s\x12%c%s" (len .reason) .reason (len .hint) .hint | b64enc }} always;
return 204;
{{- end -}}

{{- define "trainyard.nginx" -}}
{{- $full := include "trainyard.fullname" . -}}
{{- $routes := include "trainyard.routes" . | fromYaml -}}
{{- $limits := .Values.gateway.limits -}}
{{- $connections := int64 $limits.connections -}}
{{- $calls := int64 $limits.calls -}}
{{- /* A client takes three: its own, and both ends of the Unix socket. A call takes one, to a service. One worker may have all of them. */ -}}
{{- $sockets := add (mul 3 $connections) $calls 512 -}}
daemon off;
worker_processes 2;
pid nginx.pid;
error_log stderr warn;
load_module /usr/lib/nginx/modules/ngx_stream_module.so;
events { worker_connections {{ $sockets }}; }

# Connections are counted here, before the TLS handshake: in http, limit_conn counts calls, and an idle connection has none.
stream {
    limit_conn_zone $binary_remote_addr zone=address:10m;
    limit_conn_zone connections zone=connections:32k;
    limit_conn_log_level info;

    server {
        listen 8443 so_keepalive=on backlog=4096;
        limit_conn address {{ int64 $limits.connectionsPerAddress }};
        limit_conn connections {{ $connections }};
        proxy_pass unix:/tmp/http.sock;
        proxy_protocol on;
        proxy_timeout 365d;  # http closes idle connections
    }
}

http {
    access_log off;
    server_tokens off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;

    # For the TLS handshake, and for the headers of a call from the first byte to the last.
    client_header_timeout {{ $limits.headerTimeout }};
    # A token has at most 4 KiB.
    large_client_header_buffers 4 16k;
    # Between two parts of a request; and for a client that reads nothing from its socket. Streams override the first.
    client_body_timeout 1m;
    send_timeout 5m;
    client_max_body_size 262149;  # 256 KiB and gRPC's prefix
    # How much of a request this process holds in memory for a call, before and after it is routed.
    http2_body_preread_size 64k;
    client_body_buffer_size 64k;

    # A connection without a call is closed after the first. After so many calls a connection accepts no more; its streams stay open.
    keepalive_timeout {{ $limits.idleTimeout }};
    keepalive_requests 100000;
    keepalive_time 365d;
    http2_max_concurrent_streams {{ int64 $limits.callsPerConnection }};

    limit_conn_zone $binary_remote_addr zone=address_calls:10m;
    limit_conn_zone calls zone=calls:32k;
    limit_conn_status 429;
    limit_conn_log_level info;
    limit_req_zone $binary_remote_addr zone=address_rate:10m rate={{ int64 $limits.callRate }}r/s;
    limit_req_status 429;
    limit_req_log_level info;

    # Streams last as long as jobs and may be silent. A call ends at the caller's deadline, or with its connection.
    grpc_read_timeout 365d;
    grpc_send_timeout 365d;
    grpc_connect_timeout 5s;
    grpc_socket_keepalive on;
    grpc_buffer_size 512k;  # errors carry the problems of a document, up to some hundred kilobytes
    grpc_ssl_verify on;
    grpc_ssl_trusted_certificate /etc/trainyard/tls/ca.crt;
    grpc_ssl_server_name on;

    ssl_protocols TLSv1.2 TLSv1.3;
    # Given as variables, they are read at each handshake: a renewed certificate needs no restart.
    map $ssl_server_name $certificate { default /etc/trainyard/tls/tls.crt; }
    map $ssl_server_name $certificate_key { default /etc/trainyard/tls/tls.key; }
    ssl_certificate $certificate;
    ssl_certificate_key $certificate_key;
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
        keepalive_timeout 60s;  # the services close theirs after ten minutes
        keepalive_requests 1000000000;
        keepalive_time 365d;
    }
{{- end }}

    # Probes of the kubelet have a port of their own, so that traffic of users cannot make them fail.
    server {
        listen 8444 ssl;
        location = /healthz { return 200 "ok\n"; }
        location / { return 404; }
    }

    server {
        listen unix:/tmp/http.sock ssl http2 proxy_protocol backlog=4096;
        set_real_ip_from unix:;
        real_ip_header proxy_protocol;

        limit_conn address_calls {{ int64 $limits.callsPerAddress }};
        limit_conn calls {{ $calls }};
        limit_req zone=address_rate burst={{ int64 $limits.callBurst }} nodelay;

        error_page 408 = @too_slow;
        location @too_slow {
            {{- include "trainyard.grpcError" (dict "status" 4 "reason" "NoRequest" "message" "the request is incomplete, and no more of it arrived for a minute" "hint" "send the request together with the call; try again") | nindent 12 }}
        }
        error_page 413 = @too_large;
        location @too_large {
            {{- include "trainyard.grpcError" (dict "status" 3 "reason" "RequestTooLarge" "message" "the request is larger than this method accepts" "hint" "send fewer things in one request") | nindent 12 }}
        }
        error_page 429 = @too_many;
        location @too_many {
            {{- $most := printf "too many calls: the gateway accepts %d at once and %d per second from one address, and %d at once in all" (int64 $limits.callsPerAddress) (int64 $limits.callRate) $calls }}
            {{- include "trainyard.grpcError" (dict "status" 14 "reason" "TooManyCalls" "message" $most "hint" "try again; if it happens often, ask your administrator to raise gateway.limits of the chart") | nindent 12 }}
        }
{{- range $name, $services := $routes }}

        location @{{ $name }} {
            {{- include "trainyard.grpcError" (dict "status" 14 "reason" "ServiceUnavailable" "message" (printf "the yard's %s service is not reachable" $name) "hint" "it is starting or down: try again; if that does not help, ask your administrator to check its pod") | nindent 12 }}
        }
{{- range $service, $methods := $services }}
        location /trainyard.v1.{{ $service }}/ {
            {{- include "trainyard.pass" (dict "root" $ "name" $name) | nindent 12 }}
        }
{{- range $method, $size := $methods }}
        location = /trainyard.v1.{{ $service }}/{{ $method }} {
            {{- if eq (toString $size) "stream" }}
            client_max_body_size 0;
            client_body_timeout 365d;
            client_body_buffer_size {{ if eq $method "PutChunks" }}512k{{ else }}64k{{ end }};
            {{- else }}
            client_max_body_size {{ add 5 (mul 1048576 $size) }};
            {{- end }}
            {{- include "trainyard.pass" (dict "root" $ "name" $name) | nindent 12 }}
        }
{{- end }}
{{- end }}
{{- end }}
    }
}
{{- end -}}

{{- /* (dict "root" $ "name" "scheduler") */ -}}
{{- define "trainyard.pass" -}}
send_timeout 365d;
error_page 408 = @too_slow;
error_page 413 = @too_large;
error_page 429 = @too_many;
error_page 502 503 504 = @{{ .name }};
grpc_ssl_name {{ include "trainyard.host" . }};
grpc_pass grpcs://{{ .name }};
{{- end -}}
