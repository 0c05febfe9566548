#!/bin/bash
# Installs what building, testing and running weightsync needs on Debian 12 (and
# distributions with the same package names). Safe to run again: it returns at
# once when everything is there. CUDA and NCCL are not installed; the build uses
# them where it finds them.
#
# Usage: install_deps.sh [--check]
#   --check  install nothing; exit with 1 and name what is missing
set -euo pipefail

readonly PACKAGES=(
  # Build.
  bazel-bootstrap
  bazel-platforms
  bazel-rules-java
  bazel-rules-proto
  clang
  clang-format
  g++
  git
  python3
  # Libraries.
  libabsl-dev
  libbenchmark-dev
  libcivetweb-dev
  libgflags-dev
  libgmock-dev
  libgoogle-glog-dev
  libgrpc++-dev
  libgtest-dev
  libprotobuf-dev
  libre2-dev
  libssl-dev
  libxxhash-dev
  nlohmann-json3-dev
  prometheus-cpp-dev
  protobuf-compiler
  protobuf-compiler-grpc
  # Tests: several hosts on one machine, with links that can be slowed and cut.
  iproute2
  nftables
  procps
  # Tests: the model of the protocol.
  spin
  # The Python client; Debian's own gRPC for Python, which its stubs must run with.
  binutils
  python3-dev
  python3-grpcio
  python3-numpy
  python3-protobuf
  python3-pytest
  python3-venv
  # Tests: a client in another language.
  ruby
  ruby-grpc
  # Trying things out.
  curl
  jq
  openssl
)

if ! command -v dpkg-query >/dev/null; then
  echo "install_deps.sh: this is no Debian-like system. Install the equivalents of:" >&2
  printf '  %s\n' "${PACKAGES[@]}" >&2
  exit 1
fi

# One query for all: dpkg-query is slow to start, and it names what it does not
# know only on stderr.
installed=$(dpkg-query --show --showformat='${Package} ${db:Status-Status}\n' \
  "${PACKAGES[@]}" 2>/dev/null | sed -n 's/ installed$//p' || true)

missing=()
for package in "${PACKAGES[@]}"; do
  if ! grep -qxF -- "$package" <<<"$installed"; then
    missing+=("$package")
  fi
done

if ((${#missing[@]} == 0)); then
  echo "install_deps.sh: everything is installed."
  exit 0
fi
echo "install_deps.sh: missing: ${missing[*]}" >&2
if [[ "${1:-}" == --check ]]; then
  exit 1
fi
if ((EUID != 0)); then
  echo "install_deps.sh: only root can install them: sudo $0" >&2
  exit 1
fi

export DEBIAN_FRONTEND=noninteractive
# Lists that are fresh enough make the update unnecessary; a stale one shows as
# a failed install.
apt-get install -y --no-install-recommends "${missing[@]}" || {
  apt-get update
  apt-get install -y --no-install-recommends "${missing[@]}"
}
