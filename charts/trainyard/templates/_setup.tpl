{{- /* The hooks that make and remove secrets. */ -}}
{{- define "trainyard.setupEnvironment" -}}
{{- $full := include "trainyard.fullname" . -}}
- {name: TRAINYARD_SETUP_RELEASE, value: {{ .Release.Name | quote }}}
- {name: TRAINYARD_SETUP_CHART_VERSION, value: {{ .Chart.AppVersion | quote }}}
- {name: TRAINYARD_SETUP_NAMESPACE, value: {{ .Release.Namespace | quote }}}
- {name: TRAINYARD_SETUP_JOBS_NAMESPACE, value: {{ include "trainyard.jobsNamespace" . | quote }}}
- {name: TRAINYARD_SETUP_POD_SECURITY, value: {{ .Values.jobs.podSecurity }}}
- {name: TRAINYARD_SETUP_POOL, value: {{ .Values.jobs.pool | quote }}}
- {name: TRAINYARD_SETUP_LAUNCHER, value: {{ include "trainyard.identity" . }}}
- {name: TRAINYARD_SETUP_ENDPOINT, value: {{ include "trainyard.endpoint" . }}}
- {name: TRAINYARD_SETUP_OPERATOR, value: {{ .Values.operator.enabled | quote }}}
- {name: TRAINYARD_SETUP_OPERATOR_NAMESPACES, value: {{ join "," (.Values.operator.namespaces | default list) | quote }}}
- {name: TRAINYARD_SETUP_AUTHORITY_CONFIG_MAP, value: {{ include "trainyard.authorityConfigMap" . }}}
{{- if not .Values.token.existingSecret }}
- {name: TRAINYARD_SETUP_TOKEN_SECRET, value: {{ include "trainyard.tokenSecret" . | quote }}}
{{- end }}
{{- if not .Values.scrapeToken.existingSecret }}
- {name: TRAINYARD_SETUP_SCRAPE_TOKEN_SECRET, value: {{ include "trainyard.scrapeTokenSecret" . | quote }}}
{{- end }}
{{- if and .Values.operator.enabled (not .Values.operatorToken.existingSecret) }}
- {name: TRAINYARD_SETUP_OPERATOR_TOKEN_SECRET, value: {{ include "trainyard.operatorTokenSecret" . | quote }}}
{{- end }}
{{- if not .Values.attemptKey.existingSecret }}
- {name: TRAINYARD_SETUP_ATTEMPT_KEY_SECRET, value: {{ include "trainyard.attemptKeySecret" . | quote }}}
{{- end }}
{{- if and .Values.redis.enabled (not .Values.redis.existingSecret) }}
- {name: TRAINYARD_SETUP_REDIS_SECRET, value: {{ include "trainyard.redisSecret" . | quote }}}
- {name: TRAINYARD_SETUP_REDIS_HOST, value: {{ include "trainyard.host" (dict "root" . "name" "redis") }}}
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: TRAINYARD_SETUP_GIVEN_CERTIFICATE_SECRET, value: {{ .Values.tls.existingSecret | quote }}}
{{- else if not .Values.tls.certManager.enabled }}
- {name: TRAINYARD_SETUP_CERTIFICATE_SECRET, value: {{ include "trainyard.tlsSecret" . | quote }}}
- {name: TRAINYARD_SETUP_AUTHORITY_SECRET, value: {{ $full }}-authority}
- name: TRAINYARD_SETUP_HOSTS
  value: {{ include "trainyard.certificateHosts" . | trim | replace "\n" "," | quote }}
- {name: TRAINYARD_SETUP_CERTIFICATE_DAYS, value: {{ .Values.tls.certificateDays | quote }}}
{{- end }}
{{- end -}}

{{- /* Names of the secrets that the hooks may read and change. */ -}}
{{- define "trainyard.setupSecrets" -}}
{{- $full := include "trainyard.fullname" . -}}
[{{ $full }}-token, {{ $full }}-scrape-token, {{ $full }}-operator-token, {{ $full }}-attempt-key, {{ $full }}-redis, {{ $full }}-authority, {{ include "trainyard.tlsSecret" . | quote }}]
{{- end -}}

{{- /* What has failed is kept for its logs until the next try, or until the release is removed. */ -}}
{{- define "trainyard.setupHook" -}}
helm.sh/hook: {{ .hooks }}
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{- /* Account and rights of a hook, and the Job that runs it: (dict "root" $ "name" "setup" "hooks" "pre-install,pre-upgrade"
       "arguments" "install" "environment" list) */ -}}
{{- define "trainyard.setupJob" -}}
{{- $root := .root -}}
{{- $name := printf "%s-%s" (include "trainyard.fullname" $root) .name -}}
{{- $secrets := include "trainyard.setupSecrets" $root -}}
{{- $hooks := .hooks -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  labels: {{- include "trainyard.labels" $root | nindent 4 }}
  annotations: {{- include "trainyard.setupHook" (dict "hooks" $hooks "weight" -10) | nindent 4 }}
automountServiceAccountToken: false
{{- range $namespace := list $root.Release.Namespace (include "trainyard.jobsNamespace" $root) | uniq }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ $namespace | quote }}
  labels: {{- include "trainyard.labels" $root | nindent 4 }}
  annotations: {{- include "trainyard.setupHook" (dict "hooks" $hooks "weight" -10) | nindent 4 }}
rules:
  {{- if eq $namespace $root.Release.Namespace }}
  - apiGroups: [""]
    resources: [secrets]
    verbs: [create]  # names are not known to the authorizer when something is made
  - apiGroups: [""]
    resources: [secrets]
    resourceNames: {{ $secrets }}
    verbs: [get, patch, delete]
  - apiGroups: [""]
    resources: [persistentvolumeclaims]
    verbs: [list]
  {{- end }}
  - apiGroups: [""]
    resources: [configmaps]
    verbs: [create]
  - apiGroups: [""]
    resources: [configmaps]
    resourceNames: [{{ include "trainyard.authorityConfigMap" $root }}]
    verbs: [get, patch, delete]
  {{- if contains "delete" $hooks }}
  - apiGroups: [batch]
    resources: [jobs]
    verbs: [list, delete]
  - apiGroups: [""]
    resources: [services]
    verbs: [delete]
  {{- else if eq $namespace $root.Release.Namespace }}
  - apiGroups: [batch]
    resources: [jobs]
    verbs: [list]  # jobs of a version that ran them here
  {{- end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ $namespace | quote }}
  labels: {{- include "trainyard.labels" $root | nindent 4 }}
  annotations: {{- include "trainyard.setupHook" (dict "hooks" $hooks "weight" -10) | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ $root.Release.Namespace | quote }}}
{{- end }}
---
{{ include "trainyard.setupRun" (merge (dict "weight" 0) .) }}
{{- end -}}

{{- /* The Job of a hook, whose account is there. */ -}}
{{- define "trainyard.setupRun" -}}
{{- $root := .root -}}
{{- $name := printf "%s-%s" (include "trainyard.fullname" $root) .name -}}
{{- $hooks := .hooks -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ $name }}
  labels: {{- include "trainyard.labels" $root | nindent 4 }}
  annotations:
    {{- include "trainyard.setupHook" (dict "hooks" $hooks "weight" .weight) | nindent 4 }}
    helm.sh/hook-output-log-policy: {{ if contains "delete" $hooks }}hook-succeeded,{{ end }}hook-failed
spec:
  backoffLimit: 3
  activeDeadlineSeconds: 300
  template:
    metadata:
      labels:
        {{- include "trainyard.labels" $root | nindent 8 }}
        app.kubernetes.io/component: setup
    spec:
      restartPolicy: Never
      serviceAccountName: {{ $name }}
      automountServiceAccountToken: true
      enableServiceLinks: false
      securityContext: {{- include "trainyard.podSecurityContext" $root | nindent 8 }}
      {{- include "trainyard.scheduling" (dict "root" $root "values" $root.Values.setup) | nindent 6 }}
      containers:
        - name: setup
          image: {{ include "trainyard.image" (dict "root" $root "image" $root.Values.image) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [python, -m, trainyard_setup, {{ .argument }}]
          env:
            {{- include "trainyard.setupEnvironment" $root | nindent 12 }}
            {{- range $variable, $value := .environment }}
            - {name: {{ $variable }}, value: {{ $value | quote }}}
            {{- end }}
          resources: {{ toYaml $root.Values.setup.resources | nindent 12 }}
          securityContext: {{- include "trainyard.containerSecurityContext" $root | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            {{- if .definitions }}
            - {name: definitions, mountPath: /etc/trainyard/definitions, readOnly: true}
            {{- end }}
      volumes:
        - {name: tmp, emptyDir: {}}
        {{- if .definitions }}
        - {name: definitions, configMap: {name: {{ $name }}-definitions}}
        {{- end }}
{{- end -}}
