//! Memory, and using up what there is.

use super::call::{Call, at, into};
use super::{Attempt, Target};

const PAGE_BYTES: i64 = 4096;

/// More address space than any machine has: 1 TiB more than the guest's memory.
const MUCH_BYTES: i64 = 1 << 40;

/// More descriptors than a machine may have.
const MANY: u32 = 2000;

const SAME_CODE: &str = "code that it could run anyway by returning into what is there";

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt::new("map memory that can be executed", map_executable).gain(SAME_CODE),
    Attempt::new("make its memory executable", make_executable).gain(SAME_CODE),
    Attempt::new("lock memory", lock).always("limit of locked memory"),
    Attempt::new("map more than it may", map_much).always("limit of address space"),
    Attempt::new("open descriptors without end", open_many).always("limit of descriptors"),
];

fn map(bytes: i64, protection: i32) -> i64 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    Call::new(libc::SYS_mmap)
        .with(&[0, bytes, protection.into(), flags.into(), -1, 0])
        .make()
}

fn map_executable(_: &Target) -> i64 {
    map(
        PAGE_BYTES,
        libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
    )
}

/// A page of memory of its own.
#[repr(align(4096))]
struct Page([u8; 4096]);

fn make_executable(_: &Target) -> i64 {
    let page = Box::new(Page([0; 4096]));
    let [first, ..] = &page.0;
    let address = at(first);
    let executable = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let protect = |protection: i32| {
        Call::new(libc::SYS_mprotect)
            .with(&[address, PAGE_BYTES, protection.into()])
            .make()
    };
    let result = protect(executable);
    if result == 0 {
        protect(libc::PROT_READ | libc::PROT_WRITE);
    }
    result
}

fn lock(_: &Target) -> i64 {
    let bytes = [0_u8; 64];
    Call::new(libc::SYS_mlock).with(&[at(&bytes), 64]).make()
}

fn map_much(_: &Target) -> i64 {
    map(MUCH_BYTES, libc::PROT_NONE)
}

fn open_many(_: &Target) -> i64 {
    let mut pair = [0_i32; 2];
    for _ in 0..MANY {
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        let result = Call::new(libc::SYS_socketpair)
            .with(&[libc::AF_UNIX.into(), kind.into(), 0, into(&mut pair)])
            .make();
        if result < 0 {
            return result;
        }
    }
    0
}
