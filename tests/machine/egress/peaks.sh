# The most that a process and those that it started had until it ended: threads and descriptors of its own, KiB of memory of
# its own, and KiB of the largest of the others.
#
#     peaks.sh PID
threads=0 descriptors=0 own=0 other=0
resident() {
    sed -n 's/^VmHWM:[^0-9]*\([0-9]*\).*/\1/p' "/proc/$1/status"
}
larger() {
    if [ "${2:-0}" -gt "$1" ]; then echo "$2"; else echo "$1"; fi
}
while [ -e "/proc/$1/exe" ]; do
    threads=$(larger $threads "$(ls "/proc/$1/task" | wc -l)")
    descriptors=$(larger $descriptors "$(ls "/proc/$1/fd" | wc -l)")
    own=$(larger $own "$(resident "$1")")
    for child in $(cat /proc/"$1"/task/*/children); do
        other=$(larger $other "$(resident "$child")")
    done
    sleep 0.3
done 2> /dev/null
echo "$threads $descriptors $own $other"
