//! Everything that reads what it cannot trust, against arbitrary bytes.
//!
//! A target is a function of bytes that fails by panicking. It asserts what must hold whatever the bytes are — what memory may change,
//! how much work one notification makes, what is given back — and not only that nothing panics. The same functions run in two ways: as
//! plain tests, over a corpus and a fixed number of its mutations (`tests/replay.rs`), and under libFuzzer (`libfuzzer/`,
//! `cargo xtask fuzz`).
//!
//! | target | who is hostile | what it drives |
//! | --- | --- | --- |
//! | `mmio` | the guest | registers of both virtio devices, serial and reset port |
//! | `block` | the guest | requests to a disk |
//! | `vsock` | the guest | packets, with a host that reads and closes as it likes |
//! | `kernel`, `initramfs` | the file | loading into guest memory |
//! | `snapshot` | the file | state files, and a device that goes on from any state |
//! | `agent` | the host, or the stream between | the guest agent's readers, and content of files |
//! | `supervisor` | the guest's agent, the machine's process | the library's side of both |
//! | `tls`, `http`, `http2` | the guest | what is read of its connections before any of it leaves |
//! | `answers` | a server that has a secret | what it answers, without the secret |
//! | `dns` | a program of the guest | questions for names |
//! | `control` | the supervisor | the machine's side of the control socket |
#![forbid(unsafe_code)]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a target fails by panicking"
)]

pub mod agent;
pub mod block;
pub mod control;
mod disk;
pub mod egress;
pub mod http2;
pub mod input;
pub mod kernel;
mod machine;
mod memory;
pub mod mmio;
mod ring;
pub mod snapshot;
pub mod supervisor;
pub mod vsock;

use std::sync::Arc;
use std::sync::Once;
use std::sync::atomic::AtomicBool;

/// Keeps a write to a closed socket from ending the process, as Rust's runtime does in every program of ours; libFuzzer's `main` does not.
pub(crate) fn outlive_closed_sockets() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let nobody_looks = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(signal_hook::consts::SIGPIPE, nobody_looks)
            .expect("the signal may be handled");
    });
}

/// Inputs by their names.
pub type Seeds = Vec<(&'static str, Vec<u8>)>;

/// A target.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name: that of its folder in `corpus/` and of its program in `libfuzzer/`.
    pub name: &'static str,
    /// Runs it on these bytes; panics where something does not hold.
    pub run: fn(&[u8]),
    /// Makes the inputs of its corpus that are made and not found.
    pub seeds: fn() -> Seeds,
}

/// All targets.
pub const TARGETS: [Target; 14] = [
    Target {
        name: "mmio",
        run: mmio::run,
        seeds: mmio::seeds,
    },
    Target {
        name: "block",
        run: block::run,
        seeds: block::seeds,
    },
    Target {
        name: "vsock",
        run: vsock::run,
        seeds: vsock::seeds,
    },
    Target {
        name: "kernel",
        run: kernel::run,
        seeds: kernel::seeds,
    },
    Target {
        name: "initramfs",
        run: kernel::run_initramfs,
        seeds: kernel::initramfs_seeds,
    },
    Target {
        name: "snapshot",
        run: snapshot::run,
        seeds: snapshot::seeds,
    },
    Target {
        name: "agent",
        run: agent::run,
        seeds: agent::seeds,
    },
    Target {
        name: "supervisor",
        run: supervisor::run,
        seeds: supervisor::seeds,
    },
    Target {
        name: "tls",
        run: egress::run_tls,
        seeds: egress::tls_seeds,
    },
    Target {
        name: "http",
        run: egress::run_http,
        seeds: egress::http_seeds,
    },
    Target {
        name: "http2",
        run: http2::run,
        seeds: http2::seeds,
    },
    Target {
        name: "dns",
        run: egress::run_dns,
        seeds: egress::dns_seeds,
    },
    Target {
        name: "answers",
        run: egress::run_answers,
        seeds: egress::answers_seeds,
    },
    Target {
        name: "control",
        run: control::run,
        seeds: control::seeds,
    },
];
