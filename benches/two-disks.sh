#!/usr/bin/env bash
# Runs `orbitkv bench ssd` over two files on two loop devices, each with an ext4 of its own.
#
#   benches/two-disks.sh ORBITKV FOLDER [MIB_PER_S] [FLAGS OF BENCH SSD...]
#
# The images are made in FOLDER and removed at the end. With MIB_PER_S (cgroup v1, `blkio`) each
# device is held to that speed, so that the two do not share the speed of the disk below; 0 does
# not. Needs root.
set -euo pipefail

orbitkv=$(realpath "$1")
folder=$(mktemp -d "$(realpath "$2")/two-disks.XXXXXX")
limit=$((${3:-0} << 20))
shift $(($# < 3 ? $# : 3))
throttle=/sys/fs/cgroup/blkio
devices=()

clean() {
    for device in "${devices[@]}"; do
        # The kernel closes the files of a ring a moment after its process.
        for _ in {1..50}; do
            umount "$device" 2>/dev/null && break || sleep 0.1
        done
        if [ "$limit" -gt 0 ]; then
            number=$(lsblk -dno MAJ:MIN "$device" | tr -d ' ')
            echo "$number 0" >"$throttle/blkio.throttle.read_bps_device" || true
            echo "$number 0" >"$throttle/blkio.throttle.write_bps_device" || true
        fi
        losetup -d "$device" || true
    done
    rm -rf "$folder"
}
trap clean EXIT

paths=()
for disk in 0 1; do
    fallocate -l 1200MiB "$folder/image$disk"
    mkfs.ext4 -q -F -m 0 "$folder/image$disk"
    device=$(losetup --find --show --direct-io=on "$folder/image$disk")
    devices+=("$device")
    mkdir "$folder/disk$disk"
    mount "$device" "$folder/disk$disk"
    if [ "$limit" -gt 0 ]; then
        number=$(lsblk -dno MAJ:MIN "$device" | tr -d ' ')
        echo "$number $limit" >"$throttle/blkio.throttle.read_bps_device"
        echo "$number $limit" >"$throttle/blkio.throttle.write_bps_device"
    fi
    paths+=(--ssd "$folder/disk$disk/tier")
done
"$orbitkv" bench ssd "${paths[@]}" --size 2GiB "$@"
