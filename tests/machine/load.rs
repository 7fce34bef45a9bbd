//! Much that leaves a machine: bytes in bulk both ways, and connections without number. Neither takes more of the host than is said, and
//! what is above a bound is told or counted.

use std::fs;

use serde_json::Value;

use crate::network::{Network, text};

/// MiB that go each way, unless the variable says otherwise: the processor may be emulated. 1024 are what is promised.
const BULK_MIB: &str = "64";
const BULK_VARIABLE: &str = "SANDVMM_EGRESS_BULK_MIB";

/// Connections of a flood, likewise: 10000.
const FLOOD: &str = "400";
const FLOOD_VARIABLE: &str = "SANDVMM_EGRESS_FLOOD";

/// What tells the most that a process had.
const PEAKS: (&str, &str) = ("peaks.sh", include_str!("egress/peaks.sh"));

/// Memory of the command that starts a sandbox and carries what leaves it, in KiB: of itself, and for each connection, whatever passes.
const OWN_KIB_MAX: u64 = 48 << 10;
const CONNECTION_KIB_MAX: u64 = 192;

/// Memory of a machine's process beside its guest's, in KiB.
const MACHINE_KIB_MAX: u64 = 32 << 10;

/// Memory of these guests in KiB.
const GUEST_KIB: u64 = 256 << 10;

/// The most that a sandbox with so many connections had: threads and descriptors. That its memory does not grow with what passes is
/// asserted.
fn peaks(line: &str, connections: u64) -> [u64; 2] {
    eprintln!("threads, descriptors, KiB, KiB of the machine: {line}");
    let numbers: Vec<u64> = line
        .split_whitespace()
        .map(|word| word.parse().unwrap())
        .collect();
    let [threads, descriptors, own_kib, machine_kib] = numbers[..] else {
        panic!("{line}");
    };
    let most_kib = OWN_KIB_MAX + connections * CONNECTION_KIB_MAX;
    assert!(own_kib > 0 && own_kib < most_kib, "{own_kib} KiB");
    assert!(
        machine_kib > 0 && machine_kib < GUEST_KIB + MACHINE_KIB_MAX,
        "{machine_kib} KiB"
    );
    [threads, descriptors]
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn bytes_in_bulk_arrive_both_ways() {
    let network = Network::new(&[("bulk.py", include_str!("egress/bulk.py")), PEAKS]);
    let mib = std::env::var(BULK_VARIABLE).unwrap_or_else(|_| BULK_MIB.to_owned());

    let output = network.run(&format!(
        "sandvmm run --cold --json --timeout 800s --allow-host allowed.example:9000 --raw-port 9000 bulk.py {mib} > bulk.json &
         sh peaks.sh $!; wait $!"
    ));

    let object: Value =
        serde_json::from_slice(&fs::read(network.path("bulk.json")).unwrap()).unwrap();
    assert_eq!(object["stdout"], "True True\n", "{object}");
    let bytes = mib.parse::<u64>().unwrap() << 20;
    assert!(object["egress"]["bytes_out"].as_u64().unwrap() >= bytes);
    assert!(object["egress"]["bytes_in"].as_u64().unwrap() >= bytes);
    peaks(text(&output.stdout), 1);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_flood_of_connections_is_bounded_and_another_sandbox_is_unaffected() {
    let good = "import urllib.request
for _ in range(5):
    print(urllib.request.urlopen('http://allowed.example/other', timeout=60).read().decode().strip())
";
    let network = Network::new(&[
        ("flood.py", include_str!("egress/flood.py")),
        ("good.py", good),
        PEAKS,
    ]);

    let count = std::env::var(FLOOD_VARIABLE).unwrap_or_else(|_| FLOOD.to_owned());

    let output = network.run(&format!(
        "sandvmm run --cold --json --timeout 800s --allow-host allowed.example flood.py {count} > flood.json &
         flood=$!
         sandvmm run --cold --timeout 300s --allow-host allowed.example good.py
         sh peaks.sh $flood; wait $flood"
    ));

    let stdout = text(&output.stdout);
    assert_eq!(
        stdout.matches("hello from allowed.example\n").count(),
        5,
        "{stdout}"
    );
    let [threads, descriptors] = peaks(stdout.lines().last().unwrap(), 256);
    // A thread for each of 256 connections, and its two streams; and those of the command itself.
    assert!(threads < 300, "{threads} threads");
    assert!(descriptors < 1000, "{descriptors} descriptors");
    let object: Value =
        serde_json::from_slice(&fs::read(network.path("flood.json")).unwrap()).unwrap();
    assert_eq!(object["stdout"], format!("{count}\ngood\n"), "{object}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn what_finds_no_room_is_told_by_its_bound_and_all_is_counted() {
    let network = Network::new(&[("crowd.py", include_str!("egress/crowd.py"))]);

    let output = network.run(
        "sandvmm run --cold --json --timeout 600s --egress-log log --events events --allow-host allowed.example:5432 --raw-port 5432 \
             --allow-host \"*.crowd.example:$(seq -s, 9100 9131)\" crowd.py
         sandvmm run --cold --timeout 600s --allow-host allowed.example -c 'import socket, time
for port in range(1000, 1200):
    socket.socket().connect_ex((\"93.184.216.34\", port))
time.sleep(2)'",
    );

    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object["stdout"], "256\n1\n500\n", "{object}");
    let records = network.records();
    let of = |host: &str, verdict: &str| {
        let found = records
            .iter()
            .filter(|record| record["host"] == host && record["verdict"] == verdict);
        found.collect::<Vec<_>>()
    };
    let said = |record: &Value| record["reason"].as_str().unwrap().to_owned();
    let [name] = of("h39.crowd.example", "limited")[..] else {
        panic!("{records:?}");
    };
    assert!(said(name).contains("2048 listeners"), "{name}");
    assert!(!said(name).contains("--allow-host"), "{name}");
    let above = of("allowed.example", "limited");
    assert!(above.len() < 44 && !above.is_empty(), "{above:?}");
    for record in above {
        assert!(said(record).contains("256 connections"), "{record}");
    }
    assert_eq!(of("allowed.example", "allowed").len(), 256);
    let denied = of("denied.example", "denied").len();
    assert!((50..400).contains(&denied), "{denied}");

    // None is lost: what has no record is counted by one that is, and by the report.
    let unrecorded = |record: &Value| record["unrecorded"].as_u64().unwrap();
    let counted: u64 = records.iter().map(unrecorded).sum();
    let egress = &object["egress"];
    assert_eq!(counted, unrecorded(egress));
    assert_eq!(egress["denied"], 1 + 44 + 500, "{egress}");
    assert_eq!(records.len() as u64 + counted, 256 + 1 + 44 + 500);
    let listed = egress["refused"].as_array().unwrap();
    assert!(listed.iter().any(|one| one["verdict"] == "limited"));
    let events = fs::read_to_string(network.path("events")).unwrap();
    let told = events
        .lines()
        .filter(|line| line.contains("\"connection\""));
    assert_eq!(told.count(), records.len());

    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("sandvmm: denied: 93.184.216.34:1000 (not allowed"),
        "{stderr}"
    );
    let end = " more attempts that were not recorded one by one\n";
    let line = stderr
        .lines()
        .find(|line| format!("{line}\n").ends_with(end));
    assert!(line.is_some(), "{stderr}");
}
