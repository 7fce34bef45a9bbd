//! Files, programs, and descriptors.

use super::call::{Call, at, in_child};
use super::{Attempt, Target};

const NO_CAPABILITY: &str = "no capability";
const AS_OPENED: &str = "descriptors as they were handed";

/// Descriptors that a machine of the tests has, and far beyond: from the first that is its machine's.
const OWN: std::ops::Range<i64> = 3..64;
const BEYOND: std::ops::Range<i64> = 64..1024;

/// Size of each disk.
const DISK_BYTES: i64 = 2048 * 512;

/// `KVM_CREATE_VM` and `TIOCSTI`.
const CREATE_VM: i64 = 0xae01;
const TYPE_A_KEY: i64 = 0x5412;

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt::new("open a file", open)
        .namespaces("empty root")
        .landlock(1),
    Attempt::new("make a file", make_file)
        .namespaces("empty root")
        .landlock(1),
    Attempt::new("open its own memory as a file", open_memory)
        .namespaces("no /proc")
        .landlock(1),
    Attempt::new("open a file by its handle", open_by_handle).always(NO_CAPABILITY),
    Attempt::new("make a device", make_device)
        .namespaces("empty root")
        .landlock(1)
        .always(NO_CAPABILITY),
    Attempt::new("change its root", change_root).always(NO_CAPABILITY),
    Attempt::new("execute a program", execute)
        .namespaces("empty root")
        .landlock(1),
    Attempt::new("execute what it holds in memory", execute_memory)
        .gain("code that it could run anyway, in the same cell"),
    Attempt::new("write to a disk that is read-only", write_read_only).always(AS_OPENED),
    Attempt::new("write behind the end of a disk", write_behind).always("limit of a file's size"),
    Attempt::new(
        "write to a descriptor of its supervisor's",
        write_to_strange,
    )
    .always(AS_OPENED),
    Attempt::new("make a virtual machine", make_machine).always("/dev/kvm is closed"),
    Attempt::new("type into a terminal", type_a_key).always("no terminal"),
];

/// What opens a file; it is closed again, not to be in the way of what is tried next.
fn opened(call: Call) -> i64 {
    let result = call.make();
    if result >= 0 {
        Call::new(libc::SYS_close).with(&[result]).make();
    }
    result
}

fn open(_: &Target) -> i64 {
    opened(Call::new(libc::SYS_open).with(&[at(c"/etc/passwd"), i64::from(libc::O_RDONLY)]))
}

/// One without a name, in memory: nothing is left of it.
fn make_file(_: &Target) -> i64 {
    let flags = libc::O_TMPFILE | libc::O_WRONLY;
    opened(Call::new(libc::SYS_openat).with(&[
        libc::AT_FDCWD.into(),
        at(c"/dev/shm"),
        flags.into(),
        0o600,
    ]))
}

fn open_memory(_: &Target) -> i64 {
    opened(Call::new(libc::SYS_openat).with(&[
        libc::AT_FDCWD.into(),
        at(c"/proc/self/mem"),
        libc::O_RDWR.into(),
    ]))
}

fn open_by_handle(_: &Target) -> i64 {
    // 8 bytes of a file's handle, of the first kind, to be looked up where `/dev/null` is.
    let handle: [u32; 4] = [8, 1, 2, 0];
    Call::new(libc::SYS_open_by_handle_at)
        .with(&[1, at(&handle), libc::O_RDONLY.into()])
        .make()
}

fn make_device(_: &Target) -> i64 {
    // `/dev/mem` by another name; nothing is left where it fails, as it must.
    Call::new(libc::SYS_mknod)
        .with(&[
            at(c"/tmp/sandvmm-attack-device"),
            (libc::S_IFCHR | 0o600).into(),
            0x101,
        ])
        .make()
}

fn change_root(_: &Target) -> i64 {
    Call::new(libc::SYS_chroot).with(&[at(c"/")]).make()
}

fn execute(target: &Target) -> i64 {
    let path = c"/bin/true";
    let arguments = [path.as_ptr(), std::ptr::null()];
    let call = Call::new(libc::SYS_execve).with(&[at(path), at(&arguments)]);
    if target.is_direct {
        call.make()
    } else {
        in_child(|| call.make())
    }
}

/// The program is none: where that is what is found out, it would have been executed.
fn execute_memory(_: &Target) -> i64 {
    let file = Call::new(libc::SYS_memfd_create).with(&[at(c"x")]).make();
    if file < 0 {
        return file;
    }
    Call::new(libc::SYS_write)
        .with(&[file, at(b"no"), 2])
        .make();
    let result = Call::new(libc::SYS_execveat)
        .with(&[file, at(c""), 0, 0, libc::AT_EMPTY_PATH.into()])
        .make();
    Call::new(libc::SYS_close).with(&[file]).make();
    if result == -i64::from(libc::ENOEXEC) {
        0
    } else {
        result
    }
}

/// The best result of a call on each of these descriptors.
fn any(descriptors: std::ops::Range<i64>, call: impl Fn(i64) -> Call) -> i64 {
    descriptors
        .map(|descriptor| call(descriptor).make())
        .max()
        .unwrap_or(-1)
}

/// One disk is the guest's to write, and no other file is.
fn write_read_only(_: &Target) -> i64 {
    let written = OWN
        .filter(|descriptor| {
            Call::new(libc::SYS_pwrite64)
                .with(&[*descriptor, at(b"x"), 1, 0])
                .make()
                > 0
        })
        .count();
    match written {
        1 => -i64::from(libc::EBADF),
        _ => 0,
    }
}

fn write_behind(_: &Target) -> i64 {
    let too_big = -i64::from(libc::EFBIG);
    let mut result = -1;
    for descriptor in OWN {
        match Call::new(libc::SYS_pwrite64)
            .with(&[descriptor, at(b"x"), 1, DISK_BYTES])
            .make()
        {
            written @ 0.. => return written,
            // What the writable disk says, among all that are no files.
            error if error == too_big => result = error,
            _ => {}
        }
    }
    result
}

fn write_to_strange(_: &Target) -> i64 {
    any(BEYOND, |descriptor| {
        Call::new(libc::SYS_write).with(&[descriptor, at(b"x"), 1])
    })
}

fn make_machine(_: &Target) -> i64 {
    any(0..64, |descriptor| {
        Call::new(libc::SYS_ioctl).with(&[descriptor, CREATE_VM])
    })
}

fn type_a_key(_: &Target) -> i64 {
    any(0..3, |descriptor| {
        Call::new(libc::SYS_ioctl).with(&[descriptor, TYPE_A_KEY, at(b"x")])
    })
}
