#!/usr/bin/env bash
# All checks that need an NVIDIA GPU, the most important ones first, each for a limited time: at most 590 s together.
# The logs are in $OUT. GPU_PYTHON is a Python with PyTorch, pytest and pytest-xdist.
set -u
export PYTHONUNBUFFERED=1 OUT=${OUT:-/tmp/pipework-gpu}
python=${GPU_PYTHON:-python3}
tests=("$python" -m pytest -q -p no:benchmark -p no:cacheprovider -m "gpu and not slow" --tb=short)
speed=("$python" -m benchmarks.gpu.run --quick --case)
mkdir -p "$OUT"

check() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 start=$SECONDS
  timeout -k 5 "$seconds" "${@:3}" > "$OUT/$name.log" 2>&1
  echo "== $name: status $? after $((SECONDS - start)) s of $seconds"
  grep -E '^(FAILED|ERROR|E  |REACHED|MISSED|\|)|passed|failed|[Ee]rror:' "$OUT/$name.log" | cut -c1-180 | tail -n 24
}

check captured-steps 80 "${tests[@]}" -n 4 tests/gpu/test_graphs.py
check graphs-small 50 "${speed[@]}" graphs-small
check two-ranks 70 "${tests[@]}" tests/gpu/test_nccl.py
check llama-graphs 70 "${speed[@]}" llama-graphs
check graphs 60 "${speed[@]}" graphs
check offload 70 "$python" -m benchmarks.offload.run --quick --device cuda:0
check check-device 45 "$python" -m pipework check-device --seconds 10
mapfile -t marked < <("$python" -c 'from tests.gpu.run import marked; print(*marked(), sep="\n")')
check marked-gpu 145 "${tests[@]}" -n 8 "${marked[@]}"
