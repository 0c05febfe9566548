#!/bin/bash
# Runs every test of this repository; needs nothing done before. Works in a fresh clone, as root
# or (with the packages of deploy/install_deps.sh there) as a user.
#
# Usage: tests/run.sh [--fast] [--filter REGEX]
#   --fast          leaves out what takes minutes: large test targets, clusters of daemons that
#                   move real models, the protocol's model, chaos trials, the check that the
#                   benchmarks run
#   --filter REGEX  runs only the steps, Bazel targets and Python files whose name matches
#                   (extended regular expression), for example 'format', '//schedule',
#                   'reflection_test'
#
# The last line is `N passed, M failed`, with `, K skipped` where something was left out for a
# reason (no root, no hardware). Exit code: 0 when something ran and nothing failed, 1 otherwise,
# 2 for a wrong command line.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
readonly PYTHON=/usr/bin/python3
readonly VENV=.venv

fast=
filter=
while (($# > 0)); do
  case "$1" in
    --fast) fast=1 ;;
    --filter)
      if (($# < 2)); then
        echo "run.sh: --filter needs a regular expression" >&2
        exit 2
      fi
      filter=$2
      shift
      ;;
    --filter=*) filter=${1#--filter=} ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *)
      echo "run.sh: unknown argument: $1 (see --help)" >&2
      exit 2
      ;;
  esac
  shift
done

work=$(mktemp -d "${TMPDIR:-/tmp}/weightsync-tests.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

passed=0
failed=0
skipped=0
step_start=0

heading() {
  echo
  echo "=== $* ==="
  step_start=$SECONDS
}

took() {
  echo "--- took $((SECONDS - step_start)) s"
}

# Whether a name was asked for.
wanted() {
  [[ -z "$filter" ]] || grep -Eq -- "$filter" <<<"$1"
}

# Says it at once, and again at the end: `fail NAME [: WHY]`.
fail() {
  echo "FAILED $*" | tee -a "$work/failures"
  failed=$((failed + 1))
}

# A step that passes or fails as a whole: `check NAME COMMAND…`.
check() {
  local name=$1
  shift
  if "$@"; then
    passed=$((passed + 1))
  else
    fail "$name"
  fi
}

# Adds what a runner wrote: `add KIND FILE`, as count_results.py takes them.
add() {
  local p f s
  if ! read -r p f s < <("$PYTHON" tests/count_results.py "$@" 2>"$work/count") || [[ -z "$s" ]]; then
    cat "$work/count"
    fail "$1: the results could not be counted"
    return
  fi
  tee -a "$work/failures" <"$work/count"
  echo "$p passed, $f failed, $s skipped"
  passed=$((passed + p))
  failed=$((failed + f))
  skipped=$((skipped + s))
}

finish() {
  local line="$passed passed, $failed failed"
  if ((skipped > 0)); then
    line+=", $skipped skipped"
  fi
  echo
  if ((passed + failed == 0)); then
    echo "Nothing ran."
  fi
  if [[ -s $work/failures ]]; then
    echo "What failed:"
    cat "$work/failures"
    echo
  fi
  echo "$line"
  ((failed == 0 && passed > 0))
  exit
}

# Nothing below is for a terminal alone.
bazel_output=(--noshow_progress --color=no)
if [[ -t 1 ]]; then
  bazel_output=()
fi

check_format() {
  git ls-files -z '*.h' '*.cc' '*.cu' '*.cuh' |
    xargs -0 --no-run-if-empty clang-format --dry-run -Werror
}

# Writes the targets to test to $work/targets, one a line; none when the filter leaves none.
find_bazel_targets() {
  if [[ -z "$filter" ]]; then
    echo //... >"$work/targets"
    return
  fi
  : >"$work/targets"
  if ! bazel query --noshow_progress 'tests(//...)' >"$work/tests" 2>"$work/query"; then
    cat "$work/query" >&2
    return 1
  fi
  grep -E -- "$filter" "$work/tests" >"$work/targets" || true
}

# A virtual environment with exactly tests/requirements.txt; made anew when that changes.
make_venv() {
  local stamp=$VENV/requirements.txt
  if [[ -x $VENV/bin/python ]] && cmp -s tests/requirements.txt "$stamp"; then
    return 0
  fi
  rm -rf "$VENV"
  "$PYTHON" -m venv "$VENV" &&
    "$VENV/bin/pip" install --quiet --disable-pip-version-check --no-deps \
      --requirement tests/requirements.txt &&
    "$PYTHON" tests/torch_without_cuda.py "$VENV"/lib/python3*/site-packages &&
    cp tests/requirements.txt "$stamp"
}

# What the Python tests start. Without the programs and the package of this very tree they would try older ones.
build_programs() {
  bazel build "${bazel_output[@]}" //daemon:weightsyncd //client/ctl:weightsyncctl //client/cc:libweightsync.so \
    //tests/e2e/... //tests/readme/... //tests/bench/... //tests/chaos/... || return 1
  "$VENV/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --force-reinstall ./client/python
}

heading "dependencies"
if ! deploy/install_deps.sh; then
  fail dependencies
  finish
fi
took

if wanted format; then
  heading "format (clang-format)"
  check format check_format
  took
fi

if wanted includes; then
  heading "includes (who may know what)"
  check includes "$PYTHON" tests/check_includes.py
  took
fi

if ! find_bazel_targets; then
  fail "bazel: the targets could not be listed, so that none of them was tested"
fi
mapfile -t targets <"$work/targets"
if ((${#targets[@]} > 0)); then
  heading "bazel test ${targets[*]:0:3}"
  options=(--keep_going --build_event_json_file="$work/events.json")
  if [[ -n "$fast" ]]; then
    options+=(--test_size_filters=small,medium)
  fi
  bazel test "${bazel_output[@]}" "${options[@]}" -- "${targets[@]}"
  add bazel "$work/events.json"
  took
fi

python_tests=()
while IFS= read -r file; do
  if wanted "$file"; then
    python_tests+=("$file")
  fi
done < <(git ls-files 'tests/python/*_test.py')
if ((${#python_tests[@]} > 0)); then
  heading "environment of the Python tests"
  if make_venv; then
    took
    heading "programs of the Python tests"
    if build_programs; then
      took
      heading "pytest"
      options=(-p no:cacheprovider --junit-xml="$work/pytest.xml" -q)
      if [[ -n "$fast" ]]; then
        options+=(-m 'not slow')
      fi
      "$VENV/bin/python" -B -m pytest "${options[@]}" "${python_tests[@]}"
      add junit "$work/pytest.xml"
    else
      fail "pytest: the programs or client/python could not be built, so that no Python test ran"
    fi
    took
  else
    fail "environment: tests/requirements.txt could not be installed"
  fi
fi

if [[ -z "$fast" ]] && wanted model; then
  heading "model (each configuration and each mutant is a test)"
  tests/model/run.sh --json "$work/model.json" || echo "model: there are findings"
  add model "$work/model.json"
  took
fi

if [[ -z "$fast" ]] && wanted chaos; then
  heading "chaos (each trial is a test)"
  tests/chaos/run.sh --trials 32 --minutes 8 --seed 1 --json "$work/chaos.json" ||
    echo "chaos: there are findings"
  add chaos "$work/chaos.json"
  took
  heading "chaos on simulated GPUs (each trial is a test)"
  if [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; then
    # Of these seeds most trials are faults of agents and of communicators; together they take about
    # four minutes.
    for run in "tcp host 75" "nccl host 125" "tcp device 75" "nccl device 336"; do
      read -r group store seed <<<"$run"
      tests/chaos/run.sh --gpu "$group" --store "$store" --trials 6 --minutes 2 --seed "$seed" \
        --json "$work/chaos_${group}_$store.json" || echo "chaos: there are findings"
      add chaos "$work/chaos_${group}_$store.json"
    done
  else
    echo "skipped: no CUDA toolkit to build the simulator with"
    skipped=$((skipped + 1))
  fi
  took
fi

if [[ -z "$fast" ]] && wanted bench; then
  heading "bench (small sizes: that they run, not how fast)"
  if ((EUID == 0)); then
    # torch's gloo is measured as well.
    check bench eval 'make_venv && tests/bench/run.sh --smoke'
  else
    echo "skipped: network namespaces need root"
    skipped=$((skipped + 1))
  fi
  took
fi

finish
