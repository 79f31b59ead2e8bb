#!/usr/bin/env bash
# The tests of the crates with raw memory under AddressSanitizer.
#
#   tests/scripts/asan.sh [ARGUMENTS OF CARGO TEST]
#
# Toolchain: a nightly (ASAN_TOOLCHAIN, default nightly). Without arguments: shm-protocol, the
# engine's client and the Manager's library.
set -euo pipefail
cd "$(dirname "$0")/../.."

toolchain=${ASAN_TOOLCHAIN:-nightly}
if ! cargo "+$toolchain" --version >/dev/null 2>&1; then
  echo "asan.sh: needs a nightly toolchain: rustup toolchain install $toolchain" >&2
  exit 3
fi
host=$(rustc "+$toolchain" -vV | sed -n 's/^host: //p')
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/asan
export RUSTFLAGS="-Zsanitizer=address"
# Documentation tests are not instrumented. Forked children of tests leave by _exit: no leak check.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0}
if [ $# -eq 0 ]; then
  set -- -p orbitkv-shm-protocol -p orbitkv-engine -p orbitkv-manager --lib --tests
fi
exec cargo "+$toolchain" test --locked --target "$host" "$@"
