//! Every target over its corpus, and over a fixed number of mutations of it: the same ones every time, without a nightly toolchain and
//! without a fuzzer, in some seconds.

#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "an expectation that is not met is a failed test"
)]

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use sandvmm_fuzz::{TARGETS, Target};

/// Mutations of a target's corpus that are run, where they take no longer than [`TIME_MAX`].
const MUTATIONS: u32 = 3000;

/// The longest that a target's mutations take; a slow host runs fewer of them.
const TIME_MAX: Duration = Duration::from_secs(4);

/// The longest mutation, in bytes.
const BYTES_MAX: usize = 4096;

/// How much more memory this process may ever have had after a target than before it, in KiB: the guest memory and the files that the
/// targets make are below 40 MiB together.
const GROWTH_KIB_MAX: u64 = 96 << 10;

/// Targets look at the process's descriptors and memory: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A test for each target: without one of them this does not compile.
const _: [fn(); TARGETS.len()] = [
    mmio, block, vsock, kernel, initramfs, snapshot, agent, supervisor, tls, http, http2, answers,
    dns, control,
];

#[test]
fn mmio() {
    replay("mmio");
}

#[test]
fn block() {
    replay("block");
}

#[test]
fn vsock() {
    replay("vsock");
}

#[test]
fn kernel() {
    replay("kernel");
}

#[test]
fn initramfs() {
    replay("initramfs");
}

#[test]
fn snapshot() {
    replay("snapshot");
}

#[test]
fn agent() {
    replay("agent");
}

#[test]
fn supervisor() {
    replay("supervisor");
}

#[test]
fn tls() {
    replay("tls");
}

#[test]
fn http() {
    replay("http");
}

#[test]
fn http2() {
    replay("http2");
}

#[test]
fn answers() {
    replay("answers");
}

#[test]
fn dns() {
    replay("dns");
}

#[test]
fn control() {
    replay("control");
}

/// What is made anew is what is in the repository: see `examples/corpus.rs`.
#[test]
fn the_corpus_is_current() {
    for target in TARGETS {
        let made: BTreeMap<String, Vec<u8>> = (target.seeds)()
            .into_iter()
            .map(|(name, bytes)| (name.to_owned(), bytes))
            .collect();
        let mut kept: BTreeMap<String, Vec<u8>> = corpus(target.name)
            .into_iter()
            .map(|(path, bytes)| (name(&path), bytes))
            .collect();
        kept.retain(|name, _| !name.starts_with("found-"));
        assert!(
            made == kept,
            "{}: run `cargo run -p sandvmm-fuzz --example corpus`",
            target.name
        );
    }
}

/// Each target is a program for libFuzzer, and each of these a target.
#[test]
fn libfuzzer_has_every_target() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("libfuzzer/fuzz_targets");
    let mut programs: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| name(&entry.unwrap().path().with_extension("")))
        .collect();
    let mut targets: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    programs.sort();
    targets.sort_unstable();
    assert_eq!(programs, targets);
}

fn replay(name: &str) {
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let target = TARGETS
        .into_iter()
        .find(|target| target.name == name)
        .unwrap();
    let corpus = corpus(name);
    assert!(!corpus.is_empty());
    for (path, bytes) in &corpus {
        run(target, bytes, &path.display().to_string());
    }
    let before = peak_kib();
    let mut numbers = Numbers(0x5eed);
    let since = Instant::now();
    let mut count = 0;
    while count < MUTATIONS && since.elapsed() < TIME_MAX {
        let bytes = mutation(&corpus, &mut numbers);
        run(target, &bytes, &format!("mutation {count}"));
        count += 1;
    }
    println!("{name}: {} inputs, {count} mutations", corpus.len());
    // The kernel counts in batches, so that a peak may seem to fall.
    let grown = peak_kib().saturating_sub(before);
    assert!(grown < GROWTH_KIB_MAX, "{grown} KiB more memory");
}

/// Runs a target; where it fails, the input is shown too.
fn run(target: Target, bytes: &[u8], what: &str) {
    let result = catch_unwind(AssertUnwindSafe(|| (target.run)(bytes)));
    assert!(
        result.is_ok(),
        "target {} fails on {what}: {bytes:02x?}",
        target.name
    );
}

/// The files of a target's corpus.
fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
        .into_iter()
        .map(|path| {
            let bytes = fs::read(&path).unwrap();
            (path, bytes)
        })
        .collect()
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

/// A member of the corpus with some changes: bytes set, turned, put in and taken out, words set, and parts of another member put in.
fn mutation(corpus: &[(PathBuf, Vec<u8>)], numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = corpus[numbers.below(corpus.len())].1.clone();
    for _ in 0..=numbers.below(8) {
        let at = numbers.below(bytes.len() + 1);
        match numbers.below(7) {
            0 if at < bytes.len() => bytes[at] = numbers.byte(),
            1 if at < bytes.len() => bytes[at] ^= 1 << numbers.below(8),
            2 => bytes.insert(at, numbers.byte()),
            3 if at < bytes.len() => drop(bytes.remove(at)),
            4 => {
                let words = [
                    0,
                    1,
                    0xff,
                    0x7fff,
                    0xffff,
                    0x8000_0000,
                    0xffff_ffff,
                    u64::MAX,
                ];
                let word = words[numbers.below(words.len())].to_le_bytes();
                let len = 1 << numbers.below(4);
                for (slot, byte) in bytes.iter_mut().skip(at).zip(&word[..len]) {
                    *slot = *byte;
                }
            }
            5 => {
                let other = &corpus[numbers.below(corpus.len())].1;
                let from = numbers.below(other.len() + 1);
                let part = other[from..].to_vec();
                bytes.splice(at..at, part);
            }
            _ => bytes.truncate(at),
        }
    }
    bytes.truncate(BYTES_MAX);
    bytes
}

/// Numbers that are the same every time (xorshift64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[3]
    }
}

/// The most memory that this process has had so far.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|line| line.split_whitespace().next())
        .unwrap()
        .parse()
        .unwrap()
}
