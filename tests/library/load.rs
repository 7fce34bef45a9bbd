//! Guests that take all they can get, each beside one that behaves; and much traffic both ways.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sandvmm::{Sandbox, Stdio};
use sha2::{Digest, Sha256};

use crate::{HUNG_AFTER, Test, machine, machine_within, printed};

pub(crate) const TESTS: &[Test] = &[
    ("a_fork_bomb_is_not_noticed_next_door", fork_bomb),
    ("a_memory_hog_is_not_noticed_next_door", memory_hog),
    ("a_disk_filler_is_not_noticed_next_door", disk_filler),
    ("an_output_flood_is_not_noticed_next_door", output_flood),
    (
        "traffic_both_ways_of_eight_sandboxes_arrives_byte_for_byte",
        traffic,
    ),
];

/// How long each abuser is left at it, once it shows.
const ABUSE: Duration = Duration::from_secs(6);

/// How soon an abuser shows. On a busy host of two emulated processors a thousand processes are there after 18 s.
const SHOWN_WITHIN: Duration = Duration::from_secs(90);

/// How soon a sandbox answers beside an abuser, and how soon an abuser is gone: that is promised. An emulated host of two processors has 0.25 s at worst.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Where the host itself is slow, since others use it too, an answer beside an abuser takes at most so many times what it takes at worst before
/// there is one, in the same run.
const ALONE_FACTOR: u32 = 2;

/// How often a sandbox is asked before there is load.
const ALONE_ROUNDS: u32 = 20;

/// MiB that go each way through each sandbox, unless the variable says otherwise: an emulated processor does not bear a gigabyte.
const TRAFFIC_MIB: usize = 4;

/// How long each of them may take, of all sandboxes at once on two emulated processors.
const EACH_MIB_LIMIT: Duration = Duration::from_secs(10);

/// How many sandboxes they go through at once.
const SANDBOXES: usize = 8;

fn fork_bomb() {
    beside("f() { f | f & }; f; exec sleep 1000", "fork");
}

fn memory_hog() {
    let hog = "x = []\nwhile True: x.append(bytearray(1 << 20))";
    beside(
        &format!("while :; do python3 -c '{hog}' || echo out of memory >&2; done"),
        "out of memory",
    );
}

fn disk_filler() {
    beside("while :; do cat /dev/zero > fill; done", "No space left");
}

fn output_flood() {
    beside(
        "while :; do head -c 4000000 /dev/zero; echo 4 MB more >&2; done",
        "4 MB more",
    );
}

/// Has `abuse` run in one sandbox, and sees that another one answers and works meanwhile. Its standard error has a line with `sign` whenever it has gone as
/// far as it is let.
fn beside(abuse: &str, sign: &'static str) {
    let (abused, neighbour) = (machine(), machine());
    neighbour.write("note", &b"kept"[..]).unwrap();
    let alone = worst_alone(&neighbour);
    let limit = ANSWER_LIMIT.max(alone * ALONE_FACTOR);
    let mut child = abused.command("sh").arg("-c").arg(abuse).spawn().unwrap();
    let (mut stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let signs = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&signs);
    // Whatever it prints is taken.
    let drains = [
        thread::spawn(move || drop(std::io::copy(&mut stdout, &mut std::io::sink()))),
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if line.contains(sign) {
                    seen.fetch_add(1, Ordering::SeqCst);
                }
            }
        }),
    ];
    let wait_for_sign = |before: usize| {
        let begun = Instant::now();
        while signs.load(Ordering::SeqCst) == before {
            assert!(
                begun.elapsed() < SHOWN_WITHIN,
                "the abuse never shows (again): {before} times {sign:?}"
            );
            thread::sleep(Duration::from_millis(20));
        }
        begun.elapsed()
    };
    let shown = wait_for_sign(0);
    let begun = Instant::now();
    let mut worst = Duration::ZERO;
    let mut rounds = 0;
    while begun.elapsed() < ABUSE {
        worst = worst.max(answer(&neighbour));
        assert_eq!(printed(&neighbour, "sh", "cat note"), "kept");
        rounds += 1;
    }
    let meanwhile = signs.load(Ordering::SeqCst);
    wait_for_sign(meanwhile);
    assert!(child.try_wait().is_none(), "it is still at it");
    let ended = Instant::now();
    drop(child);
    let end = abused.end();
    let gone = ended.elapsed();
    eprintln!(
        "alone {alone:?}; shown after {shown:?}, {meanwhile} times until the end; at worst {worst:?} in {rounds} rounds; ended in {gone:?}"
    );
    assert!(worst < limit, "{worst:?}, alone {alone:?}");
    assert!(gone < limit, "{gone:?}, alone {alone:?}");
    assert!(end.crash.is_none(), "{end:?}");
    for drain in drains {
        drain.join().unwrap();
    }
}

/// How long the agent takes to answer something that starts no process.
fn answer(sandbox: &Sandbox) -> Duration {
    let asked = Instant::now();
    sandbox.files().metadata("/").unwrap();
    asked.elapsed()
}

/// The longest of some answers, when nothing that is meant to disturb does.
fn worst_alone(sandbox: &Sandbox) -> Duration {
    let answers = (0..ALONE_ROUNDS).map(|_| answer(sandbox));
    answers.max().unwrap_or_default()
}

/// Sends all back, and says what went by.
const ECHO: &str = "import hashlib, sys
seen = hashlib.sha256()
while piece := sys.stdin.buffer.read(65536):
    seen.update(piece)
    sys.stdout.buffer.write(piece)
sys.stderr.write(seen.hexdigest())";

fn traffic() {
    let mib = std::env::var("SANDVMM_TRAFFIC_MIB").ok();
    let mib = mib.map_or(TRAFFIC_MIB, |text| text.parse().unwrap());
    let limit = HUNG_AFTER + EACH_MIB_LIMIT * u32::try_from(mib).unwrap();
    let sandboxes: Vec<Sandbox> = (0..SANDBOXES).map(|_| machine_within(128, limit)).collect();
    let alone = worst_alone(&sandboxes[0]);
    let begun = Instant::now();
    let asked_at_worst = thread::scope(|scope| {
        let echoes: Vec<_> = sandboxes
            .iter()
            .zip(1..)
            .map(|(sandbox, seed)| scope.spawn(move || echo(sandbox, seed, mib)))
            .collect();
        let mut worst = Duration::ZERO;
        while !echoes.iter().all(thread::ScopedJoinHandle::is_finished) {
            worst = worst.max(answer(&sandboxes[0]));
            thread::sleep(Duration::from_millis(100));
        }
        for echo in echoes {
            echo.join().unwrap();
        }
        worst
    });
    let processors = thread::available_parallelism().unwrap().get();
    let took = begun.elapsed();
    eprintln!(
        "{mib} MiB each way of {SANDBOXES} in {took:?} on {processors} processors; answered within {asked_at_worst:?}, alone {alone:?}"
    );
    // Each of them computes all the time: so many have to wait for one that has a processor, and for the program beside the agent in it.
    let share = u32::try_from(2 * SANDBOXES.div_ceil(processors)).unwrap();
    let limit = ANSWER_LIMIT.max(alone * ALONE_FACTOR) * share;
    assert!(
        asked_at_worst < limit,
        "{asked_at_worst:?}, alone {alone:?}, limit {limit:?}"
    );
}

/// Sends so much through a sandbox and compares three digests: of what was sent, what the guest saw, and what came back.
fn echo(sandbox: &Sandbox, seed: u64, mib: usize) {
    let mut command = sandbox.command("python3");
    let mut child = command
        .arg("-c")
        .arg(ECHO)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = thread::spawn(move || {
        let mut sent = Sha256::new();
        let mut state = seed;
        for _ in 0..mib {
            let piece: Vec<u8> = (0..(1 << 20) / 8)
                .flat_map(|_| {
                    // Knuth's constants (MMIX): no two pieces are alike.
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    state.to_le_bytes()
                })
                .collect();
            sent.update(&piece);
            stdin.write_all(&piece).unwrap();
        }
        format!("{:x}", sent.finalize())
    });
    let mut back = Sha256::new();
    let mut stdout = child.stdout.take().unwrap();
    let mut buffer = vec![0; 64 << 10];
    let mut total = 0;
    loop {
        let count = stdout.read(&mut buffer).unwrap();
        if count == 0 {
            break;
        }
        total += count;
        back.update(&buffer[..count]);
    }
    let mut seen = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut seen)
        .unwrap();
    let sent = writer.join().unwrap();
    assert_eq!(total, mib << 20);
    assert_eq!(
        (&seen, format!("{:x}", back.finalize())),
        (&sent, sent.clone())
    );
    assert!(child.wait().outcome.success());
}
