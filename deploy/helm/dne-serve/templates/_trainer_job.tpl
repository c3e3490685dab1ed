{{- /* The spec of a Job. Takes a dict of `root`, `args`, and `claim` for the images, which may be empty. */}}
{{- define "dne.trainerJob" -}}
{{- $s3 := eq .root.Values.store.kind "s3" -}}
backoffLimit: 2
podFailurePolicy:
  rules:
    # 2 is wrong usage, 3 a version that is published and not promoted: a second run would end alike.
    - action: FailJob
      onExitCodes:
        containerName: trainer
        operator: In
        values: [2, 3]
    - action: Ignore
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
template:
  metadata:
    labels:
      {{- include "dne.trainer" . | nindent 6 }}
  spec:
    serviceAccountName: dne-train
    automountServiceAccountToken: false
    enableServiceLinks: false
    restartPolicy: Never
    securityContext:
      {{- include "dne.podSecurity" . | nindent 6 }}
    containers:
      - name: trainer
        image: {{ include "dne.image" .root }}
        imagePullPolicy: IfNotPresent
        command: [dne-train]
        args:
          {{- concat .args (list "--threads" "$(CPU_LIMIT)" "--json") | toYaml | nindent 10 }}
        env:
          - name: HOME
            value: /tmp
          - name: DNE_STORE
            value: {{ include "dne.storeUrl" .root }}
          - name: DNE_CACHE
            value: /cache
          - name: DNE_DEVICE
            value: cpu
          - name: CPU_LIMIT
            valueFrom:
              resourceFieldRef:
                containerName: trainer
                resource: limits.cpu
          {{- if $s3 }}
          {{- include "dne.s3Env" (dict "s3" .root.Values.store.s3 "secret" .root.Values.training.s3.secret) | nindent 10 }}
          {{- end }}
        resources:
          {{- include "dne.resources" (dict "resources" .root.Values.training.resources) | trim | nindent 10 }}
        securityContext:
          {{- include "dne.containerSecurity" . | nindent 10 }}
        volumeMounts:
          {{- if not $s3 }}
          - name: store
            mountPath: /models
          {{- end }}
          - name: cache
            mountPath: /cache
          - name: tmp
            mountPath: /tmp
          {{- if .claim }}
          - name: data
            mountPath: /data
            readOnly: true
          {{- end }}
    volumes:
      {{- if not $s3 }}
      {{- include "dne.storeVolume" .root | nindent 6 }}
      {{- end }}
      - name: cache
        persistentVolumeClaim:
          claimName: dne-train-cache
      - name: tmp
        emptyDir:
          sizeLimit: 1Gi
      {{- with .claim }}
      - name: data
        persistentVolumeClaim:
          claimName: {{ . }}
          readOnly: true
      {{- end }}
{{- end }}
