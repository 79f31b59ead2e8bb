#!/usr/bin/env bash
# Rings, doorbells, records and SSD formats under Miri: undefined behaviour and data races on heap
# memory. Mapped memory, sockets and forks are out of its reach.
#
#   tests/scripts/miri.sh [ARGUMENTS OF CARGO MIRI TEST]
#
# Toolchain: a nightly with the components miri and rust-src (MIRI_TOOLCHAIN, default nightly).
# PROPTEST_CASES (default 4) sets the number of random cases.
set -euo pipefail
cd "$(dirname "$0")/../.."

toolchain=${MIRI_TOOLCHAIN:-nightly}
if ! cargo "+$toolchain" miri --version >/dev/null 2>&1; then
  echo "miri.sh: needs miri: rustup toolchain install $toolchain --component miri rust-src" >&2
  exit 3
fi
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/miri
export PROPTEST_CASES=${PROPTEST_CASES:-4}
# Monotonic time and the environment are the host's.
export MIRIFLAGS=${MIRIFLAGS:--Zmiri-disable-isolation}
if [ $# -gt 0 ]; then
  exec cargo "+$toolchain" miri test --locked "$@"
fi
cargo "+$toolchain" miri test --locked -p orbitkv-shm-protocol --lib -- memory:: layout ids
cargo "+$toolchain" miri test --locked -p orbitkv-shm-protocol --test ring --test wire -- \
  --skip all_short_histories --skip records_cross_threads
