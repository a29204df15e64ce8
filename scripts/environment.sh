# SPDX-License-Identifier: Apache-2.0
# Sourced by scripts/demo, scripts/test and scripts/bench: makes what they need, once, in a cache
# outside the checkout, and says first what it will download.

MUSTER_CACHE=${MUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/muster}
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export MUSTER_CACHE
export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

find_python() {
    local candidate
    for candidate in ${MUSTER_PYTHON:-} python3 python3.11 python3.12 python3.13; do
        # Version managers leave names on PATH that do not run: only the answer counts.
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "No Python 3.11 or newer was found: install one, or name it in MUSTER_PYTHON."
}

# ensure LAYER SIZE TIME REQUIREMENT...
# Installs a layer of requirements, pinned by scripts/constraints.txt, into the one virtual
# environment of this version of the project; leaves its python in $PYTHON.
ensure() {
    local layer=$1 size=$2 time=$3
    shift 3
    local python venv key
    python=$(find_python)
    key=$({ "$python" --version; cat "$REPOSITORY/scripts/constraints.txt"; } | sha256sum | cut -c1-12)
    venv=$MUSTER_CACHE/python-$key
    PYTHON=$venv/bin/python
    layer=$layer-$(printf '%s ' "$@" | sha256sum | cut -c1-6)
    [ -e "$venv/.$layer-complete" ] && return
    say "Setting up ${layer%-*} in $venv: downloads about $size, takes about $time (once)."
    mkdir -p "$MUSTER_CACHE"
    (
        flock 9
        [ -e "$venv/.$layer-complete" ] && exit 0
        { [ -x "$PYTHON" ] || "$python" -m venv "$venv"; } &&
            "$PYTHON" -m pip install --quiet --disable-pip-version-check \
                --constraint "$REPOSITORY/scripts/constraints.txt" "$@" >&2 &&
            touch "$venv/.$layer-complete"
    ) 9>"$MUSTER_CACHE/python.lock" || fail "Setting up ${layer%-*} failed; its last lines are above."
    say "${layer%-*} is ready."
}

ensure_runtime() {
    ensure muster "20 MB" "half a minute" \
        click grpcio prometheus-client protobuf rich uvloop
    ensure torch "2.6 GB (5.4 GB on disk)" "2-10 minutes" torch numpy scikit-learn
}

# Libraries that the callbacks of muster/ are tested with. They are pinned by a file of their own, so
# that a change of them does not set up torch anew.
ensure_trainers() {
    local pins
    mapfile -t pins <"$REPOSITORY/scripts/constraints-trainers.txt"
    ensure trainers "60 MB (200 MB on disk)" "1 minute" "${pins[@]}"
}

ensure_development() {
    ensure_runtime
    ensure_trainers
    ensure test-tools "60 MB" "half a minute" \
        atheris blockbuster hypothesis mypy pytest pytest-asyncio pytest-timeout ruff
}

# Leaves the folder of etcd and etcdctl in $MUSTER_TEST_ETCD.
ensure_etcd() {
    MUSTER_TEST_ETCD=$("$REPOSITORY/scripts/toolchain/etcd") || fail "etcd could not be made ready."
    export MUSTER_TEST_ETCD
}

# Leaves the folder of horovodrun, and of a python that has Horovod, in $MUSTER_TEST_HOROVOD.
ensure_horovod() {
    MUSTER_TEST_HOROVOD=$("$REPOSITORY/scripts/toolchain/horovod" "$PYTHON") ||
        fail "Horovod could not be made ready."
    export MUSTER_TEST_HOROVOD
}
