#!/usr/bin/env bash
# Coverage-guided fuzzing of every byte that comes from others (tests/fuzz/targets.rs).
#
#   tests/scripts/fuzz.sh [TARGET|all] [SECONDS]     default: all 60
#
# Toolchain: any, stable too, and a C++ compiler (libFuzzer is built from source by its crate).
# With FUZZ_ASAN=1 also AddressSanitizer: needs a nightly (FUZZ_TOOLCHAIN, default nightly).
# Inputs that were worth keeping stay in target/fuzz/corpus; one that fails is printed with its
# path: put it into tests/fuzz/found/TARGET/ when it is fixed, and every test run repeats it.
set -euo pipefail
cd "$(dirname "$0")/../.."

which=${1:-all}
seconds=${2:-60}
targets=(bootstrap request completion telemetry ssd)
missing() { echo "fuzz.sh: $*" >&2; exit 3; }

command -v cargo >/dev/null || missing "needs cargo: install Rust from https://rustup.rs"
command -v c++ >/dev/null || missing "needs a C++ compiler (c++) to build libFuzzer"
if [ "$which" != all ]; then
  [[ " ${targets[*]} " == *" $which "* ]] || missing "no target $which: ${targets[*]}"
  targets=("$which")
fi

flags="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
flags+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
flags+=" -Cllvm-args=-sanitizer-coverage-trace-compares -Clink-dead-code"
cargo=(cargo)
if [ "${FUZZ_ASAN:-0}" = 1 ]; then
  toolchain=${FUZZ_TOOLCHAIN:-nightly}
  cargo "+$toolchain" --version >/dev/null 2>&1 ||
    missing "FUZZ_ASAN=1 needs a nightly toolchain: rustup toolchain install $toolchain"
  cargo=(cargo "+$toolchain")
  flags+=" -Zsanitizer=address"
fi

host=$(rustc -vV | sed -n 's/^host: //p')
export CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}")/fuzz
# A target of its own, so that build scripts are not instrumented.
(cd tests/fuzz && RUSTFLAGS="$flags" "${cargo[@]}" build --release --locked --target "$host")
for target in "${targets[@]}"; do
  corpus=$CARGO_TARGET_DIR/corpus/$target
  mkdir -p "$corpus" "tests/fuzz/found/$target"
  echo "== $target, $seconds s"
  ORBITKV_FUZZ_SEEDS=$corpus "$CARGO_TARGET_DIR/$host/release/$target" "$corpus" "tests/fuzz/found/$target" \
    -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=2048 \
    -artifact_prefix="$CARGO_TARGET_DIR/$target-" -print_final_stats=1
  rmdir --ignore-fail-on-non-empty "tests/fuzz/found/$target" tests/fuzz/found
done
