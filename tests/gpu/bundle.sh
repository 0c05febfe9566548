#!/bin/bash
# Packs programs with their shared libraries for a machine that has a GPU and little else.
#
# Usage: bundle.sh [--output FILE] SCRIPT_OR_PROGRAM…
#   --output FILE  default: gpu_bundle.tar.gz in the workspace
#
# Left out: the C library and its parts (the machine's own must be used; GLIBC says which is
# needed), the driver's libraries, and NCCL's, which the programs load when they need it.
set -euo pipefail

# Larger ones are a nuisance to copy to a machine that is paid by the minute.
readonly MAX_BYTES=$((64 << 20))
readonly LEFT_OUT='^(ld-linux.*|libc|libm|libdl|librt|libpthread|libresolv|libutil|libanl|libcuda|libnvidia.*|libnccl)\.so'

output=${BUILD_WORKSPACE_DIRECTORY:-$PWD}/gpu_bundle.tar.gz
if [[ "${1:-}" == --output ]]; then
  output=$2
  shift 2
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/gpu_bundle.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/gpu_bundle
mkdir -p "$root/lib"
binaries=()
for program in "$@"; do
  name=$(basename "$program")
  cp -L "$program" "$root/$name"
  [[ "$name" != *.sh ]] || continue
  binaries+=("$root/$name")
  # The first place that is looked at, for what a library needs as well.
  if ! readelf -d "$program" | grep -F 'RPATH' | grep -qF '[$ORIGIN/lib'; then
    echo "bundle.sh: $program has no run path of \$ORIGIN/lib: link it with --disable-new-dtags" >&2
    exit 1
  fi
  while read -r soname path; do
    if [[ ! "$soname" =~ $LEFT_OUT ]]; then
      cp -Ln "$path" "$root/lib/$soname"
    fi
  done < <(ldd "$program" | awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 }')
  if ldd "$program" | grep 'not found'; then
    echo "bundle.sh: $program lacks libraries here" >&2
    exit 1
  fi
done
chmod -R u+w "$root"
# What nobody reads on that machine.
strip --strip-all "${binaries[@]}" 2>/dev/null || true
strip --strip-debug "$root"/lib/*.so* 2>/dev/null || true
objdump -T "${binaries[@]}" "$root"/lib/* | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' |
  sort -uV | tail -1 >"$root/GLIBC"

tar -C "$work" -czf "$output" gpu_bundle
bytes=$(stat -c %s "$output")
unpacked=$(du -sb "$root" | awk '{ print $1 }')
if ((unpacked > MAX_BYTES)); then
  echo "bundle.sh: $unpacked bytes, more than $MAX_BYTES" >&2
  exit 1
fi
echo "$output: $bytes bytes, $unpacked unpacked, $(find "$root/lib" -type f | wc -l) libraries, glibc $(cat "$root/GLIBC") or newer"
