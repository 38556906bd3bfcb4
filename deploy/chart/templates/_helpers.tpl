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
{{ include "podmirror.commonLabels" . }}
{{- end }}

{{- define "podmirror.commonLabels" -}}
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

{{- /* Whether agents write MirrorNodes: only where a policy restricts each to its own. Kubernetes has the policies, and the
node's name in the tokens of pods, since 1.30. The policies do not depend on who makes the roles. */ -}}
{{- define "podmirror.mirrorNodes" -}}
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}yes{{ end }}
{{- end }}

{{- /* Refuses values that the agent would refuse on each node, and that the schema cannot check. */ -}}
{{- define "podmirror.check" -}}
{{- with .Values.sample }}
{{- $parts := splitList "/" (trimSuffix "%" .) }}
{{- $whole := ternary 100.0 (last $parts | trim | float64) (hasSuffix "%" .) }}
{{- $part := first $parts | trim | float64 }}
{{- if or (le $part 0.0) (gt $part $whole) }}
{{- fail (printf "sample: %q is not a share between 0 and 1; use for example 1/100 or 10%%" .) }}
{{- end }}
{{- end }}
{{- $default := .Values.mirrorTarget }}
{{- if not (or (eq $default "default") (hasKey .Values.targets $default) (and .Values.recorder.enabled (eq $default .Values.recorder.target))) }}
{{- fail (printf "mirrorTarget: target %q does not exist; use one of targets, or \"default\", which is mirrorIface" $default) }}
{{- end }}
{{- if eq .Values.listen .Values.streamListen }}
{{- fail (printf "listen and streamListen are both %s: use different ports" .Values.listen) }}
{{- end }}
{{- with .Values.filter }}
{{- $known := $.Files.Get "files/filter-words.txt" | trim | splitList "\n" }}
{{- $addresses := "\\b0x[0-9a-fA-F]+|\\b[0-9a-fA-F]{2}([-:.][0-9a-fA-F]{2}){5}\\b|\\b[0-9a-fA-F]{4}([.][0-9a-fA-F]{4}){2}\\b|\\b[0-9a-fA-F]{12}\\b|(\\b[0-9a-fA-F]+)?:[0-9a-fA-F:.]*" }}
{{- $rest := regexReplaceAll $addresses . " " }}
{{- range regexFindAll "[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?" $rest -1 }}
{{- if not (has . $known) }}
{{- fail (printf "filter: unknown word %q; check the filter with `mirror-agent filter check`" .) }}
{{- end }}
{{- end }}
{{- range $open, $close := dict "(" ")" "[" "]" }}
{{- if ne (len (splitList $open $rest)) (len (splitList $close $rest)) }}
{{- fail (printf "filter: a %q or a %q is missing in %q" $open $close $.Values.filter) }}
{{- end }}
{{- end }}
{{- if regexMatch "(^|\\s)(and|or|not|src|dst|host|net|port|portrange|proto|protochain)\\s*$|[!&|<>=]\\s*$" . }}
{{- fail (printf "filter: %q is incomplete" .) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Refuses to replace the DaemonSet of the release by one of another name: its agents would clean up each node, and the
new ones would start all mirrors again. Without access to a cluster, as in `helm template`, nothing is checked. */ -}}
{{- define "podmirror.keepName" -}}
{{- $name := include "podmirror.fullname" . }}
{{- range (lookup "apps/v1" "DaemonSet" .Release.Namespace "").items }}
{{- $labels := .metadata.labels | default dict }}
{{- $isAgents := eq (get $labels "app.kubernetes.io/component") "agent" }}
{{- $isOurs := eq (get $labels "app.kubernetes.io/instance") $.Release.Name }}
{{- if and $isAgents $isOurs (hasPrefix (printf "%s-" $.Chart.Name) (get $labels "helm.sh/chart")) (ne .metadata.name $name) }}
{{- fail (printf "the DaemonSet of this release is %s, and these values call it %s: all mirrors would be stopped and started again. Keep it with --set fullnameOverride=%s, or uninstall the release first" .metadata.name $name .metadata.name) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The condition of a policy: the request is an agent's. And a variable of it: the node that the agent's token names. */ -}}
{{- define "podmirror.policy.agent" -}}
matchConditions:
  - name: agent
    expression: >-
      request.userInfo.username ==
      'system:serviceaccount:{{ .Release.Namespace }}:{{ include "podmirror.serviceAccount" . }}'
variables:
  # The token of a pod says which node the pod runs on.
  - name: node
    expression: >-
      has(request.userInfo.extra) && 'authentication.kubernetes.io/node-name' in request.userInfo.extra
      ? request.userInfo.extra['authentication.kubernetes.io/node-name'] : []
{{- end }}

{{- /* Whether the controller runs: only where agents write MirrorNodes, which it aggregates. */ -}}
{{- define "podmirror.controller" -}}
{{- if and .Values.controller.enabled (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version) }}yes{{ end }}
{{- end }}

{{- define "podmirror.controller.fullname" -}}
{{- printf "%s-controller" (include "podmirror.fullname" . | trunc 52 | trimSuffix "-") }}
{{- end }}

{{- define "podmirror.controller.serviceAccount" -}}
{{- $values := .Values.controller.serviceAccount }}
{{- $values.name | default (ternary (include "podmirror.controller.fullname" .) "default" $values.create) }}
{{- end }}

{{- define "podmirror.controller.selectorLabels" -}}
app.kubernetes.io/name: {{ include "podmirror.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: controller
{{- end }}

{{- define "podmirror.controller.labels" -}}
{{ include "podmirror.controller.selectorLabels" . }}
{{ include "podmirror.commonLabels" . }}
{{- end }}

{{- define "podmirror.port" -}}
{{- regexFind "[0-9]+$" .Values.listen }}
{{- end }}

{{- /* NAME=DESTINATION,NAME=DESTINATION */ -}}
{{- define "podmirror.targets" -}}
{{- $all := deepCopy .Values.targets }}
{{- with .Values.recorder }}
{{- if .enabled }}
{{- if eq .target "default" }}
{{- fail "recorder.target must name a stream, but \"default\" is mirrorIface" }}
{{- end }}
{{- $there := get $all .target | default "stream" }}
{{- if ne $there "stream" }}
{{- fail (printf "the recorder needs a stream, and targets.%s is %s: name another recorder.target" .target $there) }}
{{- end }}
{{- $_ := set $all .target $there }}
{{- end }}
{{- end }}
{{- $targets := list }}
{{- range $name, $destination := $all }}
{{- $targets = append $targets (printf "%s=%s" $name $destination) }}
{{- end }}
{{- join "," $targets }}
{{- end }}

{{- /* The memory is that of the packets, of a copy of them for `tail --since`, and of the process. */ -}}
{{- define "podmirror.recorder.resources" -}}
{{- $ring := trimSuffix "MiB" .Values.recorder.ring | int }}
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

{{- /* The nodes of the cluster that get no agent, a line each with the reason. Of the affinity, only the part for the
image's architectures is checked. Without access to a cluster, as in `helm template`, the list is empty. */ -}}
{{- define "podmirror.without" -}}
{{- $values := .Values }}
{{- range (lookup "v1" "Node" "" "").items }}
{{- $labels := .metadata.labels | default dict }}
{{- $reasons := list }}
{{- $architecture := get $labels "kubernetes.io/arch" }}
{{- if and $values.image.architectures (not (has $architecture $values.image.architectures)) }}
{{- $reasons = append $reasons (printf "its architecture, %s, is not in image.architectures" ($architecture | default "unknown")) }}
{{- end }}
{{- range $key, $value := $values.nodeSelector }}
{{- if ne (get $labels $key | toString) (toString $value) }}
{{- $reasons = append $reasons (printf "nodeSelector asks for %s=%s" $key $value) }}
{{- end }}
{{- end }}
{{- if $reasons }}
  {{ .metadata.name }}: {{ join "; " $reasons }}
{{- end }}
{{- end }}
{{- end }}
