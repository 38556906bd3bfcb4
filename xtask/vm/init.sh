#!/bin/busybox sh
# /init of the guest: puts the host's root, read-only over 9p with everything written kept in memory, in the place of
# its own, runs $SHARE/run there, and tells its exit code on the console. The caller waits for that line: a guest that
# panics ends qemu with code 0 as well.
export PATH=/bin:/sbin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for fd in 0:stdin 1:stdout 2:stderr; do ln -s /proc/self/fd/${fd%:*} /dev/${fd#*:}; done
ln -s /proc/self/fd /dev/fd
mkdir -p /dev/pts /dev/shm /lower /written /host
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t debugfs debug /sys/kernel/debug
mount -t tracefs tracing /sys/kernel/tracing
ip link set lo up

fail() {
	echo "podmirror-vm: $*" >/dev/console
	poweroff -f
}
for module in virtio_pci 9pnet_virtio 9p overlay; do modprobe $module || fail "no module $module"; done
# All others now and not at their first use. Two tests can ask for the same driver at the same time, and busybox's
# modprobe says that a module is there while another process still loads it. Also, nothing makes the device file of tun
# before that module is there.
for module in $(cat /modules); do modprobe $module 2>/dev/null; done
nine="trans=virtio,version=9p2000.L,msize=131072"
mount -t 9p -o ro,cache=loose,$nine root /lower || fail "the host's root cannot be mounted"
mount -t tmpfs written /written
mkdir /written/upper /written/work
mount -t overlay -o lowerdir=/lower,upperdir=/written/upper,workdir=/written/work overlay /host || fail "no overlay"
for dir in proc sys dev; do mount --rbind /$dir /host/$dir; done
mount -t tmpfs -o mode=0755 run /host/run
mkdir -p /host/run/share /host/lib/modules
mount -t 9p -o rw,$nine share /host/run/share || fail "the shared directory cannot be mounted"
mount --bind /lib/modules /host/lib/modules
# The host's root may have no kmod, and the scripts in it want modprobe.
mkdir -p /host/run/bin
cp /bin/busybox /host/run/bin/modprobe
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/bin HOME=/root
/bin/busybox chroot /host /bin/sh /run/share/run </dev/null >/dev/console 2>&1
echo "podmirror-vm: exit code $?" >/dev/console
/bin/busybox poweroff -f
