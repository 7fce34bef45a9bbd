//! Much that leaves a machine: bytes in bulk both ways, and connections without number. Neither takes more of the host than is said.

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
