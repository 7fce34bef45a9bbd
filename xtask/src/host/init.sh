#!/bin/busybox sh
# First program of the emulated host: loads drivers, makes the developer's file system its own, and hands over to xtask.
# The kernel's command line says xtask.agent=PATH, the path of xtask in that file system, with \\0NNN for unusual bytes.
set -f
export PATH=/bin
fail() {
    echo "emulated host: $1" >/dev/console
    /bin/busybox poweroff -f
}
/bin/busybox mount -t proc proc /proc || fail "cannot mount /proc"
while read -r module; do
    /bin/busybox insmod "/modules/$module" || fail "cannot load $module"
done </modules/order
agent=
for word in $(/bin/busybox cat /proc/cmdline); do
    case $word in xtask.agent=*) agent=${word#xtask.agent=} ;; esac
done
# The developer's root folder below, memory above: everything can be read, nothing that is written stays.
options=trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro
/bin/busybox mount -t 9p -o "$options" root /lower || fail "cannot mount the shared root folder"
/bin/busybox mount -t tmpfs -o mode=755 memory /upper || fail "cannot mount a tmpfs"
/bin/busybox mkdir /upper/files /upper/work
/bin/busybox mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work root /root ||
    fail "cannot mount the overlay"
/bin/busybox ip link set lo up || fail "cannot set loopback up"
/bin/busybox umount /proc
exec /bin/busybox switch_root /root "$(printf %b "$agent")" host-agent
