#!/usr/bin/env bash
# Everything that a GPU must show, in under 8 minutes on one: kernels against their references, FP8 products, the
# block-INT8 update, whole training steps in bf16 and FP8. Each part has a time limit of its own; one that fails is
# reported and the others go on. Rows go to benchmarks/results, with machine and versions.
#
#   benchmarks/gpu.sh                    PYTHON=python3.12 benchmarks/gpu.sh      SKIP_INSTALL=1 benchmarks/gpu.sh
#
# Nothing is downloaded: torch (2.11 or newer) with its Triton and graphopt's other dependencies must be there, and
# transformers for the steps. Without a GPU all parts run at tiny sizes on the CPU, FP8 emulated, and rows go to a folder
# that is thrown away.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-470}  # seconds in all
# With fewer left, a part is not begun: importing torch alone takes several.
MIN_SECONDS=${MIN_SECONDS:-15}
failed=()

left() { echo $((LIMIT - SECONDS)); }

# part NAME SECONDS MODULE ARGUMENTS...
part() {
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  if (($(left) < MIN_SECONDS)); then
    echo "=== $name: not run, the time is over"
    failed+=("$name (not run)")
    return
  fi
  ((limit > $(left))) && limit=$(left)
  echo "=== $name (at most $limit s)"
  timeout --kill-after=10 "$limit" "$PYTHON" -W ignore -m "$@" --results "$RESULTS"
  status=$?
  ((status == 124 || status == 137)) && echo "stopped after $limit s"
  echo "=== $name: $( ((status)) && echo "FAILED (status $status)" || echo done ), $((SECONDS - started)) s"
  ((status)) && failed+=("$name")
}

if [[ -z ${SKIP_INSTALL:-} ]]; then
  timeout 90 "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e . \
    || echo "the checkout could not be installed (setuptools 77 or newer must be there); going on with what is installed"
fi
# From elsewhere, since the folder of the checkout is importable too, without its passes and kernels.
if ! (cd / && timeout 90 "$PYTHON" -W ignore -c '
import torch, triton, graphopt, graphopt.passes, graphopt.kernels
print("torch", torch.__version__, "triton", triton.__version__, "graphopt from", graphopt.__file__)'); then
  echo "graphopt cannot be imported: with setuptools 77 or newer, '$PYTHON -m pip install --no-build-isolation --no-deps -e .'" >&2
  exit 1
fi

if [[ $("$PYTHON" -c 'import torch; print(torch.cuda.is_available())') == True ]]; then
  DEVICE=gpu RESULTS=${RESULTS:-benchmarks/results}
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
else
  DEVICE=cpu RESULTS=${RESULTS:-$(mktemp -d)}
  echo "no GPU: tiny sizes on the CPU, FP8 emulated"
fi

# Most of each limit is compiling: about a second for each of some hundred kernels, which later parts find in the cache.
part "kernels against their references" 150 benchmarks.kernel_checks
part "FP8 products" 100 benchmarks.fp8_matmul
part "block-INT8 update" 40 benchmarks.update_traffic
part "step in bf16" 60 benchmarks.fp8_step --precisions bf16
part "step in FP8, tensorwise" 120 benchmarks.fp8_step --precisions tensorwise
part "step in FP8, rowwise" 100 benchmarks.fp8_step --precisions rowwise

echo "=== $SECONDS s in all; rows in $RESULTS"
[[ $DEVICE == cpu ]] && echo "no GPU row exists: this was a run on the CPU, of which no time counts"
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
