#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What horovodrun finds as ssh: the hook in the run directory, which takes ssh's form of the call.
exec "${0%/*}/../kubexec.sh" "$@"
