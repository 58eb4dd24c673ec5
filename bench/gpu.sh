#!/usr/bin/env bash
# One run on a machine with a GPU: the gpu tests, training steps side by side, the layer benchmark. What comes of it goes to
# $OUT (default bench/results): tests.txt (all test logs), steps.jsonl, layers.jsonl and their logs, summary.txt (counts and failures of the tests).
# Installs nothing, needs no network: python3 with torch, triton, pytest, pytest-xdist, hypothesis, rich, in whatever versions the
# machine has (so deprecations are no errors here). GISTKIT_COMMIT names the commit where the checkout has no history,
# or not the project's.
#
#   OUT=/tmp/out bench/gpu.sh           all of it, in eight to ten minutes on an H200
#   OUT=/tmp/out bench/gpu.sh tests     one part: tests, steps or layers (512 MiB; other sizes and dtypes: bench.layers, bench.steps)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
export OUT=${OUT:-bench/results}
mkdir -p "$OUT"
parts=${*:-tests steps layers}
status=0

# The budgets add up to 575 s; a part that exceeds its own is cut, and what it wrote until then stays.
part() {
    local name=$1 budget_s=$2 log=$3 start=$SECONDS code=0
    shift 3
    [[ " $parts " == *" $name "* ]] || return 0
    echo "== $name: $*"
    timeout --kill-after=10 "$budget_s" "$@" >"$log" 2>&1 || code=$?
    echo "== $name: exit status $code after $((SECONDS - start)) s"
    ((code == 0)) || status=1
}

# Most of a test's time is compilation on the CPU: many processes at once; but what measures the device is alone.
gpu_tests() {
    local all=(python3 -m pytest -m gpu -p no:cacheprovider -p no:benchmark --durations=5 -rsfE
        -W default::DeprecationWarning -W default::FutureWarning) apart=(tests/gpu/test_{calibrate,host,spill_runtime}.py) code=0
    OMP_NUM_THREADS=2 "${all[@]}" tests/gpu "${apart[@]/#/--ignore=}" -n "$(nproc)" --dist worksteal || code=$?
    "${all[@]}" "${apart[@]}" || code=$?
    return $code
}
export -f gpu_tests

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
python3 -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
part tests 300 "$OUT/tests.txt" bash -c gpu_tests
part steps 150 "$OUT/steps.log" python3 -m bench.steps --device cuda --out "$OUT/steps.jsonl" \
    --models vgg16,resnet50 --dtypes fp32 --batch 64 --image 224 --max-s 140
part layers 125 "$OUT/layers.log" python3 -m bench.layers --device cuda --sizes-mib 512 --max-s 118 \
    --out "$OUT/layers.jsonl"
[[ " $parts " == *" steps "* ]] && tail -n 45 "$OUT/steps.log"
if [[ " $parts " == *" tests "* ]]; then
    echo "== summary"
    grep -hE '^(FAILED|ERROR|[0-9]+ (passed|failed|skipped)|=+ .*(passed|failed|skipped))' "$OUT/tests.txt" | tee "$OUT/summary.txt"
fi
exit $status
