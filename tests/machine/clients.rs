//! Programs of others, as they are, with what a sandbox lets them reach: each a client that people use, of an image that has it.
//! Each of them also speaks with a secret's host, whose certificate only this sandbox's authority vouches for: no option says so.

use std::collections::BTreeSet;
use std::fs;

use crate::network::{HTTP2, Network, START_HTTP2, text};

/// The secret's value: nowhere but with the server that it is for.
const VALUE: &str = "sk-5f1d9c0b7e2a48d6-not-for-the-guest";

/// What makes packages and repositories for the network's servers.
const WARES: (&str, &str) = ("wares.py", include_str!("egress/wares.py"));

/// The machine, and what is allowed in all of them.
const OPTIONS: &str = "--rootfs $SANDVMM_TEST_CLIENTS_ROOTFS --memory 512M --timeout 600s --egress-log log \
    --allow-host allowed.example --secret TOKEN@api.example,api.example:8443=file:token --egress-ca ca.pem --upload server.pem:/tmp/server.pem";

/// Runs a client; what it printed.
fn ran(network: &Network, before: &str, options: &str, program: &str) -> String {
    fs::write(network.path("token"), VALUE).unwrap();
    let output = network.run(&format!(
        "set -e\n{before}\nsandvmm run {OPTIONS} {options} {program}"
    ));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    text(&output.stdout).to_owned()
}

/// How many requests have reached the secret's host with its value.
fn seen(network: &Network) -> usize {
    let seen = fs::read_to_string(network.path("seen")).unwrap();
    seen.matches(&format!("Bearer {VALUE}")).count()
}

/// How many of them over HTTP/2.
fn seen_over_http2(network: &Network) -> usize {
    let seen = fs::read_to_string(network.path("seen")).unwrap();
    let of_it = |line: &&str| line.contains("\"version\": \"HTTP/2\"") && line.contains(VALUE);
    seen.lines().filter(of_it).count()
}

/// The hosts and ports to which something was denied.
fn denied(network: &Network) -> BTreeSet<String> {
    let records = network.records().into_iter();
    records
        .filter(|record| record["verdict"] == "denied")
        .map(|record| format!("{}:{}", record["host"].as_str().unwrap(), record["port"]))
        .collect()
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn requests_and_httpx_work_and_are_refused_at_once() {
    let network = Network::new(&[
        ("client.py", include_str!("egress/clients/python.py")),
        HTTP2,
    ]);

    let stdout = ran(
        &network,
        START_HTTP2,
        "--allow-host allowed.example:8443",
        "client.py",
    );

    let stars = "*".repeat(VALUE.len());
    assert_eq!(
        stdout,
        format!(
            "requests 200\nhttpx 200 HTTP/1.1\nhttpx 200 HTTP/2 Bearer {stars} you are Bearer {stars}\n\
             hello from allowed.example\n64 200\nHTTP/2 HTTP/2 from allowed.example:8443\n\
             ('ConnectError', True, True)\n('ConnectionError', True, True)\n"
        )
    );
    assert_eq!((seen(&network), seen_over_http2(&network)), (3, 1));
    assert_eq!(
        denied(&network),
        BTreeSet::from(["169.254.169.254:80", "denied.example:443"].map(str::to_owned))
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn nodes_fetch_works_and_is_refused_at_once() {
    let network = Network::new(&[
        ("client.mjs", include_str!("egress/clients/node.mjs")),
        ("client.sh", include_str!("egress/clients/node.sh")),
    ]);

    let stdout = ran(
        &network,
        "",
        "--upload client.mjs:/tmp/client.mjs",
        "client.sh",
    );

    assert_eq!(
        stdout,
        "200\nhello from allowed.example\nhello from allowed.example\n64\n1\nECONNREFUSED true\nECONNREFUSED true\n"
    );
    assert_eq!(seen(&network), 1);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn curl_works_over_both_families_and_both_protocols() {
    let network = Network::new(&[("client.sh", include_str!("egress/clients/curl.sh")), HTTP2]);

    let stdout = ran(
        &network,
        START_HTTP2,
        "--allow-host allowed.example:8443",
        "client.sh",
    );

    let stars = "*".repeat(VALUE.len());
    let first = format!("200 1.1\nyou are Bearer {stars}\n200 2\n");
    assert_eq!(
        stdout.strip_prefix(&first).unwrap_or(&stdout),
        "hello from allowed.example\nhello from allowed.example\nhello from allowed.example\nhello from allowed.example\n\
         hello from allowed.example\n64\nHTTP/2 from allowed.example:8443\n2\nhello from allowed.example.\n7\n7\n7\n7\n7\n7\n"
    );
    assert_eq!((seen(&network), seen_over_http2(&network)), (2, 1));
    for host in ["denied.example:443", "169.254.169.254:80"] {
        assert!(denied(&network).contains(host), "{host}");
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn pip_installs_from_the_hosts_that_were_named_and_not_from_others() {
    let network = Network::new(&[("client.sh", include_str!("egress/clients/pip.sh")), WARES]);

    let stdout = ran(
        &network,
        "python3 wares.py . wheels",
        "--allow-host files.example",
        "client.sh",
    );

    assert_eq!(stdout, "first second third\nthird\n1\n");
    assert_eq!(
        denied(&network),
        BTreeSet::from(["denied.example:443".to_owned()])
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn git_clones_and_fetches() {
    let network = Network::new(&[("client.sh", include_str!("egress/clients/git.sh")), WARES]);

    let stdout = ran(&network, "python3 wares.py . repository", "", "client.sh");

    assert_eq!(stdout, "20\nthe first\n5b5b6b1d3966b57d\n20\n1\n");
    assert_eq!(
        denied(&network),
        BTreeSet::from(["denied.example:443".to_owned()])
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn apt_installs_a_package_and_clients_of_databases_speak_their_own_protocols_on_raw_ports() {
    let network = Network::new(&[
        ("client.sh", include_str!("egress/clients/apt_databases.sh")),
        WARES,
    ]);

    let stdout = ran(
        &network,
        "python3 wares.py . debian",
        "-u root --allow-host allowed.example:5433,6379 --raw-port 5433 --raw-port 6379",
        "client.sh",
    );

    assert_eq!(
        stdout,
        "hello from a package\n1\nPONG\nOK\nhello\n1\nselect 1; select 2\nselect 3\n1\n"
    );
}
