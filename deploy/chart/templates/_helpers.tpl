{{- define "podmirror.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "podmirror.fullname" -}}
{{- $name := include "podmirror.name" . }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- .Values.fullnameOverride | default $full | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "podmirror.controller.fullname" -}}
{{- printf "%s-controller" (include "podmirror.fullname" . | trunc 52 | trimSuffix "-") }}
{{- end }}

{{- define "podmirror.apiserver.fullname" -}}
{{- printf "%s-apiserver" (include "podmirror.fullname" . | trunc 53 | trimSuffix "-") }}
{{- end }}

{{- define "podmirror.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "podmirror.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "podmirror.controller.serviceAccount" -}}
{{- $values := .Values.controller.serviceAccount }}
{{- $values.name | default (ternary (include "podmirror.controller.fullname" .) "default" $values.create) }}
{{- end }}

{{- define "podmirror.apiserver.serviceAccount" -}}
{{- $values := .Values.apiserver.serviceAccount }}
{{- $values.name | default (ternary (include "podmirror.apiserver.fullname" .) "default" $values.create) }}
{{- end }}

{{- /* Whether Kubernetes has ValidatingAdmissionPolicies, the node's name in the tokens of pods, and AppArmor as a field. */ -}}
{{- define "podmirror.has130" -}}
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}yes{{ end }}
{{- end }}

{{- /* Whether the controller runs: only where agents write MirrorNodes, which it aggregates. They do so only where a policy
restricts each to its own. */ -}}
{{- define "podmirror.controller" -}}
{{- if .Values.controller.enabled }}{{ include "podmirror.has130" . }}{{ end }}
{{- end }}

{{- /* The labels that select pods, and never change. The parameters are those of podmirror.metadata. */ -}}
{{- define "podmirror.selectorLabels" -}}
app.kubernetes.io/name: {{ include "podmirror.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- /* The labels of a pod: those that select it, those of all objects, and its own (`labels`). */ -}}
{{- define "podmirror.podLabels" -}}
{{- toYaml (merge (include "podmirror.selectorLabels" . | fromYaml) .labels .root.Values.commonLabels) }}
{{- end }}

{{- /* The metadata of an object: `root`, `name`, `component`; `scope` is "cluster" for an object without a namespace;
`namespace`, if it is not that of the release; `labels` and `annotations` of its own. */ -}}
{{- define "podmirror.metadata" -}}
{{- $root := .root }}
{{- $chart := printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- $ours := dict "app.kubernetes.io/version" $root.Chart.AppVersion "app.kubernetes.io/managed-by" $root.Release.Service "helm.sh/chart" $chart }}
metadata:
  name: {{ .name }}
  {{- if ne (.scope | default "") "cluster" }}
  namespace: {{ .namespace | default $root.Release.Namespace }}
  {{- end }}
  labels:
    {{- toYaml (merge (include "podmirror.selectorLabels" . | fromYaml) $ours (.labels | default dict) $root.Values.commonLabels) | nindent 4 }}
  {{- with merge (dict) (.annotations | default dict) $root.Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- /* A role or a cluster role, bound to the service account of a component. `role`: its name, if it is not that of the
binding. */ -}}
{{- define "podmirror.binding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
{{ include "podmirror.metadata" . }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .role | default .name }}
subjects:
  - kind: ServiceAccount
    name: {{ .serviceAccount }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}

{{- define "podmirror.image" -}}
{{- with .Values.image }}
{{- printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) }}{{ with .digest }}@{{ . }}{{ end }}
{{- end }}
{{- end }}

{{- /* An environment variable, unless its value is empty. A number of a values file is a float here. */ -}}
{{- define "podmirror.env" -}}
{{- $value := index . 1 }}
{{- if kindIs "float64" $value }}{{ $value = int64 $value }}{{ end }}
{{- $value = toString $value }}
{{- if not (has $value (list "" "<nil>")) }}
- name: PODMIRROR_{{ index . 0 }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- /* The environment variables of a container: `variables`, those of the chart; `extra`, those of the values. */ -}}
{{- define "podmirror.environment" -}}
{{- range .variables }}
{{- with include "podmirror.env" . | trim }}
{{ . }}
{{- end }}
{{- end }}
{{- with .extra }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The arguments of a container: the command, and those of the values. */ -}}
{{- define "podmirror.args" -}}
args: [{{ index . 0 }}{{ range index . 1 }}, {{ quote . }}{{ end }}]
{{- end }}

{{- /* The address in metrics.listen, where it is one that health is asked at. */ -}}
{{- define "podmirror.probe" -}}
{{- $address := regexReplaceAll ":[0-9]+$" .Values.metrics.listen "" | trimPrefix "[" | trimSuffix "]" }}
{{- get (dict "0.0.0.0" "127.0.0.1" "::" "::1") $address | default $address }}
{{- end }}

{{- define "podmirror.port" -}}
{{- regexFind "[0-9]+$" .Values.metrics.listen }}
{{- end }}

{{- /* The wildcard address of IPv4 does not accept the connections to a pod that has only an IPv6 address. */ -}}
{{- define "podmirror.wildcard" -}}
{{- $services := dict }}
{{- if .Values.checkCluster }}{{ $services = lookup "v1" "Service" "default" "kubernetes" }}{{ end }}
{{- ternary "[::]" "0.0.0.0" (contains ":" (dig "spec" "clusterIP" "" ($services | default dict))) }}
{{- end }}

{{- define "podmirror.controller.listen" -}}
{{- .Values.controller.listen | default (printf "%s:10706" (include "podmirror.wildcard" .)) }}
{{- end }}

{{- /* Not the port of the agents: with `hostNetwork`, the server has the node's network, too. */ -}}
{{- define "podmirror.apiserver.listen" -}}
{{- .Values.apiserver.listen | default (printf "%s:10710" (include "podmirror.wildcard" .)) }}
{{- end }}

{{- /* The same for the server and the agents: a reader that an agent ended earlier would begin again. */ -}}
{{- define "podmirror.apiserver.maxDuration" -}}
{{- .Values.apiserver.maxDuration | default .Values.ceilings.maxMirrorDuration | default "1h" }}
{{- end }}

{{- define "podmirror.apparmor.annotation" -}}
{{- with .Values.securityContext.appArmorProfile }}
{{- get (dict "Unconfined" "unconfined" "RuntimeDefault" "runtime/default") .type | default (printf "localhost/%s" .localhostProfile) }}
{{- end }}
{{- end }}

{{- /* NAME=DESTINATION,NAME=DESTINATION */ -}}
{{- define "podmirror.targets" -}}
{{- $all := deepCopy .Values.targets }}
{{- with .Values.recorder }}
{{- if .enabled }}{{ $_ := set $all .target "stream" }}{{ end }}
{{- end }}
{{- $targets := list }}
{{- range $name, $destination := $all }}
{{- $targets = append $targets (printf "%s=%s" $name $destination) }}
{{- end }}
{{- join "," $targets }}
{{- end }}

{{- /* The memory is that of the packets, of a copy of them for `tail --since`, and of the process. */ -}}
{{- define "podmirror.recorder.resources" -}}
{{- $ring := regexFind "^[0-9]+" .Values.recorder.ring | int }}
{{- $limits := dict "memory" (printf "%dMi" (add (mul 2 $ring) 48)) }}
{{- $requests := dict "memory" (printf "%dMi" (add $ring 32)) }}
{{- toYaml (merge (deepCopy .Values.recorder.resources) (dict "limits" $limits "requests" $requests)) }}
{{- end }}

{{- /* The affinity, with the image's architectures in each of its alternatives. */ -}}
{{- define "podmirror.affinity" -}}
{{- $architectures := .Values.image.architectures }}
{{- $affinity := deepCopy (.Values.affinity | default dict) }}
{{- $selected := get (.Values.nodeSelector | default dict) "kubernetes.io/arch" }}
{{- if and $selected $architectures (not (has $selected $architectures)) }}
{{- fail (printf "nodeSelector requires kubernetes.io/arch=%s, which is not in image.architectures: no node would get an agent; use --set 'image.architectures={%s}'" $selected $selected) }}
{{- end }}
{{- if $architectures }}
{{- $node := get $affinity "nodeAffinity" | default dict }}
{{- $required := get $node "requiredDuringSchedulingIgnoredDuringExecution" | default dict }}
{{- $expression := dict "key" "kubernetes.io/arch" "operator" "In" "values" $architectures }}
{{- $terms := list }}
{{- range get $required "nodeSelectorTerms" | default (list dict) }}
{{- $expressions := append (get . "matchExpressions" | default list) $expression }}
{{- $terms = append $terms (merge (dict "matchExpressions" $expressions) .) }}
{{- end }}
{{- $_ := set $required "nodeSelectorTerms" $terms }}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" $required }}
{{- $_ := set $affinity "nodeAffinity" $node }}
{{- end }}
{{- if $affinity }}{{ toYaml $affinity }}{{ end }}
{{- end }}

{{- /* The parts of a pod's spec about images and places: `root`; `values` with nodeSelector, affinity, tolerations and
priorityClassName. */ -}}
{{- define "podmirror.placement" -}}
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $where := dict "image" .root.Values.image "affinity" .values.affinity "nodeSelector" .values.nodeSelector }}
{{- with include "podmirror.affinity" (dict "Values" $where) }}
affinity:
  {{- . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "podmirror.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
