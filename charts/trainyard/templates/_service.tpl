{{- /* The pod of a service: (dict "root" $ "name" "metrics"). */ -}}
{{- define "trainyard.servicePod" -}}
{{- $root := .root -}}
{{- $name := .name -}}
{{- $values := index $root.Values $name -}}
{{- $full := include "trainyard.fullname" $root -}}
metadata:
  labels:
    {{- include "trainyard.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $name }}
  {{- $annotations := deepCopy ($values.podAnnotations | default dict) }}
  {{- if and $root.Values.jobs.podTemplate (eq $name "launcher") }}
  {{- $_ := set $annotations "trainyard.dev/jobs" (toYaml $root.Values.jobs.podTemplate | sha256sum) }}
  {{- end }}
  {{- with $annotations }}
  annotations: {{ toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ $full }}-{{ $name }}
  automountServiceAccountToken: {{ has $name (list "launcher" "operator") }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: 60
  securityContext: {{- include "trainyard.podSecurityContext" $root | nindent 4 }}
  {{- include "trainyard.placement" (dict "root" $root "values" $values "component" $name) | nindent 2 }}
  containers:
    - name: {{ $name }}
      image: {{ include "trainyard.image" (dict "root" $root "image" $root.Values.image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: {{ include "trainyard.command" (dict "root" $root "name" $name) }}
      env: {{- include "trainyard.environment" (dict "root" $root "name" $name) | nindent 8 }}
      ports:
        - {name: grpc, containerPort: 7443}
        - {name: metrics, containerPort: 9443}
      # The same state as gRPC's health service: the kubelet's own gRPC probe cannot do TLS.
      startupProbe:
        httpGet: {path: /healthz, port: metrics, scheme: HTTPS}
        periodSeconds: 2
        failureThreshold: 90
      livenessProbe:
        httpGet: {path: /healthz, port: metrics, scheme: HTTPS}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      readinessProbe:
        # Of several, those that stand by are well, too.
        httpGet: {path: {{ if gt (int $values.replicas) 1 }}/healthz{{ else }}/readyz{{ end }}, port: metrics, scheme: HTTPS}
        periodSeconds: 2
        timeoutSeconds: 5
      resources: {{ toYaml $values.resources | nindent 8 }}
      securityContext: {{- include "trainyard.containerSecurityContext" $root | nindent 8 }}
      volumeMounts:
        - {name: home, mountPath: /var/lib/trainyard}
        - {name: tmp, mountPath: /tmp}
        - {name: tls, mountPath: /etc/trainyard/tls, readOnly: true}
        - {name: token, mountPath: /etc/trainyard/token, readOnly: true}
        {{- if and $root.Values.operator.enabled (has $name (list "scheduler" "launcher" "metrics")) }}
        - {name: operator-token, mountPath: /etc/trainyard/operator, readOnly: true}
        {{- end }}
        - {name: scrape-token, mountPath: /etc/trainyard/scrape, readOnly: true}
        - {name: attempt-key, mountPath: /etc/trainyard/attempt, readOnly: true}
        {{- if and $root.Values.jobs.podTemplate (eq $name "launcher") }}
        - {name: jobs, mountPath: /etc/trainyard/jobs, readOnly: true}
        {{- end }}
        {{- range $volume, $secret := include "trainyard.roots" (dict "root" $root "name" $name) | fromYaml }}
        - {name: {{ $volume }}-ca, mountPath: /etc/trainyard/{{ $volume }}, readOnly: true}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: tls, secret: {secretName: {{ include "trainyard.tlsSecret" $root | quote }}, defaultMode: 0440}}
    # The operator does not hold the users' token: it shows one of its own.
    - {name: token, secret: {secretName: {{ include (ternary "trainyard.operatorTokenSecret" "trainyard.tokenSecret" (eq $name "operator")) $root | quote }}, defaultMode: 0440}}
    {{- if and $root.Values.operator.enabled (has $name (list "scheduler" "launcher" "metrics")) }}
    - {name: operator-token, secret: {secretName: {{ include "trainyard.operatorTokenSecret" $root | quote }}, items: [{key: token, path: token}], defaultMode: 0440}}
    {{- end }}
    - {name: scrape-token, secret: {secretName: {{ include "trainyard.scrapeTokenSecret" $root | quote }}, items: [{key: token, path: token}], defaultMode: 0440}}
    - name: attempt-key
      secret:
        secretName: {{ include "trainyard.attemptKeySecret" $root | quote }}
        defaultMode: 0440
        items:
          {{- if eq $name "launcher" }}
          - {key: attempt.key, path: attempt.key}
          {{- end }}
          - {key: attempt.pub, path: attempt.pub}
    {{- range $volume, $secret := include "trainyard.roots" (dict "root" $root "name" $name) | fromYaml }}
    - {name: {{ $volume }}-ca, secret: {secretName: {{ $secret | quote }}, items: [{key: ca.crt, path: ca.crt}]}}
    {{- end }}
    {{- if and $root.Values.jobs.podTemplate (eq $name "launcher") }}
    - {name: jobs, configMap: {name: {{ $full }}-jobs}}
    {{- end }}
    {{- if or (not (include "trainyard.keepsFiles" (dict "root" $root "name" $name))) (eq $root.Values.storage.kind "emptyDir") }}
    - {name: home, emptyDir: {}}
    {{- else if eq $root.Values.storage.kind "hostPath" }}
    - name: home
      hostPath: {path: {{ printf "%s/%s" $root.Values.storage.hostPath $name | quote }}, type: Directory}
    {{- end }}
{{- end -}}

{{- /* Whether a service keeps something on its volume: "true", or nothing. */ -}}
{{- define "trainyard.keepsFiles" -}}
{{- $sqlite := eq .root.Values.database.kind "sqlite" -}}
{{- if or (eq .name "metrics") (and (eq .name "scheduler") $sqlite) (and (eq .name "artifacts") (or $sqlite (not .root.Values.s3.bucket))) -}}
true
{{- end -}}
{{- end -}}

{{- /* Root certificates of servers outside of this installation: name of the volume to secret. */ -}}
{{- define "trainyard.roots" -}}
{{- $values := .root.Values -}}
{{- if and $values.database.caSecret (has .name (list "scheduler" "metrics" "artifacts")) }}
postgresql: {{ $values.database.caSecret | quote }}
{{- end }}
{{- if and $values.redis.caSecret (has .name (list "scheduler" "launcher")) }}
redis: {{ $values.redis.caSecret | quote }}
{{- end }}
{{- if and $values.s3.caSecret (eq .name "artifacts") }}
s3: {{ $values.s3.caSecret | quote }}
{{- end }}
{{- end -}}
