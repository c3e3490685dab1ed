{{- /* Parts that several objects share. deploy/kubernetes has the reasons for each value. */}}

{{- define "dne.server" -}}
app.kubernetes.io/name: dne-serve
app.kubernetes.io/component: server
{{- end }}

{{- define "dne.trainer" -}}
app.kubernetes.io/name: dne-train
app.kubernetes.io/component: trainer
{{- end }}

{{- define "dne.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}
{{- end }}

{{- define "dne.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "dne.containerSecurity" -}}
runAsNonRoot: true
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- /* Requests equal limits. Takes a dict of `resources` and `gpu`. */}}
{{- define "dne.resources" -}}
{{- range list "requests" "limits" }}
{{ . }}:
  cpu: {{ $.resources.cpu | quote }}
  memory: {{ $.resources.memory }}
  {{- if $.gpu }}
  nvidia.com/gpu: 1
  {{- end }}
{{- end }}
{{- end }}

{{- define "dne.storeUrl" -}}
{{- if eq .Values.store.kind "s3" -}}
{{ required "store.s3.url is empty: name the bucket, as in s3://bucket/prefix." .Values.store.s3.url }}
{{- else -}}
/models
{{- end }}
{{- end }}

{{- /* Variables for S3. Takes a dict of `s3` and `secret`. */}}
{{- define "dne.s3Env" -}}
- name: AWS_REGION
  value: {{ .s3.region }}
{{- with .s3.endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ . }}
{{- end }}
{{- with .secret }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: access-key-id
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: secret-access-key
{{- end }}
{{- end }}

{{- define "dne.storeVolume" -}}
- name: store
  persistentVolumeClaim:
    claimName: {{ .Values.store.volume.existingClaim | default "dne-serve-store" }}
{{- end }}

{{- /* The port of the endpoint, or the one of its scheme. */}}
{{- define "dne.s3Port" -}}
{{- $endpoint := .Values.store.s3.endpoint -}}
{{- $usual := hasPrefix "http://" $endpoint | ternary "80" "443" -}}
{{- regexFind ":[0-9]+/?$" $endpoint | trimPrefix ":" | trimSuffix "/" | default $usual -}}
{{- end }}

{{- /* DNS and object storage, or nothing. The metadata service of the node stays closed. */}}
{{- define "dne.storeEgress" -}}
{{- if eq .Values.store.kind "s3" -}}
- ports:
    - protocol: UDP
      port: 53
    - protocol: TCP
      port: 53
- to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except: [169.254.0.0/16]
  ports:
    - protocol: TCP
      port: {{ include "dne.s3Port" . }}
{{- else -}}
[]
{{- end }}
{{- end }}
