# SPDX-License-Identifier: Apache-2.0
"""Manifests as people write them: each with something that a careless writer of YAML would lose."""

from __future__ import annotations

import json

import yaml

from tests.support.sources import ROOT

PLAIN_POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: trainer-0
spec:
  containers:
  - name: trainer
    image: example.org/train:1
    command: [python, train.py]
"""

COMMENTED_DEPLOYMENT = """\
# The training of the digits.
#   Owner: whoever is on call

apiVersion: apps/v1
kind: Deployment   # a Job would end
metadata:
  name:   digits
  annotations: {}   # none so far
spec:
  replicas: 3


  selector: {matchLabels: {app: "digits"}}
  template:
    # what the pods have in common
    metadata:
      # their labels
      labels:
        # one of them
        app: 'digits'
        on: "yes"      # not a boolean
    spec:
      # before everything else
      initContainers:   # they run first
      # fetch
      - image: example.org/fetch:1
        name: fetch
        args:
        - --from=https://example.org/data   # a URL
      containers:
      # the one that trains

      - # a comment on the dash
        name: trainer   # its name
        image: "example.org/train@sha256:00000000000000000000000000000000"
        env:
        # how loud
        - name: LOG
          value: "1"
        # end of env
        command:
          # deeper than the rest
          - torchrun
          - --nproc-per-node=8
          - train.py   # the script
          # end of command
        resources:
          limits:
            nvidia.com/gpu: 8   # all of them
            cpu: 16
            memory: 64Gi
        volumeMounts:
        - {name: data, mountPath: /data}

      # what is mounted
      volumes:
      - name: data
        hostPath: {path: /data}
# the end
"""

BLOCK_SCALARS = """\
apiVersion: batch/v1
kind: Job
metadata: {name: night, namespace: research}
spec:
    completions: 2
    parallelism: 2
    completionMode: Indexed
    template:
        spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 45
            containers:
                - name: trainer
                  image: example.org/train:1
                  command:
                      - bash
                      - -ec
                      - |
                        # not a YAML comment
                        export X=1

                        exec torchrun --nproc_per_node 4 \\
                          train.py --name "a: b"

                  env:
                      - name: NOTE
                        value: >-
                            folded
                            over lines

                      - name: TAIL
                        value: |+
                            kept

"""

FLOW_ONLY = (
    "{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: s}, spec: {serviceName: '', "
    "selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: "
    "{containers: [{name: c, image: i, command: [torchrun, train.py]}]}}}}\n"
)

ANCHORS = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: anchored
spec:
  elasticPolicy: {minReplicas: 1, maxReplicas: 4}
  pytorchReplicaSpecs:
    Master: &replica
      replicas: 1
      restartPolicy: OnFailure
      template: &template
        spec:
          containers:
            - &trainer
              name: pytorch
              image: &image example.org/train:1
              command: &command [torchrun, train.py]
              env:
                - &loud {name: LOG, value: "1"}
                - *loud
          tolerations: &tolerations
            - {key: gpu, operator: Exists}
    Worker:
      <<: *replica
      replicas: 3
"""

ALIASES_FIRST = """\
kind: Deployment
apiVersion: apps/v1
metadata: {name: aliases}
x-env: &env {name: A, value: b}
x-volume: &volume
  name: data
  emptyDir: {}
spec:
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}}
    spec:
      volumes:
        - *volume
      containers:
        - name: c
          image: i
          env: [ *env ]
          args: [ "x" ]
"""

LIST = """\
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: ConfigMap
  metadata: {name: c}
  data:
    file: |
      spec: {containers: []}
- apiVersion: apps/v1
  kind: ReplicaSet
  metadata:
    name: in-a-list
  spec:
    selector: {matchLabels: {a: b}}
    template:
      metadata:
        labels:
          a: b
      spec:
        containers:
        - name: c
          image: i
          command: ["a"]
"""

MANY_DOCUMENTS = """\
%YAML 1.2
---
# nothing here
---
apiVersion: v1
kind: Service
metadata: {name: digits}
spec: {clusterIP: None, ports: [{port: 80}]}
...
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: digits}
spec:
  selector: {matchLabels: {a: b}}
  template:
    metadata:
      labels: {a: b}
    spec:
      hostNetwork: true
      containers:
      -   name: c
          image: i
          command:
          - a
---
"""

OPEN_KEYS = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: open
spec:
  selector: {matchLabels: {a: b}}
  template:
    metadata:
      labels:   # empty, and so is the next
      annotations:
    spec:
      volumes:
      containers:
        - image: i
          name: c
          command: ["torchrun", "t.py"]
          env:
          lifecycle:
          volumeMounts:"""

HOLD = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: hold}
spec:
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}}
    spec:
      containers:
        - name: c
          image: i
          args: [--epochs, "3"]
          env:
            - {name: PET_MAX_RESTARTS, value: "3"}
            - {name: PYTHONPATH, value: /src}
          lifecycle:
            postStart: {exec: {command: ["true"]}}
"""

SETTINGS_BY_HAND = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: by-hand}
spec:
  selector: {matchLabels: {a: b}}
  template:
    metadata:
      labels:
        a: b
        muster.dev/job: by-hand
      annotations:
        muster.dev/max: "4"   # said here
        muster.dev/container: second
    spec:
      containers:
        - name: first
          image: i
        - name: second
          image: i
          command: ["torchrun", "t.py"]
          lifecycle: {preStop: {sleep: {seconds: 3}}}
"""

MPI = """\
apiVersion: kubeflow.org/v1
kind: MPIJob
metadata:
  name: mpi
spec:
  slotsPerWorker: 2
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      template:
        spec:
          containers:
          - name: launcher
            image: i
            command: [horovodrun, python, train.py]
    Worker:
      replicas: 2
      template:
        spec:
          containers:
          - name: worker
            image: i
            command: [/usr/sbin/sshd, -De]
"""

TRAINING_JOB = """\
apiVersion: kai.alibabacloud.com/v1alpha1
kind: TrainingJob
metadata: {name: et}
spec:
  slotsPerWorker: 1
  etReplicaSpecs:
    launcher:
      replicas: 1
      template: {spec: {containers: [{name: l, image: i, command: [horovodrun, a]}]}}
    worker:
      replicas: 2
      minReplicas: 1
      maxReplicas: 5
      template:
        spec:
          containers:
          - {name: w, image: i, command: [sleep, infinity]}
"""

_EXAMPLE = (ROOT / "examples" / "kubernetes" / "horovod" / "mpijob.yaml").read_text()
ELASTIC_MPI = _EXAMPLE.replace(
    "    Worker:\n", "    # may go at any time\n    Worker:   # how many\n"
)
"""Workers without a command: the operator would have them sleep."""

VOLCANO = """\
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: volcano}
spec:
  minAvailable: 1
  schedulerName: volcano
  tasks:
    - replicas: 2
      name: worker
      policies: [{event: TaskCompleted, action: CompleteJob}]
      template:
        spec:
          containers:
            - command: [torchrun, t.py]
              image: i
              name: c
"""

RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata:
  name: torch
spec:
  mlPolicy: {numNodes: 1, torch: {numProcPerNode: auto}}
  template:
    spec:
      replicatedJobs:
        - name: dataset-initializer
          template: {spec: {template: {spec: {containers: [{name: fetch, image: i}]}}}}
        - name: node
          template:
            metadata:
              labels:
                trainer.kubeflow.org/trainjob-ancestor-step: trainer
            spec:
              template:
                spec:
                  containers:
                    - name: node
                      image: i
"""

CRON = """\
apiVersion: batch/v1
kind: CronJob
metadata:
    name: nightly
spec:
    schedule: "0 3 * * *"
    jobTemplate:
        spec:
            template:
                spec:
                    restartPolicy: Never
                    containers:
                    -   name: c
                        image: i
                        command: ["torchrun", "t.py"]
"""

JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: set}
spec:
  replicatedJobs:
  - name: workers
    template:
      spec:
        parallelism: 2
        completions: 2
        template:
          spec:
            containers: [{name: c, image: i, resources: {limits: {cpu: 1, memory: 1Gi}}}]
"""

OWN_RENDEZVOUS = """\
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: trainer
spec:
  serviceName: trainer
  selector: {matchLabels: {app: trainer}}
  template:
    metadata: {labels: {app: trainer}}
    spec:
      containers:
      - name: trainer
        image: example.org/train:1
        command: [torchrun, train.py]
        env:
        - {name: PET_RDZV_BACKEND, value: c10d}
        - {name: PET_RDZV_ENDPOINT, value: "trainer-0.trainer:29400"}
        - {name: PET_NNODES, value: "2:4"}
        - {name: PYTHONPATH, value: /train}
"""
"""What muster-run brings is there, from the time before it."""

ELASTIC_PYTORCH_JOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: elastic-example-imagenet
spec:
  elasticPolicy:
    rdzvBackend: c10d
    minReplicas: 1
    maxReplicas: 2
    maxRestarts: 100
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: REPLACE/pytorch
              env: [{name: LOGLEVEL, value: DEBUG}]
              command: [python, -m, torch.distributed.run, train.py, --epochs=20, /data]
"""
"""As the guide of the training-operator has it."""

_DIGITS = yaml.safe_load(COMMENTED_DEPLOYMENT)
SORTED_BY_A_SERVER = yaml.safe_dump({**_DIGITS, "status": {}})
del _DIGITS["spec"]["template"]["spec"]["initContainers"]
JSON = json.dumps(_DIGITS, indent=4) + "\n"

CORPUS = {
    "elastic-pytorch-job": ELASTIC_PYTORCH_JOB,
    "own-rendezvous": OWN_RENDEZVOUS,
    "plain-pod": PLAIN_POD,
    "commented-deployment": COMMENTED_DEPLOYMENT,
    "block-scalars": BLOCK_SCALARS,
    "flow-only": FLOW_ONLY,
    "json": JSON,
    "anchors": ANCHORS,
    "aliases-first": ALIASES_FIRST,
    "list": LIST,
    "many-documents": MANY_DOCUMENTS,
    "sorted-by-a-server": SORTED_BY_A_SERVER,
    "open-keys": OPEN_KEYS,
    "hold": HOLD,
    "settings-by-hand": SETTINGS_BY_HAND,
    "mpi": MPI,
    "elastic-mpi": ELASTIC_MPI,
    "training-job": TRAINING_JOB,
    "volcano": VOLCANO,
    "runtime": RUNTIME,
    "cron": CRON,
    "jobset": JOBSET,
    "windows-lines": COMMENTED_DEPLOYMENT.replace("\n", "\r\n"),
    "windows-lines-in-brackets": JSON.replace("\n", "\r\n"),
    "no-last-line-break": PLAIN_POD.rstrip("\n"),
}
