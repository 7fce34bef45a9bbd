//! A machine that is saved under traffic in both directions: it goes on without a byte lost, and its forks' devices work.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sandvmm::{Sandbox, Stdio};
use sandvmm_tests::eventually;
use sha2::{Digest, Sha256};

use super::{Named, machine, shell, text};

/// How often the machine is saved.
const SNAPSHOTS: usize = 3;

/// Bytes that go to a fork and back.
const ECHO_BYTES: usize = 2 << 20;

/// After this the stream counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(120);

/// Ends the traffic, also where the test fails: its threads are waited for.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// What each fork reads of its disk, past its cache.
const DISK: &str = "echo 3 > /proc/sys/vm/drop_caches; cat /usr/lib/python3*/*.py | sha256sum";

fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut word = seed;
    (0..length)
        .map(|_| {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (word >> 56) as u8
        })
        .collect()
}

/// Sends bytes through `cat` and compares what comes back.
fn echo(sandbox: &Sandbox, seed: u64) {
    let sent = pattern(ECHO_BYTES, seed);
    let mut cat = sandbox
        .command("cat")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut to, mut from) = (cat.stdin.take().unwrap(), cat.stdout.take().unwrap());
    let received = std::thread::scope(|scope| {
        let bytes = &sent;
        scope.spawn(move || to.write_all(bytes).unwrap());
        let mut received = Vec::new();
        from.read_to_end(&mut received).unwrap();
        received
    });
    assert!(received == sent, "{} bytes came back", received.len());
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_machine_saved_under_traffic_loses_nothing_and_its_forks_work() {
    let parent = machine();
    let expected = text(parent.command("sh").args(["-c", DISK]).user("root"));
    let mut cat = parent.command("cat").stdin(Stdio::piped()).spawn().unwrap();
    let (mut to, mut from) = (cat.stdin.take().unwrap(), cat.stdout.take().unwrap());
    let is_over = AtomicBool::new(false);
    let (went, came) = (AtomicU64::new(0), AtomicU64::new(0));
    let block = pattern(64 << 10, 7);

    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let mut digest = Sha256::new();
            while !is_over.load(Ordering::SeqCst) {
                to.write_all(&block).unwrap();
                digest.update(&block);
                went.fetch_add(block.len() as u64, Ordering::SeqCst);
            }
            drop(to);
            digest.finalize()
        });
        let receiving = scope.spawn(|| {
            let mut digest = Sha256::new();
            let mut chunk = vec![0; 64 << 10];
            loop {
                let count = from.read(&mut chunk).unwrap();
                if count == 0 {
                    return digest.finalize();
                }
                digest.update(&chunk[..count]);
                came.fetch_add(count as u64, Ordering::SeqCst);
            }
        });
        let over = Over(&is_over);
        for number in 0..SNAPSHOTS {
            let before = came.load(Ordering::SeqCst);
            let since = Instant::now();
            while came.load(Ordering::SeqCst) < before + (1 << 20) {
                assert!(!receiving.is_finished() && since.elapsed() < STUCK_AFTER);
                std::thread::sleep(Duration::from_millis(10));
            }
            let template = Named::of(&parent, &format!("traffic-{number}"));
            let console = tempfile::NamedTempFile::new().unwrap();
            let builder = template.0.sandbox().console(console.reopen().unwrap());
            let fork = builder.start().unwrap();
            echo(&fork, number as u64);
            // Its serial port: the kernel's alerts go there.
            let alert = "echo '<1>said by the fork' > /dev/kmsg";
            text(fork.command("sh").args(["-c", alert]).user("root"));
            eventually(STUCK_AFTER, "the console has it", || {
                let said = std::fs::read(console.path()).unwrap();
                String::from_utf8_lossy(&said).contains("said by the fork")
            });
            assert_eq!(
                text(fork.command("sh").args(["-c", DISK]).user("root")),
                expected
            );
            // Its parent's stream is not the fork's: whoever held it was told, and is gone.
            shell(
                &fork,
                "for n in $(seq 300); do pidof cat || exit 0; sleep 0.1; done; exit 1",
            );
        }
        drop(over);
        assert_eq!(sending.join().unwrap(), receiving.join().unwrap());
    });
    assert_eq!(went.into_inner(), came.into_inner());
    assert!(cat.wait().outcome.success());
}
