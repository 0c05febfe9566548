#!/bin/bash
# Checks the model of the commit and recovery protocol (commit.pml) with spin: every history of
# each configuration below. A mutant, which leaves one rule of the protocol out, must break
# exactly the promise that is named beside it, in a configuration that holds with the rule.
#
# Usage: tests/model/run.sh [--only NAME] [--trail] [--deep] [--json FILE]
#   --only NAME   one configuration or mutant
#   --trail       shows the history that broke a promise, step by step
#   --deep        larger configurations too: minutes, up to 4 GiB of memory
#   --json FILE   writes {"passed": [NAME...], "failed": [NAME...]}
# A line for each: states, longest history, memory, seconds, what was found. Exit code: 0 when
# all came out as they must, 1 otherwise, 2 for a wrong command line.
set -uo pipefail

readonly HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly MEMORY_MIB=4096
readonly DEPTH=2000000

only=
trail=
deep=
json=
while (($# > 0)); do
  case "$1" in
    --only | --json)
      if (($# < 2)); then
        echo "run.sh: $1 needs a value" >&2
        exit 2
      fi
      if [[ "$1" == --only ]]; then only=$2; else json=$(realpath -m -- "$2"); fi
      shift
      ;;
    --trail) trail=1 ;;
    --deep) deep=1 ;;
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

work=$(mktemp -d "${TMPDIR:-/tmp}/weightsync-model.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

passed=()
failed=()
declare -A known=()  # configurations that were searched -> what was found

# ---- The checkers: one for the promises, one for circles ----

if ! command -v spin >/dev/null; then
  echo "run.sh: spin is not installed; see deploy/install_deps.sh" >&2
  exit 1
fi
if ! spin -a "$HERE/commit.pml" >spin.out 2>&1; then
  cat spin.out
  exit 1
fi
compile() {
  gcc -O2 -w -DCOLLAPSE -DMEMLIM=$MEMORY_MIB "${@:2}" -o "$1" pan.c
}
compile promises -DSAFETY &
compile circles -DNP
status=$?
if ! wait $! || ((status != 0)); then
  echo "run.sh: the checker does not compile" >&2
  exit 1
fi

# ---- One search ----

# Sets `found`: "holds", what was broken, or why the search says nothing.
search() {
  local checker=$1
  shift
  rm -f ./*.trail
  env "$@" "./$checker" -m$DEPTH -w20 -n "${flags[@]}" >pan.out 2>&1
  states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.out)
  depth=$(sed -n 's/.*depth reached \([0-9]*\).*/\1/p' pan.out)
  memory=$(sed -n 's/^ *\([0-9.]*\)\ttotal actual memory usage.*/\1/p' pan.out)
  seconds=$(sed -n 's/^pan: elapsed time \([0-9.e+]*\) seconds.*/\1/p' pan.out)
  if grep -q 'errors: 0' pan.out; then
    found=holds
    if grep -Eq 'max search depth too small|Search not completed|reached -DMEMLIM' pan.out; then
      found="not finished"
    fi
  else
    found=$(sed -n 's/^pan:[0-9]*: //p' pan.out | head -1)
    case "$found" in
      'assertion violated  !('*) found=${found#*'!('} found=${found%%')'*} ;;
      'invalid end state'*) found=stuck ;;
      'non-progress cycle'*) found=circle ;;
      '') found="$(tail -1 pan.out)" ;;
    esac
  fi
}

# Each step as the line of commit.pml that it is.
show_trail() {
  local checker=$1
  shift
  env "$@" "./$checker" -r commit.pml.trail 2>/dev/null |
    sed -n 's/^ *[0-9]*:\tproc *[0-9]* (\([a-z_]*\)) *[^ ]*:\([0-9]*\) (state [0-9]*)\t*\[\([^(].*\)\]$/\1 \2 \3/p' |
    awk -v model="$HERE/commit.pml" '
      BEGIN { while ((getline line < model) > 0) { sub(/^ +/, "", line); text[++n] = line } }
      $3 !~ /^(else|goto|x|y|z|n|i|keep|what|was_servable)$/ && $2 != last {
        printf "    %-15s %s\n", $1, text[$2]
      }
      { last = $2 }'
}

# report NAME OK? WHAT
report() {
  printf '%-18s %9s states %6s deep %8s MiB %7s s  %s\n' "$1" "${states:-?}" "${depth:-?}" \
    "${memory:-?}" "${seconds:-?}" "$3"
  if [[ -n "$2" ]]; then passed+=("$1"); else failed+=("$1"); fi
}

wanted() { [[ -z "$only" || "$only" == "$1" ]]; }

# holds NAME VARIABLES...: no promise is ever broken, and nothing gets stuck.
holds() {
  local name=$1
  shift
  wanted "$name" || return 0
  flags=()
  search promises "$@"
  known["$*"]=$found
  if [[ "$found" == holds ]]; then
    report "$name" ok holds
  else
    report "$name" "" "WRONG: $found"
    [[ -z "$trail" ]] || show_trail promises "$@"
  fi
}

# ends NAME VARIABLES...: no history runs in a circle for ever.
ends() {
  local name=$1
  shift
  wanted "$name" || return 0
  flags=(-l)
  search circles "$@"
  if [[ "$found" == holds ]]; then
    report "$name" ok "no circles"
  else
    report "$name" "" "WRONG: $found"
    [[ -z "$trail" ]] || show_trail circles "$@"
  fi
}

# mutant RULE PROMISE VARIABLES...: breaks PROMISE, which holds with the rule.
mutants=()
mutant() {
  local rule=$1 promise=$2 number
  shift 2
  mutants+=("$rule")
  wanted "$rule" || return 0
  number=$(sed -n "s/^#define ${rule^^} \([0-9]*\) .*/\1/p" "$HERE/commit.pml")
  if [[ -z "${known["$*"]:-}" ]]; then
    flags=()
    search promises "$@"
    known["$*"]=$found
  fi
  # Of both kinds of failures only the one that is asked for.
  flags=(-E)
  [[ "$promise" != stuck ]] || flags=(-A)
  search promises "$@" "MUTANT=${number:?no such rule: $rule}"
  if [[ "${known["$*"]}" != holds ]]; then
    report "$rule" "" "WRONG: with the rule: ${known["$*"]}"
  elif [[ "$found" == "$promise" ]]; then
    report "$rule" ok "without this rule: $found"
  else
    report "$rule" "" "WRONG: without this rule: $found, not $promise"
  fi
  if [[ -n "$trail" ]]; then show_trail promises "$@" "MUTANT=$number"; fi
}

# ---- What is searched: see the head of commit.pml ----

echo "-- every history of"
holds calm UPDATES=2 ABORTS=1 HASTE=1 LOSSES=1
holds crashes UPDATES=1 CRASHES=2
holds breaks UPDATES=1 BREAKS=3
holds both UPDATES=2 ABORTS=1 CRASHES=1 BREAKS=1
holds haste UPDATES=1 CRASHES=1 BREAKS=1 HASTE=1
holds losses UPDATES=2 LOSSES=1 BREAKS=1 HASTE=1
holds fails UPDATES=1 FAILS=1 CRASHES=1 BREAKS=1
holds fence UPDATES=2 FAILS=2 BREAKS=1
holds rollback UPDATES=1 ROLLBACKS=1 CRASHES=1 BREAKS=1
holds one_node UPDATES=2 ABORTS=1 BREAKS=2 ONE_NODE=1
holds one_node_crashes UPDATES=1 CRASHES=2 BREAKS=1 ONE_NODE=1
holds one_node_haste UPDATES=1 CRASHES=1 BREAKS=1 HASTE=1 ONE_NODE=1
holds one_node_fails UPDATES=2 FAILS=1 BREAKS=1 ONE_NODE=1
holds second UPDATES=1 SECONDS=1 BREAKS=2
holds second_crashes UPDATES=1 SECONDS=1 CRASHES=1 BREAKS=1
holds empty_second UPDATES=1 SECONDS=2 CRASHES=1 BREAKS=1
holds all_together UPDATES=1 SECONDS=1 CRASHES=1 LOSSES=1 BREAKS=1
ends ends UPDATES=2 ABORTS=1 CRASHES=1 BREAKS=1
ends ends_late UPDATES=1 LOSSES=1 HASTE=1 FAILS=1 BREAKS=1
ends ends_one_node UPDATES=1 CRASHES=1 BREAKS=1 ONE_NODE=1
ends ends_second UPDATES=1 SECONDS=1 BREAKS=1
if [[ -n "$deep" ]]; then
  holds deep_crashes UPDATES=2 CRASHES=2 BREAKS=1 ABORTS=1
  holds deep_second UPDATES=1 SECONDS=1 BREAKS=2 HASTE=1
  holds deep_rollback UPDATES=1 ROLLBACKS=1 CRASHES=1 BREAKS=1 HASTE=1
  holds deep_one_node UPDATES=2 ABORTS=1 BREAKS=2 HASTE=1 ONE_NODE=1
  holds deep_fails UPDATES=2 FAILS=1 CRASHES=1 BREAKS=1 ONE_NODE=1
fi

echo "-- each rule is needed"
mutant tell_first serves_uncommitted UPDATES=1 CRASHES=1 ONE_NODE=1
mutant any_term commit_undone UPDATES=1 SECONDS=1 BREAKS=2
mutant one_is_all serves_while_writing UPDATES=1
mutant any_answer serves_while_writing UPDATES=2 ABORTS=1
mutant no_doubt serves_a_mix UPDATES=1 ROLLBACKS=1 BREAKS=1
mutant forgets_commit commit_undone UPDATES=1 CRASHES=1
mutant empty_journal serves_a_mix UPDATES=1 SECONDS=2 BREAKS=2
mutant no_deadline stuck UPDATES=1 LOSSES=1
mutant refuses_apart serves_a_mix UPDATES=1 BREAKS=1
mutant says_done serves_while_writing UPDATES=1 BREAKS=1
mutant stray_pause stuck UPDATES=1 CRASHES=1
mutant refuses_mix serves_a_mix UPDATES=1 CRASHES=2 BREAKS=1 ONE_NODE=1
mutant forgets_term serves_a_mix UPDATES=1 SECONDS=1 CRASHES=1 BREAKS=1
mutant says_old serves_a_mix UPDATES=1 ROLLBACKS=1 BREAKS=1
mutant sends_early serves_a_mix UPDATES=1 ROLLBACKS=1 CRASHES=1 BREAKS=1
mutant keeps_offer commit_undone UPDATES=2 FAILS=1 BREAKS=1 ONE_NODE=1

# Every rule that the model names is left out once.
rules=$(grep -cE '^#define [A-Z_]+ [0-9]+ +/\* .*\*/$' <(
  sed -n '/^\/\* Rules of the protocol/,/^#define LEFT/p' "$HERE/commit.pml"))
if ((rules != ${#mutants[@]})); then
  echo "WRONG: commit.pml names $rules rules, and ${#mutants[@]} are left out here"
  failed+=(all_rules)
fi

if ((${#passed[@]} + ${#failed[@]} == 0)); then
  echo "run.sh: there is no configuration named $only" >&2
  exit 2
fi
echo "${#passed[@]} as they must be, ${#failed[@]} not"
if [[ -n "$json" ]]; then
  quoted() {
    local separator=
    for name in "$@"; do
      printf '%s"%s"' "$separator" "$name"
      separator=', '
    done
  }
  printf '{"passed": [%s], "failed": [%s]}\n' "$(quoted "${passed[@]}")" \
    "$(quoted "${failed[@]}")" >"$json"
fi
((${#failed[@]} == 0))
