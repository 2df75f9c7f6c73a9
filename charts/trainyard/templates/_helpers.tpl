{{- define "trainyard.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trainyard.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "trainyard.labels" -}}
{{ include "trainyard.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* A value as text: helm reads every number as a fraction, and writes 10000000 as 1e+07. */ -}}
{{- define "trainyard.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) (lt . 1e15) (gt . -1e15) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{- /* An image's reference, in quotes: (dict "root" $ "image" .Values.image). With tag and digest it has both: `skaffold dev`
       finds the containers of an image it pushed by exactly that reference. */ -}}
{{- define "trainyard.image" -}}
{{- $reference := .image.repository -}}
{{- if or .image.tag (not .image.digest) -}}
{{- $reference = printf "%s:%s" $reference (include "trainyard.text" (default .root.Chart.AppVersion .image.tag)) -}}
{{- end -}}
{{- if .image.digest -}}
{{- $reference = printf "%s@%s" $reference .image.digest -}}
{{- end -}}
{{- quote $reference -}}
{{- end -}}

{{- define "trainyard.jobsNamespace" -}}
{{ default (printf "%s-jobs" .Release.Namespace) .Values.jobs.namespace }}
{{- end -}}

{{- /* Of the launcher and the operator: what they make and take carries it. The ClusterRoles are named by it, too: of two installations that would
       have the same one (b-c in namespace a, c in namespace a-b) helm refuses the second. */ -}}
{{- define "trainyard.identity" -}}
{{ .Release.Namespace }}-{{ include "trainyard.fullname" . }}
{{- end -}}

{{- /* The same as a label's value, as servicekit.ownership writes it. */ -}}
{{- define "trainyard.identityLabel" -}}
{{- $identity := include "trainyard.identity" . -}}
{{- if le (len $identity) 63 -}}
{{ $identity }}
{{- else -}}
{{ trunc 50 $identity }}-{{ sha256sum $identity | trunc 12 }}
{{- end -}}
{{- end -}}

{{- /* Secrets, claims and accounts of the installation, which no job may name; with commas between them. */ -}}
{{- define "trainyard.reservedNames" -}}
{{- $full := include "trainyard.fullname" . -}}
{{- $names := list (include "trainyard.tokenSecret" .) (include "trainyard.scrapeTokenSecret" .) (include "trainyard.operatorTokenSecret" .) (include "trainyard.attemptKeySecret" .) (include "trainyard.redisSecret" .) (include "trainyard.tlsSecret" .) (printf "%s-authority" $full) -}}
{{- $names = concat $names (list .Values.database.existingSecret .Values.database.caSecret .Values.redis.caSecret .Values.s3.existingSecret .Values.s3.caSecret) -}}
{{- $names = append $names (printf "sh.helm.release.v1.%s.*" .Release.Name) -}}
{{- range list "scheduler" "launcher" "metrics" "artifacts" "operator" "gateway" "redis" "setup" "publish" "remove" "namespace" -}}
{{- $names = concat $names (list (printf "%s-%s" $full .) (printf "home-%s-%s-*" $full .)) -}}
{{- end -}}
{{- $names | compact | uniq | join "," -}}
{{- end -}}

{{- define "trainyard.jobsServiceAccount" -}}
{{- if .Values.jobs.serviceAccount.name -}}
{{ .Values.jobs.serviceAccount.name }}
{{- else if .Values.jobs.serviceAccount.create -}}
{{ include "trainyard.fullname" . }}-job
{{- else -}}
default
{{- end -}}
{{- end -}}

{{- define "trainyard.tokenSecret" -}}
{{ default (printf "%s-token" (include "trainyard.fullname" .)) .Values.token.existingSecret }}
{{- end -}}

{{- define "trainyard.scrapeTokenSecret" -}}
{{ default (printf "%s-scrape-token" (include "trainyard.fullname" .)) .Values.scrapeToken.existingSecret }}
{{- end -}}

{{- define "trainyard.operatorTokenSecret" -}}
{{ default (printf "%s-operator-token" (include "trainyard.fullname" .)) .Values.operatorToken.existingSecret }}
{{- end -}}

{{- define "trainyard.attemptKeySecret" -}}
{{ default (printf "%s-attempt-key" (include "trainyard.fullname" .)) .Values.attemptKey.existingSecret }}
{{- end -}}

{{- define "trainyard.redisSecret" -}}
{{ default (printf "%s-redis" (include "trainyard.fullname" .)) .Values.redis.existingSecret }}
{{- end -}}

{{- define "trainyard.tlsSecret" -}}
{{ default (printf "%s-tls" (include "trainyard.fullname" .)) .Values.tls.existingSecret }}
{{- end -}}

{{- define "trainyard.authorityConfigMap" -}}
{{ include "trainyard.fullname" . }}-ca
{{- end -}}

{{- /* Host of a service within the cluster: (dict "root" $ "name" "gateway") */ -}}
{{- define "trainyard.host" -}}
{{ include "trainyard.fullname" .root }}-{{ .name }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{- define "trainyard.endpoint" -}}
{{ include "trainyard.host" (dict "root" . "name" "gateway") }}:{{ .Values.gateway.service.port }}
{{- end -}}

{{- /* Every name that the services' certificate has to hold, one a line. */ -}}
{{- define "trainyard.certificateHosts" -}}
{{- $full := include "trainyard.fullname" . -}}
{{- range list "gateway" "scheduler" "launcher" "metrics" "artifacts" "operator" "redis" }}
{{ $full }}-{{ . }}.{{ $.Release.Namespace }}.svc
{{- end }}
{{ $full }}-gateway
{{ $full }}-gateway.{{ .Release.Namespace }}
{{ $full }}-gateway.{{ .Release.Namespace }}.svc.cluster.local
localhost
127.0.0.1
{{- range .Values.tls.extraHosts }}
{{ . }}
{{- end }}
{{- end -}}

{{- /* Security of a pod: nobody in particular, who owns the volumes of the pod. */ -}}
{{- define "trainyard.podSecurityContext" -}}
{{- $ours := dict "runAsNonRoot" true "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532 "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- toYaml (merge (deepCopy (.Values.podSecurityContext | default dict)) $ours) -}}
{{- end -}}

{{- define "trainyard.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ not .Values.development }}
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* Where a pod of a service may run: (dict "root" $ "values" .Values.scheduler "component" "scheduler") */ -}}
{{- define "trainyard.placement" -}}
{{- if not .values.affinity }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "trainyard.selector" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
{{- end }}
{{- include "trainyard.scheduling" . }}
{{- end -}}

{{- /* Where any pod may run, how important it is and how its image is pulled: (dict "root" $ "values" .Values.setup) */ -}}
{{- define "trainyard.scheduling" -}}
{{- with .values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The command of a service; in development it starts again in its container when it is ended. */ -}}
{{- define "trainyard.command" -}}
{{- if .root.Values.development -}}
["/bin/sh", "-c", "trap 'kill $child; wait $child; exit' TERM; while true; do python -m trainyard_{{ .name }} & child=$!; echo $child > /tmp/service.pid; wait $child; sleep 1; done"]
{{- else -}}
["python", "-m", "trainyard_{{ .name }}"]
{{- end -}}
{{- end -}}

{{- define "trainyard.extraEnvironment" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ include "trainyard.text" $value | quote }}
{{- end }}
{{- end -}}

{{- /* Peers of a rule for egress: every pod, and every address but the given CIDRs. A network plugin may match pods by
       selector alone, so that an ipBlock does not stand for them. */ -}}
{{- define "trainyard.unblocked" -}}
{{- $six := list -}}
{{- $four := list -}}
{{- range . -}}
{{- if contains ":" . -}}
{{- $six = append $six . -}}
{{- else -}}
{{- $four = append $four . -}}
{{- end -}}
{{- end -}}
- namespaceSelector: {}
- ipBlock:
    cidr: 0.0.0.0/0
    {{- with $four }}
    except: {{ toJson . }}
    {{- end }}
- ipBlock:
    cidr: ::/0
    {{- with $six }}
    except: {{ toJson . }}
    {{- end }}
{{- end -}}

{{- /* An expression for the names of a list in which "*" stands for any characters, as text in CEL. */ -}}
{{- define "trainyard.allowedPattern" -}}
{{- $patterns := list -}}
{{- range . -}}
{{- $patterns = append $patterns (. | replace "." "\\." | replace "*" ".*") -}}
{{- end -}}
r'^({{ join "|" $patterns }})$'
{{- end -}}
