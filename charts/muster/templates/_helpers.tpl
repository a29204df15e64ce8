{{- define "muster.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "muster.labels" -}}
app.kubernetes.io/name: muster
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: muster
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What the pods of one part have in common: a dict of root and part. */}}
{{- define "muster.selector" -}}
app.kubernetes.io/name: muster
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{/* One pod of a part on each node, as etcd.spread says: a dict of root and part. */}}
{{- define "muster.apart" -}}
podAntiAffinity:
  {{- if ne (toString .root.Values.etcd.spread) "preferred" }}
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          {{- include "muster.selector" . | nindent 10 }}
  {{- else }}
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "muster.selector" . | nindent 12 }}
  {{- end }}
{{- end -}}

{{/* The Pod Security Standard restricted, and a read-only root. */}}
{{- define "muster.podSecurity" -}}
runAsNonRoot: true
{{- if ne (toString .Values.user) "none" }}
runAsUser: {{ int64 .Values.user }}
runAsGroup: {{ int64 .Values.user }}
fsGroup: {{ int64 .Values.user }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "muster.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "muster.etcd" -}}
{{ include "muster.name" . }}-etcd
{{- end -}}

{{- define "muster.etcdImage" -}}
{{- with .Values.etcd.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "muster.etcdScheme" -}}
{{ if .Values.etcd.tls.enabled }}https{{ else }}http{{ end }}
{{- end -}}

{{- define "muster.etcdSecret" -}}
{{ default (include "muster.etcd" .) .Values.etcd.tls.existingSecret }}
{{- end -}}

{{/* The name of one member, as clients and other members reach it: a dict of root and number. */}}
{{- define "muster.etcdHost" -}}
{{ $name := include "muster.etcd" .root -}}
{{ $name }}-{{ .number }}.{{ $name }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{/* The CronJobs that write snapshots, one for each day of the week; empty: there are none. */}}
{{- define "muster.backups" -}}
{{- if and .Values.etcd.enabled .Values.etcd.backup.enabled -}}
{{- $all := list -}}
{{- range $day := until 7 -}}
{{- $all = append $all (printf "%s-backup-%d" (include "muster.etcd" $) $day) -}}
{{- end -}}
{{ join "," $all }}
{{- end -}}
{{- end -}}

{{/* The volume that a member keeps its records on. */}}
{{- define "muster.memberClaim" -}}
{{- with .Values.etcd.persistence -}}
accessModes: [ReadWriteOnce]
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests: {storage: {{ .size }}}
{{- end -}}
{{- end -}}

{{/* What members are told of each other. */}}
{{- define "muster.etcdPeers" -}}
{{- $all := list -}}
{{- range $number := until (int .Values.etcd.replicas) -}}
{{- $host := include "muster.etcdHost" (dict "root" $ "number" $number) -}}
{{- $all = append $all (printf "%s-%d=%s://%s:2380" (include "muster.etcd" $) $number (include "muster.etcdScheme" $) $host) -}}
{{- end -}}
{{ join "," $all }}
{{- end -}}

{{/* What pods are told: every member, or the external ones. */}}
{{- define "muster.endpoints" -}}
{{- if .Values.etcd.enabled -}}
{{- $all := list -}}
{{- range $number := until (int .Values.etcd.replicas) -}}
{{- $host := include "muster.etcdHost" (dict "root" $ "number" $number) -}}
{{- $all = append $all (printf "%s://%s:2379" (include "muster.etcdScheme" $) $host) -}}
{{- end -}}
{{ join "," $all }}
{{- else -}}
{{- if not .Values.externalEtcd.endpoints -}}
{{- fail "externalEtcd.endpoints is empty: name the members, or set etcd.enabled" -}}
{{- end -}}
{{ join "," .Values.externalEtcd.endpoints }}
{{- end -}}
{{- end -}}

{{/* What lets the controller into etcd, and upkeep into the chart's: the name of a Secret; empty where etcd asks nobody. */}}
{{- define "muster.accessSecret" -}}
{{- if .Values.etcd.enabled -}}
{{- if and .Values.controller.enabled .Values.etcd.auth.enabled -}}
{{- if not .Values.etcd.tls.enabled -}}
{{- fail "etcd.auth.enabled needs etcd.tls.enabled: clients are known by their certificates" -}}
{{- end -}}
{{ include "muster.etcd" . }}-access
{{- end -}}
{{- else if .Values.controller.enabled -}}
{{ .Values.externalEtcd.accessSecret }}
{{- end -}}
{{- end -}}

{{/* Whether the chart's etcd asks who its clients are. */}}
{{- define "muster.asks" -}}
{{- if and .Values.etcd.enabled (include "muster.accessSecret" .) -}}true{{- end -}}
{{- end -}}

{{/* Whether the controller gets into the store by itself. */}}
{{- define "muster.keepsStore" -}}
{{- if or (include "muster.accessSecret" .) (and .Values.controller.enabled .Values.etcd.enabled .Values.etcd.tls.enabled) -}}true{{- end -}}
{{- end -}}

{{/* Whether each job gets a Secret of its own. */}}
{{- define "muster.givesAccess" -}}
{{- if and (include "muster.accessSecret" .) .Values.rbac.access -}}true{{- end -}}
{{- end -}}

{{/* The names of the chart's members, as their certificate has them. */}}
{{- define "muster.memberHosts" -}}
{{- $name := include "muster.etcd" . -}}
{{- $all := list "localhost" (printf "%s.%s.svc" $name .Release.Namespace) (printf "*.%s.%s.svc" $name .Release.Namespace) -}}
{{- range $number := until (int .Values.etcd.replicas) -}}
{{- $all = append $all (include "muster.etcdHost" (dict "root" $ "number" $number)) -}}
{{- end -}}
{{ join "," $all }}
{{- end -}}

{{/* How etcdctl gets in: the flags of a container without a shell. */}}
{{- define "muster.etcdctlFiles" -}}
{{- if .Values.etcd.tls.enabled }}
- --cacert=/etc/etcd/tls/ca.crt
{{- end }}
{{- if include "muster.asks" . }}
- --cert=/etc/etcd/tls/tls.crt
- --key=/etc/etcd/tls/tls.key
{{- end }}
{{- end -}}

{{/* The volume with these files: root's certificate where etcd asks, else the authority alone. */}}
{{- define "muster.clientVolume" -}}
- name: tls
  {{- if include "muster.asks" . }}
  secret:
    secretName: {{ include "muster.accessSecret" . }}
    items: [{key: ca.crt, path: ca.crt}, {key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
  {{- else }}
  secret: {secretName: {{ include "muster.etcdSecret" . }}, items: [{key: ca.crt, path: ca.crt}]}
  {{- end }}
{{- end -}}

{{/* How etcdctl reaches the members. */}}
{{- define "muster.etcdctl" -}}
- --endpoints={{ include "muster.endpoints" . }}
{{- include "muster.etcdctlFiles" . }}
{{- end -}}

{{- define "muster.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ if kindIs "map" . }}{{ .name }}{{ else }}{{ . }}{{ end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The class of the pods of a part, etcd or controller: a dict of root and part. */}}
{{- define "muster.priority" -}}
{{- $class := index .root.Values .part "priorityClassName" -}}
{{- if and (not $class) .root.Values.priorityClasses.enabled -}}
{{- $class = "muster-system" -}}
{{- end -}}
{{- with $class -}}
priorityClassName: {{ . }}
{{- end -}}
{{- end -}}

{{/* The Secret with the authority of the store that the controller follows jobs in; empty: there is none. */}}
{{- define "muster.controllerCa" -}}
{{- if not (include "muster.keepsStore" .) -}}
{{ .Values.jobs.etcdSecret }}
{{- end -}}
{{- end -}}

{{/* Whether the controller follows jobs: not where it could not trust the store, for it would not start. */}}
{{- define "muster.follows" -}}
{{- if and .Values.jobs.follow (or (include "muster.keepsStore" .) (include "muster.controllerCa" .) (not (contains "https://" (include "muster.endpoints" .)))) -}}
true
{{- end -}}
{{- end -}}

{{/* Whether the controller passes on what nodes and pods show of an end to come. */}}
{{- define "muster.notices" -}}
{{- if and (include "muster.follows" .) .Values.notices.enabled .Values.rbac.pods .Values.rbac.nodes -}}
true
{{- end -}}
{{- end -}}
