# SPDX-License-Identifier: Apache-2.0
"""Manifests that are refused."""

from __future__ import annotations

POD = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: digits
spec:
  template:
    spec:
      volumes:
        - name: data
          emptyDir: {}
      containers:
        - name: trainer
          image: i
          command: ["torchrun"]
          env:
            - name: A
              value: b
"""
