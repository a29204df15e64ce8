# SPDX-License-Identifier: Apache-2.0
# Sourced by scripts/demo, scripts/test and scripts/bench: makes what they need, once, in a cache
# outside the checkout, and says first what it will download.

MUSTER_CACHE=${MUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/muster}
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export MUSTER_CACHE
export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}

. "$REPOSITORY/scripts/toolchain/patience.sh"

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

# The pins, in constraints-tools.txt, of the requirements named.
pins_of() {
    local name
    for name in "$@"; do
        sed -n "/^$name==/p" "$REPOSITORY/scripts/constraints-tools.txt"
    done
}

# ensure LAYER SIZE TIME REQUIREMENT...
# Installs a layer of requirements, pinned by scripts/constraints.txt and scripts/constraints-tools.txt,
# into the one virtual environment of this version of the project; leaves its python in $PYTHON. Only a
# change of the first, which pins torch, makes a new environment.
ensure() {
    local layer=$1 size=$2 time=$3
    shift 3
    local python venv key
    python=$(find_python)
    key=$({ "$python" --version; cat "$REPOSITORY/scripts/constraints.txt"; } | sha256sum | cut -c1-12)
    venv=$MUSTER_CACHE/python-$key
    PYTHON=$venv/bin/python
    layer=$layer-$({ printf '%s ' "$@"; pins_of "$@"; } | sha256sum | cut -c1-6)
    [ -e "$venv/.$layer-complete" ] && return
    say "Setting up ${layer%-*} in $venv: downloads about $size, takes about $time (once)."
    mkdir -p "$MUSTER_CACHE"
    (
        alone 9 || exit 1
        [ -e "$venv/.$layer-complete" ] && exit 0
        # One whose making was interrupted has no pip yet.
        { "$PYTHON" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"; } &&
            patiently 3600 "$PYTHON" -m pip install --quiet --disable-pip-version-check \
                --constraint "$REPOSITORY/scripts/constraints.txt" \
                --constraint "$REPOSITORY/scripts/constraints-tools.txt" "$@" >&2 &&
            touch "$venv/.$layer-complete"
    ) 9>"$MUSTER_CACHE/python.lock" || fail "Setting up ${layer%-*} failed; its last lines are above."
    say "${layer%-*} is ready."
}

ensure_runtime() {
    ensure muster "20 MB" "half a minute" \
        click cryptography hpack protobuf rich ruamel.yaml uvloop
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
    ensure test-tools "80 MB" "half a minute" \
        aiohttp atheris blockbuster docker h2 hypothesis kubernetes kubernetes-validate mypy prometheus-client pytest \
        pytest-asyncio pytest-timeout pytest-xdist ruff
    ensure_etcd_packages
    ensure_docs
    ensure_release
}

# The clients that Muster's own is compared with; etcd3 is a driver of ours, too.
ensure_etcd_packages() {
    ensure etcd-packages "1 MB" "a few seconds" aetcd etcd3 grpcio six tenacity
}

# What makes the site of scripts/docs. zensical 0.1 needs a package, zensical-ui, that is not on every index.
ensure_docs() {
    ensure docs "15 MB" "10 seconds" zensical
}

# Writes and checks the bills of materials of scripts/release.
ensure_release() {
    ensure release-tools "10 MB" "a few seconds" "cyclonedx-python-lib[json-validation]"
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

# What the tests of clusters, containers and histories are built from. A machine that cannot have a
# cluster or an engine is told so by the tests themselves.
ensure_cluster() {
    local part
    for part in toolchain/porcupine toolchain/helm toolchain/prometheus toolchain/container-engine toolchain/container-base \
        "kubelab prepare" "toolchain/kubelab-programs operator"; do
        # Unquoted: a part may have an argument.
        "$REPOSITORY"/scripts/$part >/dev/null || say "Tests that need $part will fail or be left out."
    done
    # The first build of the sidecar's image downloads wheels; later ones find their layers there.
    if [ "$(id -u)" = 0 ] && ! [ -d "$MUSTER_CACHE/sidecar-layers" ]; then
        PYTHONPATH="$REPOSITORY/scripts/toolchain" "$PYTHON" -m sidecar_image >/dev/null || say "Tests of the sidecar's image will fail."
    fi
}
