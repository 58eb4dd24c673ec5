#!/usr/bin/env bash
# One run on a machine with a GPU: the gpu tests, the layer benchmark, training steps side by side. Rows and logs go to $OUT
# (default bench/results). Installs nothing, needs no network: python3 with torch, triton, pytest, hypothesis, rich,
# in whatever versions the machine has (so deprecations are no errors here). GISTKIT_COMMIT names the commit where the
# checkout has no history, or not the project's.
#
#   OUT=/tmp/out bench/gpu.sh           all of it, under nine minutes on an H200
#   OUT=/tmp/out bench/gpu.sh tests     one part: tests, layers or steps
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=. PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
export OUT=${OUT:-bench/results}
mkdir -p "$OUT"
parts=${*:-tests steps layers}
status=0

# The budgets add up to 500 s; a part that exceeds its own is cut, and what it wrote until then stays.
part() {
    local name=$1 budget_s=$2 start=$SECONDS code=0
    shift 2
    [[ " $parts " == *" $name "* ]] || return 0
    echo "== $name: $*"
    timeout --kill-after=10 "$budget_s" "$@" >"$OUT/$name.log" 2>&1 || code=$?
    tail -n 60 "$OUT/$name.log"
    echo "== $name: exit status $code after $((SECONDS - start)) s"
    ((code == 0)) || status=1
}

# Most of a test's time is compilation on the CPU: one process a file, all at once.
test_file() {
    local log code=0
    log=$OUT/$(basename "$1" .py).log
    OMP_NUM_THREADS=2 python3 -m pytest "$1" -m gpu -p no:cacheprovider --durations=5 -rsfE \
        -W default::DeprecationWarning -W default::FutureWarning >"$log" 2>&1 || code=$?
    echo "== $1: exit status $code"
    tail -n 6 "$log"
    return "$code"
}
export -f test_file

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
python3 -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
part tests 160 bash -c 'printf "%s\0" tests/gpu/test_*.py | xargs -0 -P 16 -I{} bash -c "test_file {}"'
part steps 170 python3 -m bench.steps --device cuda --out "$OUT/steps.jsonl" --models vgg16,resnet50 --batch 64 --image 224 \
    --max-s 140
part layers 170 python3 -m bench.run --device cuda --out "$OUT/layers.jsonl" --sizes-mib 512,64,256 --max-s 150
exit $status
