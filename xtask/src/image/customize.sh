# Finishes the root image's files: run as root, outside them, when the packages are installed, with their folder as $1.
set -eu
root=$1

# The account that programs run as, unless told otherwise.
echo 'sandbox:x:1000:1000:sandbox:/home/sandbox:/bin/bash' >>"$root/etc/passwd"
echo 'sandbox:x:1000:' >>"$root/etc/group"
echo 'sandbox:!:1:0:99999:7:::' >>"$root/etc/shadow"
install -d -m 0755 -o 1000 -g 1000 "$root/home/sandbox"
# The day of the build is no password's age.
sed -i -E 's/^([^:]*:[^:]*):[0-9]+:/\1:1:/' "$root/etc/shadow"

printf '127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n' >"$root/etc/hosts"
: >"$root/etc/machine-id"
: >"$root/etc/fstab"
rm -f "$root/etc/hostname" "$root/etc/resolv.conf"

# Compiled once, here, and never checked against the sources again: all files of the image have the same time, which Python's
# usual check would take for a change, and a check is a system call for every module.
find "$root/usr/lib/python3" "$root/usr/lib/python3.11" -name __pycache__ -prune -exec rm -rf {} +
PYTHONHASHSEED=0 chroot "$root" /usr/bin/python3 -m compileall -q --invalidation-mode unchecked-hash \
    -x '/(test|tests|idle_test|lib2to3/tests)/' /usr/lib/python3 /usr/lib/python3.11

# What the build left, what names this machine or this day, and what only a person reads.
rm -rf "$root"/var/lib/apt/* "$root"/var/cache/* "$root"/var/log/* "$root"/var/backups/* "$root"/tmp/* "$root"/run/* \
    "$root"/etc/apt "$root"/etc/passwd- "$root"/etc/group- "$root"/etc/shadow- "$root"/etc/gshadow- \
    "$root"/var/lib/dpkg/*-old "$root"/var/lib/dpkg/lock* "$root"/var/lib/dpkg/triggers/Lock \
    "$root"/usr/share/doc "$root"/usr/share/man "$root"/usr/share/info "$root"/usr/share/locale "$root"/usr/share/lintian \
    "$root"/usr/share/bash-completion
# The guest's kernel makes the devices.
find "$root/dev" -mindepth 1 -delete
