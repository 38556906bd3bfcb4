{{- define "podmirror.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "podmirror.fullname" -}}
{{- $name := include "podmirror.name" . }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- .Values.fullnameOverride | default $full | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "podmirror.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "podmirror.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "podmirror.selectorLabels" -}}
app.kubernetes.io/name: {{ include "podmirror.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: agent
{{- end }}

{{- define "podmirror.labels" -}}
{{ include "podmirror.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* An environment variable, unless its value is empty. A number of a values file is a float here. */ -}}
{{- define "podmirror.env" -}}
{{- $value := index . 1 }}
{{- if kindIs "float64" $value }}{{ $value = int64 $value }}{{ end }}
{{- $value = toString $value }}
{{- if not (has $value (list "" "<nil>")) }}
- name: {{ index . 0 }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- /* The address in --listen, where it is one that health is asked at. */ -}}
{{- define "podmirror.probe" -}}
{{- $address := regexReplaceAll ":[0-9]+$" .Values.listen "" | trimPrefix "[" | trimSuffix "]" }}
{{- get (dict "0.0.0.0" "127.0.0.1" "::" "::1") $address | default $address }}
{{- end }}

{{- /* Whether Kubernetes has AppArmor as a field, and not as an annotation. */ -}}
{{- define "podmirror.apparmor.field" -}}
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}yes{{ end }}
{{- end }}

{{- define "podmirror.apparmor.annotation" -}}
{{- with .Values.securityContext.appArmorProfile }}
{{- get (dict "Unconfined" "unconfined" "RuntimeDefault" "runtime/default") .type | default (printf "localhost/%s" .localhostProfile) }}
{{- end }}
{{- end }}

{{- define "podmirror.port" -}}
{{- regexFind "[0-9]+$" .Values.listen }}
{{- end }}
