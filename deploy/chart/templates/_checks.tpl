{{- /* Refuses values that cannot work and that the schema cannot check. */ -}}
{{- define "podmirror.check" -}}
{{- with .Values.defaults.sample }}
{{- $parts := splitList "/" (trimSuffix "%" .) }}
{{- $whole := ternary 100.0 (last $parts | trim | float64) (hasSuffix "%" .) }}
{{- $part := first $parts | trim | float64 }}
{{- if or (le $part 0.0) (gt $part $whole) }}
{{- fail (printf "defaults.sample: %q is not a share between 0 and 1; use for example 1/100 or 10%%" .) }}
{{- end }}
{{- end }}
{{- with .Values.recorder }}
{{- if .enabled }}
{{- if eq .target "default" }}
{{- fail "recorder.target must name a stream, but \"default\" is the mirror interface" }}
{{- end }}
{{- $there := get $.Values.targets .target | default "stream" }}
{{- if ne $there "stream" }}
{{- fail (printf "the recorder needs a stream, and targets.%s is %s: name another recorder.target" .target $there) }}
{{- end }}
{{- end }}
{{- end }}
{{- $default := .Values.target }}
{{- if not (or (eq $default "default") (hasKey .Values.targets $default) (and .Values.recorder.enabled (eq $default .Values.recorder.target))) }}
{{- fail (printf "target: %q does not exist; use one of targets, or \"default\", which is the mirror interface" $default) }}
{{- end }}
{{- $metrics := .Values.metrics }}
{{- if and $metrics.podMonitor.enabled $metrics.serviceMonitor.enabled }}
{{- fail "metrics.podMonitor and metrics.serviceMonitor would both scrape every pod: enable one of them" }}
{{- end }}
{{- if and (or $metrics.podMonitor.enabled $metrics.serviceMonitor.enabled) (regexMatch "^(127\\.|\\[::1\\])" $metrics.listen) }}
{{- fail (printf "Prometheus cannot reach metrics.listen=%s; set an address of the nodes, for example metrics.listen=0.0.0.0:10706" $metrics.listen) }}
{{- end }}
{{- with .Values.apiserver }}
{{- if .enabled }}
{{- $listen := include "podmirror.apiserver.listen" $ }}
{{- $port := regexFind "[0-9]+$" $listen }}
{{- if has $port (list "10708" "10709") }}
{{- fail (printf "apiserver.listen=%s: the server has port 10708 for kube-apiserver and port 10709 for agents; use another port" $listen) }}
{{- end }}
{{- if and .hostNetwork (has (include "podmirror.port" $) (list "10708" "10709" $port)) }}
{{- fail (printf "metrics.listen=%s: with apiserver.hostNetwork, the packets API server has ports 10708, 10709 and %s (apiserver.listen) of the nodes; use another port" $metrics.listen $port) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.ceilings.maxMirrorDuration (not (include "podmirror.has130" .)) }}
{{- fail "ceilings.maxMirrorDuration needs Kubernetes 1.30 or newer, for ValidatingAdmissionPolicies" }}
{{- end }}
{{- include "podmirror.checkFilter" . }}
{{- end }}

{{- define "podmirror.checkFilter" -}}
{{- with .Values.defaults.filter }}
{{- $known := $.Files.Get "files/filter-words.txt" | trim | splitList "\n" }}
{{- $addresses := "\\b0x[0-9a-fA-F]+|\\b[0-9a-fA-F]{2}([-:.][0-9a-fA-F]{2}){5}\\b|\\b[0-9a-fA-F]{4}([.][0-9a-fA-F]{4}){2}\\b|\\b[0-9a-fA-F]{12}\\b|(\\b[0-9a-fA-F]+)?:[0-9a-fA-F:.]*" }}
{{- $rest := regexReplaceAll $addresses . " " }}
{{- range regexFindAll "[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?" $rest -1 }}
{{- if not (has . $known) }}
{{- fail (printf "defaults.filter: unknown word %q; check the filter with `mirror-agent filter check`" .) }}
{{- end }}
{{- end }}
{{- range $open, $close := dict "(" ")" "[" "]" }}
{{- if ne (len (splitList $open $rest)) (len (splitList $close $rest)) }}
{{- fail (printf "defaults.filter: a %q or a %q is missing in %q" $open $close $.Values.defaults.filter) }}
{{- end }}
{{- end }}
{{- if regexMatch "(^|\\s)(and|or|not|src|dst|host|net|port|portrange|proto|protochain)\\s*$|[!&|<>=]\\s*$" . }}
{{- fail (printf "defaults.filter: %q is incomplete" .) }}
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
