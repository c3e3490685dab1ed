{{- define "dne.serverEnv" -}}
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: HOME
  value: /tmp
- name: DNE_HOST
  value: 0.0.0.0
- name: DNE_PORT
  value: "8000"
- name: DNE_STORE
  value: {{ include "dne.storeUrl" . }}
- name: DNE_CACHE
  value: /cache
- name: DNE_DEVICE
  value: {{ .Values.gpu | ternary "cuda" "cpu" }}
- name: DNE_THREADS
  valueFrom:
    resourceFieldRef:
      containerName: server
      resource: limits.cpu
- name: DNE_ALLOWED_HOSTS
  value: dne-serve,dne-serve.$(POD_NAMESPACE),dne-serve.$(POD_NAMESPACE).svc,dne-serve.$(POD_NAMESPACE).svc.cluster.local
  {{- range .Values.allowedHosts }},{{ . }}{{ end }}
- name: DNE_DRAIN_SECONDS
  value: {{ .Values.drainSeconds | quote }}
- name: DNE_GRACE_SECONDS
  value: {{ .Values.graceSeconds | quote }}
- name: DNE_ADMIN_TOKEN_FILE
  value: /etc/dne-serve/tokens/admin-token
- name: DNE_TOKEN_FILE
  value: /etc/dne-serve/tokens/tokens
{{- if eq .Values.store.kind "s3" }}
{{- with .Values.store.s3 }}
- name: DNE_POLL_SECONDS
  value: {{ .pollSeconds | quote }}
- name: DNE_CACHE_BYTES # 80 % of the volume `cache`
  value: {{ div (mul .cacheGiB 1073741824 8) 10 | quote }}
{{ include "dne.s3Env" (dict "s3" . "secret" .secret) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Settings of `env`, none of which may stand twice or show a token. */}}
{{- define "dne.moreEnv" -}}
{{- range include "dne.serverEnv" . | fromYamlArray }}
{{- if hasKey $.Values.env .name }}
{{- fail (printf "env.%s: the chart sets %s itself; see values.yaml for the value behind it." .name .name) }}
{{- end }}
{{- end }}
{{- if hasKey .Values.env "DNE_ADMIN_TOKEN" }}
{{- fail "env.DNE_ADMIN_TOKEN would show the token: put it into the Secret that tokens.secret names." }}
{{- end }}
{{- range $name, $value := .Values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
