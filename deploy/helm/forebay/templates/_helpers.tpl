{{- define "forebay.name" -}}
{{- .Values.nameOverride | default .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{- define "forebay.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The metadata that every object has, under `metadata:`. */}}
{{- define "forebay.metadata" -}}
name: {{ include "forebay.name" . }}
{{- if .Values.renderNamespace }}
namespace: {{ .Release.Namespace }}
{{- end }}
labels:
  {{- include "forebay.labels" . | nindent 2 }}
{{- end -}}

{{- define "forebay.labels" -}}
{{ include "forebay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "forebay.selector" -}}
app.kubernetes.io/name: forebay
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What tells the pods that have the sidecar: network policy and monitoring look for it. */}}
{{- define "forebay.sidecarLabels" -}}
forebay/sidecar: {{ include "forebay.name" . }}
{{- end -}}

{{/* Forebay's pods, of either mode. */}}
{{- define "forebay.podSelector" -}}
{{- include (ternary "forebay.sidecarLabels" "forebay.selector" (eq .Values.mode "sidecar")) . -}}
{{- end -}}

{{/* Whether the cache outlives the pod. */}}
{{- define "forebay.persistent" -}}
{{- has .Values.cache.volume.type (list "hostPath" "persistentVolumeClaim") -}}
{{- end -}}

{{/* The pod's: the drain, then the requests in flight, then some. A chart that includes the sidecar uses it, too. */}}
{{- define "forebay.terminationGracePeriodSeconds" -}}
{{- add (ternary .Values.drain.timeoutSeconds 0 .Values.drain.enabled) .Values.shutdownGraceSeconds 30 -}}
{{- end -}}

{{- define "forebay.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Forebay's container: of the DaemonSet, and with mode sidecar the entry of a pod's initContainers. */}}
{{- define "forebay.container" -}}
- name: forebay
  image: {{ include "forebay.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if eq .Values.mode "sidecar" }}
  restartPolicy: Always  # what makes an init container a sidecar
  {{- end }}
  args: ["serve"]
  {{- with .Values.secrets.origin.name }}
  envFrom:
    - secretRef:
        name: {{ . }}
  {{- end }}
  env:  # for `forebay serve`, and for `kubectl exec … -- forebay status`
    - name: FOREBAY_CONFIG
      value: /etc/forebay/forebay.toml
    - name: FOREBAY_SERVER__HOST
      value: {{ ternary "127.0.0.1" "0.0.0.0" (eq .Values.mode "sidecar") | quote }}
    - name: FOREBAY_SERVER__PORT
      value: {{ .Values.ports.s3 | quote }}
    - name: FOREBAY_SERVER__SHUTDOWN_GRACE
      value: {{ printf "%vs" .Values.shutdownGraceSeconds | quote }}
    - name: FOREBAY_ADMIN__HOST  # the kubelet's probes come from outside of the pod; all else needs the token
      value: "0.0.0.0"
    - name: FOREBAY_ADMIN__PORT
      value: {{ .Values.ports.admin | quote }}
    - name: FOREBAY_ADMIN__TOKEN_FILE
      value: /etc/forebay/keys/{{ .Values.secrets.keys.adminToken }}
    - name: FOREBAY_CACHE__DIRECTORY
      value: /var/lib/forebay
    - name: FOREBAY_CACHE__CAPACITY
      value: {{ .Values.cache.capacity | quote }}
    - name: FOREBAY_CACHE__PERSISTENT
      value: {{ include "forebay.persistent" . | quote }}
    {{- if .Values.cluster.enabled }}
    - name: FOREBAY_CLUSTER__NAME
      value: {{ .Values.cluster.name | quote }}
    - name: FOREBAY_CLUSTER__SECRET_FILE
      value: /etc/forebay/cluster/{{ .Values.cluster.secretKey }}
    - name: FOREBAY_CLUSTER__NODE
      valueFrom:
        fieldRef:
          fieldPath: spec.nodeName
    - name: FOREBAY_CLUSTER__LISTEN
      value: "0.0.0.0:{{ .Values.ports.peer }}"
    {{- with .Values.cluster.redis }}
    {{- if .url }}
    - name: FOREBAY_CLUSTER__REDIS
      value: {{ .url | quote }}
    {{- if .user }}
    - name: FOREBAY_CLUSTER__REDIS_USER
      value: {{ .user | quote }}
    {{- end }}
    {{- if .passwordKey }}
    - name: FOREBAY_CLUSTER__REDIS_PASSWORD_FILE
      value: /etc/forebay/cluster/{{ .passwordKey }}
    {{- end }}
    {{- if .sentinelPasswordKey }}
    - name: FOREBAY_CLUSTER__SENTINEL_PASSWORD_FILE
      value: /etc/forebay/cluster/{{ .sentinelPasswordKey }}
    {{- end }}
    {{- else }}
    - name: FOREBAY_CLUSTER__MEMBERS  # the addresses of all pods; each knows its own
      value: '["dns://{{ include "forebay.name" $ }}-peers:{{ $.Values.ports.peer }}"]'
    {{- end }}
    {{- end }}
    {{- end }}
  ports:
    {{- if ne .Values.mode "sidecar" }}
    - name: s3
      containerPort: {{ .Values.ports.s3 }}
    {{- end }}
    - name: admin
      containerPort: {{ .Values.ports.admin }}
    {{- if .Values.cluster.enabled }}
    - name: peer
      containerPort: {{ .Values.ports.peer }}
    {{- end }}
  {{- if .Values.drain.enabled }}
  lifecycle:
    preStop:  # with write = "back": what the bucket does not have yet gets there; at once where there is none
      exec:
        command: ["forebay", "flush", "s3://", "--wait", "--timeout", "{{ .Values.drain.timeoutSeconds }}s"]
  {{- end }}
  startupProbe:{{ if eq .Values.mode "sidecar" }}  # the trainer starts once this has succeeded{{ end }}
    httpGet:
      path: /readyz
      port: admin
    periodSeconds: 1
    failureThreshold: {{ .Values.startSeconds }}
  readinessProbe:
    httpGet:
      path: /readyz
      port: admin
    periodSeconds: 5
  livenessProbe:
    httpGet:
      path: /healthz
      port: admin
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  resources:
    {{- toYaml .Values.resources | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: ["ALL"]
  volumeMounts:
    - name: forebay-config
      mountPath: /etc/forebay/forebay.toml
      subPath: forebay.toml
      readOnly: true
    - name: forebay-keys
      mountPath: /etc/forebay/keys
      readOnly: true
    {{- if .Values.cluster.enabled }}
    - name: forebay-cluster
      mountPath: /etc/forebay/cluster
      readOnly: true
    {{- end }}
    - name: forebay-cache
      mountPath: /var/lib/forebay
    - name: forebay-scratch
      mountPath: /tmp
{{- end -}}

{{/* The volumes of Forebay's container. */}}
{{- define "forebay.volumes" -}}
- name: forebay-config
  configMap:
    name: {{ include "forebay.name" . }}
- name: forebay-keys
  secret:
    secretName: {{ .Values.secrets.keys.name }}
    defaultMode: 0440
{{- if .Values.cluster.enabled }}
- name: forebay-cluster
  secret:
    secretName: {{ .Values.cluster.secretName }}
    defaultMode: 0440
{{- end }}
- name: forebay-cache
  {{- with .Values.cache.volume }}
  {{- if eq .type "hostPath" }}
  hostPath:
    path: {{ .path }}
    type: Directory
  {{- else if eq .type "persistentVolumeClaim" }}
  persistentVolumeClaim:
    claimName: {{ required "cache.volume.claimName names the claim" .claimName }}
  {{- else }}
  emptyDir:  # gone with the pod; a claim keeps the cache warm from job to job, and write = "back" needs one
    sizeLimit: {{ required "cache.volume.sizeLimit bounds the emptyDir; above cache.capacity" .sizeLimit }}
  {{- end }}
  {{- end }}
- name: forebay-scratch
  emptyDir:
    sizeLimit: 1Gi
{{- end -}}

{{/* What a container of the pod needs to reach its sidecar; `.Values.client` names the key. */}}
{{- define "forebay.clientEnv" -}}
- name: AWS_ENDPOINT_URL_S3  # only S3: AWS_ENDPOINT_URL would send STS and every other service here as well
  value: http://127.0.0.1:{{ .Values.ports.s3 }}
- name: AWS_ACCESS_KEY_ID
  value: {{ .Values.client.accessKeyId }}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secrets.keys.name }}
      key: {{ .Values.client.secretKey }}
- name: AWS_REGION
  value: {{ .Values.client.region }}
{{- end -}}


{{- define "forebay.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "forebay.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}
