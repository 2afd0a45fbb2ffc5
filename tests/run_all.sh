#!/usr/bin/env bash
# Every test, in the processes they need: triton's interpreter and its compiler cannot share one.
# Usage: PYTHON=.venv/bin/python tests/run_all.sh
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
# Active waiting of OpenMP makes two-thread tests crawl on a busy machine.
export OMP_WAIT_POLICY=PASSIVE
failed=()

run() {
    local name=$1
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}

run "kernels, interpreted" env TRITON_INTERPRET=1 "$python" -m pytest -q tests/kernels -m "not slow"
run "kernels, compiled for sm_90" "$python" -m pytest -q tests/kernels -m "not slow"
old_triton=$("$python" tests/kernels/triton_versions.py 3.6.0) || failed+=("fetching triton 3.6.0")
run "kernels, compiled for sm_90 by triton 3.6.0" env PYTHONPATH="$old_triton" "$python" -m pytest -q tests/kernels -m "not slow"
run "server" "$python" -m pytest -q tests/server
run "engine" "$python" -m pytest -q tests --ignore=tests/kernels --ignore=tests/server

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
