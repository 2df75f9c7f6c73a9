{{- /* What each service is told beside what all are: (dict "root" $ "name" "launcher"). Addresses with passwords come
       from secrets. */ -}}
{{- define "trainyard.environment" -}}
{{- $values := .root.Values -}}
- name: TRAINYARD_SERVICE_HOME
  value: /var/lib/trainyard
- name: TRAINYARD_SERVICE_LISTEN
  value: 0.0.0.0:7443
- name: TRAINYARD_SERVICE_METRICS_LISTEN
  value: 0.0.0.0:9443
- name: TRAINYARD_SERVICE_TLS_CERT
  value: /etc/trainyard/tls/tls.crt
- name: TRAINYARD_SERVICE_TLS_KEY
  value: /etc/trainyard/tls/tls.key
- name: TRAINYARD_SERVICE_TOKEN_FILE
  value: /etc/trainyard/token/token
{{- if and $values.operator.enabled (has .name (list "scheduler" "launcher" "metrics")) }}
- name: TRAINYARD_SERVICE_OPERATOR_TOKEN_FILE
  value: /etc/trainyard/operator/token
{{- end }}
- name: TRAINYARD_SERVICE_METRICS_TOKEN_FILE
  value: /etc/trainyard/scrape/token
- name: TRAINYARD_SERVICE_ATTEMPT_KEY
  value: /etc/trainyard/attempt/{{ if eq .name "launcher" }}attempt.key{{ else }}attempt.pub{{ end }}
{{- if and (eq $values.database.kind "postgresql") (has .name (list "scheduler" "metrics" "artifacts")) }}
- name: TRAINYARD_SERVICE_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ $values.database.existingSecret | quote }}, key: {{ .name }}}}
{{- end }}
{{- if has .name (list "scheduler" "launcher") }}
- name: TRAINYARD_SERVICE_BROKER_URL
  valueFrom: {secretKeyRef: {name: {{ include "trainyard.redisSecret" .root | quote }}, key: url}}
{{- end }}
{{- if has .name (list "launcher" "operator") }}
- name: TRAINYARD_SERVICE_ENDPOINT
  value: {{ include "trainyard.endpoint" .root }}
- name: TRAINYARD_SERVICE_CA_FILE
  value: /etc/trainyard/tls/ca.crt
{{- end }}
{{- if eq .name "launcher" }}
{{ include "trainyard.launcherEnvironment" .root }}
{{- end }}
{{- if eq .name "operator" }}
- name: TRAINYARD_OPERATOR_IDENTITY
  value: {{ include "trainyard.identity" .root }}
- name: TRAINYARD_OPERATOR_SECRETS_CHECKED
  value: {{ $values.operator.admissionPolicy.enabled | quote }}
{{- end }}
{{- if and (eq .name "operator") $values.operator.namespaces }}
- name: TRAINYARD_OPERATOR_NAMESPACES
  value: {{ join "," $values.operator.namespaces | quote }}
{{- end }}
{{- if eq .name "artifacts" }}
{{- include "trainyard.s3Environment" .root }}
{{- end }}
{{- include "trainyard.extraEnvironment" (index $values .name).env }}
{{- end -}}

{{- define "trainyard.launcherEnvironment" -}}
- name: TRAINYARD_LAUNCHER_POOL
  value: {{ .Values.jobs.pool | quote }}
- name: TRAINYARD_LAUNCHER_IDENTITY
  value: {{ include "trainyard.identity" . }}
- name: TRAINYARD_LAUNCHER_BACKEND
  value: kubernetes
- name: TRAINYARD_LAUNCHER_KUBERNETES_NAMESPACE
  value: {{ include "trainyard.jobsNamespace" . | quote }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_AGENT_IMAGE
  value: {{ include "trainyard.image" (dict "root" . "image" .Values.agentImage) }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_WORKER_IMAGE
  value: {{ include "trainyard.image" (dict "root" . "image" .Values.workerImage) }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_PULL_POLICY
  value: {{ .Values.agentImage.pullPolicy }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_SERVICE_ACCOUNT
  value: {{ include "trainyard.jobsServiceAccount" . | quote }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_RESERVED_NAMES
  value: {{ include "trainyard.reservedNames" . | quote }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_ALLOWED_PRIORITY_CLASSES
  value: {{ join "," .Values.jobs.allowed.priorityClasses | quote }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_ALLOWED_TOLERATIONS
  value: {{ join "," .Values.jobs.allowed.tolerations | quote }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_NETWORK_POLICIES
  value: {{ .Values.networkPolicies.enabled | quote }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_KEEP_FAILED_S
  value: {{ int64 .Values.jobs.keepFailedSeconds | quote }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_HOST_PATHS
  value: {{ .Values.jobs.hostPaths | quote }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_AGENT_VOLUME
  value: {{ .Values.jobs.agentVolume }}
{{- with .Values.jobs.machineKinds }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_MACHINE_KINDS
  value: {{ toJson . | quote }}
{{- end }}
{{- if .Values.jobs.podTemplate }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_POD_TEMPLATE
  value: /etc/trainyard/jobs/pod.yaml
{{- end }}
- name: TRAINYARD_LAUNCHER_KUBERNETES_CA_CONFIG_MAP
  value: {{ include "trainyard.authorityConfigMap" . }}
{{- end -}}

{{- define "trainyard.s3Environment" -}}
{{- with .Values.s3 }}
{{- if .bucket }}
- name: TRAINYARD_ARTIFACTS_S3_BUCKET
  value: {{ .bucket | quote }}
{{- with .endpoint }}
- name: TRAINYARD_ARTIFACTS_S3_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .region }}
- name: TRAINYARD_ARTIFACTS_S3_REGION
  value: {{ . | quote }}
{{- end }}
{{- with .existingSecret }}
- name: TRAINYARD_ARTIFACTS_S3_ACCESS_KEY_ID
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: access-key-id}}
- name: TRAINYARD_ARTIFACTS_S3_SECRET_ACCESS_KEY
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: secret-access-key}}
{{- end }}
{{- if .caSecret }}
- name: SSL_CERT_FILE
  value: /etc/trainyard/s3/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
