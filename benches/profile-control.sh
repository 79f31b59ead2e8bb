#!/usr/bin/env bash
# Instructions that the Manager executes for one query, by function.
#
# The Manager runs under callgrind, a plain client asks a fixed number of times: once SHORT and once
# LONG times. What the two runs differ by, over the queries that they differ by, is what one query
# with its release costs; start-up, attaching and saving cancel out. Counts repeat from run to run;
# times under callgrind mean nothing.
#
#   benches/profile-control.sh [PAGES]...      default: 1 128
#   SHORT=500 LONG=2500 TOP=25 benches/profile-control.sh 1
#
# The Manager sleeps before every request here, and what it does before a sleep (service::report) is
# in the counts. Valgrind 3.19 knows no futex_waitv, so the Manager naps instead.
set -euo pipefail
cd "$(dirname "$0")/.."

SHORT=${SHORT:-500}
LONG=${LONG:-2500}
TOP=${TOP:-25}
[ $# -gt 0 ] || set -- 1 128

if ! command -v valgrind >/dev/null || ! command -v callgrind_annotate >/dev/null; then
  echo "valgrind is needed: apt-get install valgrind, dnf install valgrind, or pacman -S valgrind" >&2
  exit 3
fi

# Valgrind hides the vDSO from libc but not from a raw system call: rustix has to ask libc.
target=${CARGO_TARGET_DIR:-target}/callgrind
[ -n "${NO_BUILD:-}" ] || cargo build --quiet --release --locked -p orbitkv-tools --features rustix/use-libc-auxv --target-dir "$target"
orbitkv=$(realpath "$target/release/orbitkv")

folder=$(mktemp -d)
manager=
cleanup() {
  [ -z "$manager" ] || kill -TERM "$manager" 2>/dev/null || true
  [ -z "$manager" ] || wait "$manager" 2>/dev/null || true
  rm -rf "$folder"
}
trap cleanup EXIT

# One job of a process of the benchmark: what it is, then the line that lets it begin.
part() {
  printf '%s\n\n' "{\"cpus\":$cpus,\"work\":$1}" | "$orbitkv" bench-part
}

# Manager and client share the first CPU that this shell may use, so that neither spins: turns of the
# reactor that find nothing would be in the counts.
list=$(taskset -cp $$ | sed 's/.*: //')
first=${list%%[-,]*}
cpus="[$first]"

# count PAGES QUERIES FILE: self cost of every function, tab separated, the largest first.
count() {
  local socket=$folder/socket
  taskset -c "$first" valgrind --tool=callgrind --callgrind-out-file="$folder/callgrind" \
    "$orbitkv" serve --socket "$socket" --dram 64MiB >"$folder/out" 2>"$folder/log" &
  manager=$!
  for _ in $(seq 600); do
    grep -q '^ready ' "$folder/out" && break
    kill -0 "$manager" 2>/dev/null || { tail -n 20 "$folder/log" >&2; exit 3; }
    sleep 0.1
  done
  part "{\"Save\":{\"socket\":\"$socket\",\"chains\":1}}" | grep -q Saved.*1024
  part "{\"RoundTrips\":{\"socket\":\"$socket\",\"chains\":1,\"asks\":[{\"Query\":{\"pages\":$1,\"one_chain\":true}}],\"wait\":\"Park\",\"length\":{\"slice_ns\":3600000000000,\"count_max\":$2}}}" |
    grep -q Times
  kill -TERM "$manager"
  wait "$manager"
  manager=
  callgrind_annotate --auto=no --threshold=100 "$folder/callgrind" 2>/dev/null |
    sed -n 's/^ *\([0-9,]*\) *([ 0-9.]*%)  *\(.*\)$/\1\t\2/p' | grep -v 'PROGRAM TOTALS' | sed 's/^\([0-9]*\),/\1/; :a; s/^\([0-9]*\),/\1/; ta' |
    sed 's/ \[[^]]*\]$//; s/\t[^:]*:/\t/' |
    awk -F '\t' '{ sum[$2] += $1 } END { for (name in sum) printf "%s\t%s\n", name, sum[name] }' >"$3"
}

for pages in "$@"; do
  count "$pages" "$SHORT" "$folder/short"
  count "$pages" "$LONG" "$folder/long"
  echo "instructions of the Manager for one query of $pages page(s) and its release"
  awk -F '\t' -v n="$((LONG - SHORT))" '
    NR == FNR { before[$1] = $2; next }
    { each = ($2 - before[$1]) / n; all += each; if (each >= 1 || each <= -1) printf "%10.1f  %s\n", each, $1 }
    END { printf "%10.1f  all of them\n", all }
  ' "$folder/short" "$folder/long" | sort -rn | head -n "$TOP"
  echo
done
