//! What leaves a machine and what enters it, in a network of the test's own: real programs in real guests, real servers.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::network::{Network, text};

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_program_reaches_what_was_named_and_the_rest_is_refused_at_once() {
    let network = Network::new(&[("reach.py", include_str!("egress/reach.py"))]);

    let output = network.run(
        "exec sandvmm run --cold --timeout 200s --egress-log log --upload server.pem:server.pem --allow-host allowed.example \
         --allow-host '*.allowed.example' --allow-host BÜCHER.example. --allow-host six.example --allow-host allowed.example:5432 --raw-port 5432 reach.py",
    );

    assert_eq!(
        text(&output.stdout),
        "hello from allowed.example\nhello from allowed.example\nhello from allowed.example.\nhello from www.allowed.example\n\
         hello from six.example\nhello from a.b.allowed.example\nhello from xn--bcher-kva.example\nTrue True\nb'ready\\n'\nb'HELLO\\n'\nb'ready\\n'\nb'HELLO\\n'\n\
         ('ECONNREFUSED', True)\n('ECONNREFUSED', True)\n('ECONNREFUSED', True)\n('ECONNREFUSED', True)\n"
    );
    let stderr = text(&output.stderr);
    for line in [
        "sandvmm: denied: denied.example:443 (not allowed; add --allow-host denied.example)\n",
        "sandvmm: denied: allowed.example:8443 (not allowed; add --allow-host allowed.example:8443)\n",
        "sandvmm: denied: 93.184.216.34:443 (not allowed; add --allow-host 93.184.216.34)\n",
    ] {
        assert_eq!(stderr.matches(line).count(), 1, "{line}\n{stderr}");
    }
    assert_eq!(output.status.code(), Some(0));
    let allowed: Vec<Value> = network
        .records()
        .into_iter()
        .filter(|record| record["verdict"] == "allowed")
        .collect();
    assert_eq!(allowed.len(), 9, "{allowed:?}");
    for record in allowed {
        assert_eq!(record["process"]["name"], "python3");
        assert!(record["bytes_in"].as_u64().unwrap() > 0);
        assert!(record["rule"].is_string() && record["address"].is_string());
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn without_a_rule_there_is_no_network_and_nothing_of_it_runs() {
    let program = "import errno, os, socket
names = [open(f'/proc/{n}/cmdline').read() for n in os.listdir('/proc') if n.isdigit()]
print([name for name in names if 'gate' in name], open('/proc/net/route').read().count('\\n'))
for attempt in (lambda: socket.getaddrinfo('allowed.example', 80), lambda: socket.create_connection(('1.1.1.1', 80))):
    try:
        attempt()
    except OSError as error:
        print(type(error).__name__, error.errno in (errno.ENETUNREACH, socket.EAI_AGAIN))
";
    let network = Network::new(&[("nothing.py", program)]);

    let output = network.run("exec sandvmm run --cold --json --timeout 100s nothing.py");

    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object["stdout"], "[] 1\ngaierror True\nOSError True\n");
    assert_eq!(object["egress"], Value::Null);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_fork_of_a_template_has_its_own_way_out() {
    let program = "import urllib.request
print(urllib.request.urlopen('http://allowed.example/', timeout=60).read().decode().strip())
";
    let network = Network::new(&[("get.py", program)]);

    let output = network.run(
        "sandvmm template build egress-test --force >&2
         sandvmm run --template egress-test --timeout 100s --allow-host allowed.example get.py
         sandvmm run --template egress-test --timeout 100s get.py 2>&1 | tail -n 1
         sandvmm template rm egress-test",
    );

    let stdout = text(&output.stdout);
    assert!(
        stdout.starts_with("hello from allowed.example\n"),
        "{stdout}"
    );
    assert!(
        stdout.contains("URLError") && stdout.lines().count() == 2,
        "{stdout}"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_template_is_built_and_a_prompt_runs_with_the_hosts_that_were_named() {
    let get = "import urllib.request
print(urllib.request.urlopen('http://allowed.example/', timeout=60).read().decode().strip())
";
    let network = Network::new(&[("get.py", get)]);

    let output = network.run(
        "sandvmm template build fetched --force --allow-host allowed.example --copy get.py:/tmp/get.py \
             --run 'python3 /tmp/get.py > /var/fetched' >&2
         sandvmm run --template fetched --timeout 100s -- cat /var/fetched
         sandvmm run --template fetched --timeout 100s get.py 2>&1 | tail -n 1
         sandvmm template rm fetched
         sandvmm repl --allow-host allowed.example < get.py",
    );

    let stdout = text(&output.stdout);
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines.len(), 3, "{stdout}");
    assert_eq!([lines[0], lines[2]], ["hello from allowed.example"; 2]);
    assert!(lines[1].contains("URLError"), "{stdout}");
}

/// What is tried, whether the program is answered, and what is on record: host, port, and words of the reason.
const ATTACKS: &[(&str, &str, &str, u16, &str)] = &[
    (
        "a name that nobody named",
        "",
        "other.example",
        80,
        "not allowed; add --allow-host other.example",
    ),
    (
        "a name that begins as an allowed one",
        "",
        "allowed.example.other.example",
        80,
        "not allowed",
    ),
    (
        "a name that ends as an allowed one",
        "",
        "notallowed.example",
        80,
        "not allowed",
    ),
    (
        "a port that nobody named",
        "",
        "allowed.example",
        8080,
        "not allowed; add --allow-host allowed.example:8080",
    ),
    (
        "the allowed host by its address",
        "",
        "93.184.216.34",
        80,
        "not allowed",
    ),
    (
        "the metadata service",
        "",
        "169.254.169.254",
        80,
        "not allowed",
    ),
    (
        "the metadata service as a number",
        "",
        "169.254.169.254",
        80,
        "not allowed",
    ),
    (
        "the metadata service in octal",
        "",
        "169.254.169.254",
        80,
        "not allowed",
    ),
    (
        "the metadata service, mapped",
        "",
        "169.254.169.254",
        80,
        "not allowed",
    ),
    ("the metadata service over IPv6", "", "", 0, ""),
    ("a private address", "", "10.7.7.7", 80, "not allowed"),
    ("the guest's own loopback, short", "", "", 0, ""),
    ("the guest's own loopback, hexadecimal", "", "", 0, ""),
    (
        "an allowed name for a private address",
        "",
        "inside.example",
        80,
        "10.7.7.7, which is private",
    ),
    (
        "an allowed name for a public and a private address",
        "",
        "mixed.example",
        80,
        "10.7.7.7, which is private",
    ),
    (
        "an allowed name for the host's loopback",
        "",
        "loop.example",
        80,
        "127.0.0.1, which is loopback",
    ),
    (
        "an allowed name for the metadata service",
        "",
        "metadata.example",
        80,
        "169.254.169.254, which is link-local",
    ),
    (
        "an allowed name for a public address, then a private one",
        "",
        "rebind.example",
        80,
        "10.7.7.7, which is private",
    ),
    (
        "a redirect to the metadata service",
        "",
        "169.254.169.254",
        80,
        "not allowed",
    ),
    (
        "TLS for another name",
        "",
        "allowed.example",
        443,
        "another SNI",
    ),
    (
        "TLS for another name at the same address",
        "",
        "allowed.example",
        443,
        "names 'shared.example'",
    ),
    ("TLS without a name", "", "allowed.example", 443, "no SNI"),
    (
        "TLS whose name is encrypted",
        "",
        "allowed.example",
        443,
        "ECH",
    ),
    ("no TLS on its port", "", "allowed.example", 443, "not TLS"),
    ("SSH on TLS's port", "", "allowed.example", 443, "not TLS"),
    (
        "SSH on HTTP's port",
        "",
        "allowed.example",
        80,
        "not HTTP/1",
    ),
    (
        "another Host",
        "",
        "allowed.example",
        80,
        "another Host: the request is for 'shared.example'",
    ),
    ("no Host", "", "allowed.example", 80, "0 Host fields"),
    ("two Hosts", "", "allowed.example", 80, "2 Host fields"),
    (
        "a URI for another host",
        "",
        "allowed.example",
        80,
        "another Host",
    ),
    ("CONNECT", "", "allowed.example", 80, "CONNECT"),
    (
        "another Host on the second request",
        "",
        "allowed.example",
        80,
        "another Host",
    ),
    (
        "a length beside chunks",
        "",
        "allowed.example",
        80,
        "Content-Length beside Transfer-Encoding",
    ),
    (
        "two lengths",
        "",
        "allowed.example",
        80,
        "more than one Content-Length",
    ),
    (
        "a line end that is none",
        "",
        "allowed.example",
        80,
        "a control character",
    ),
    (
        "a bare line feed",
        "",
        "allowed.example",
        80,
        "a line that does not end in CRLF",
    ),
    ("another protocol", "", "allowed.example", 80, "Upgrade"),
    ("HTTP/2", "", "allowed.example", 80, "not HTTP/1"),
    ("a name server of its own, UDP", "", "8.8.8.8", 53, "UDP"),
    (
        "a name server of its own, TCP",
        "",
        "8.8.8.8",
        53,
        "not allowed",
    ),
    (
        "QUIC",
        "",
        "allowed.example",
        443,
        "UDP, and QUIC with it, does not leave",
    ),
    ("before it rebinds", "answered", "", 0, ""),
    ("what is allowed", "answered", "", 0, ""),
    (
        "a name of a process that is none",
        "",
        "allowed.example",
        80,
        "'hidden.example'",
    ),
];

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn each_attack_is_denied_and_recorded() {
    let network = Network::new(&[("attacks.py", include_str!("egress/attacks.py"))]);

    let output = network.run(
        "exec sandvmm run --cold --json --timeout 500s --egress-log log --events events --allow-host allowed.example --allow-host inside.example \
         --allow-host mixed.example --allow-host loop.example --allow-host metadata.example --allow-host rebind.example attacks.py",
    );

    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    let ends = object["stdout"].as_str().unwrap();
    let records = network.records();
    for (name, end, host, port, reason) in ATTACKS {
        let line = ends
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name}: ")))
            .unwrap_or_else(|| panic!("{name} was not tried: {object}"));
        assert_eq!(line == "answered", *end == "answered", "{name}: {line}");
        assert_ne!(line, "TimeoutError", "{name}");
        if !host.is_empty() {
            let is_this = |record: &&Value| {
                record["host"] == *host
                    && record["port"] == *port
                    && record["verdict"] == "denied"
                    && record["reason"].as_str().unwrap().contains(reason)
            };
            assert!(
                records.iter().any(|record| is_this(&record)),
                "{name}: {records:#?}"
            );
            let listed = object["egress"]["refused"].as_array().unwrap();
            assert!(
                listed
                    .iter()
                    .any(|one| one["reason"].as_str().unwrap().contains(reason)),
                "{name}: {listed:?}"
            );
        }
    }
    // Questions are answered, with no record, and are nowhere on record.
    assert_eq!(ends.matches("a question of type").count(), 9, "{ends}");
    assert!(
        !ends
            .lines()
            .any(|line| line.starts_with("a question") && line.ends_with("answered")),
        "{ends}"
    );
    assert!(
        !records
            .iter()
            .any(|record| record.to_string().contains("attacker"))
    );
    // Each is an event too.
    let events = fs::read_to_string(network.path("events")).unwrap();
    let told: Vec<Value> = events
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|event| event["event"] == "connection")
        .collect();
    assert_eq!(told.len(), records.len());
    for record in &records {
        let is_this = |event: &&Value| {
            ["time_ms", "process", "host", "port", "verdict", "reason"]
                .iter()
                .all(|field| event[*field] == record[*field])
        };
        assert!(told.iter().any(|event| is_this(&event)), "{record}");
    }
    // A name is asked for outside when a connection to it is allowed, and never else.
    assert_eq!(
        network.asked(),
        BTreeSet::from(["rebind.example".to_owned()])
    );
    // What the guest says of itself is spelled out.
    let hidden = records
        .iter()
        .find(|record| record.to_string().contains("'hidden.example'"))
        .unwrap();
    assert_eq!(hidden["process"]["name"], "\\u{1b}[2J\\u{a}\"} denied");
    assert_eq!(
        network.received(),
        BTreeSet::from([
            "allowed.example /attack".to_owned(),
            "allowed.example /first".to_owned(),
            "allowed.example /redirect".to_owned(),
            "rebind.example /attack".to_owned(),
        ])
    );
    assert!(object["egress"]["bytes_out"].as_u64().unwrap() > 0);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn an_address_inside_is_reached_where_it_was_named() {
    let program = "import urllib.request
for url in ('http://inside.example/', 'http://10.7.7.7/'):
    print(urllib.request.urlopen(url, timeout=60).read().decode().strip())
";
    let network = Network::new(&[("inside.py", program)]);
    fs::write(
        network.path("hosts.txt"),
        "# inside\ninside.example\n\n10.7.0.0/24\n10.7.7.0/24:80\n",
    )
    .unwrap();

    let output =
        network.run("exec sandvmm run --cold --timeout 100s --allow-file hosts.txt inside.py");

    assert_eq!(
        text(&output.stdout),
        "hello from inside.example\nhello from 10.7.7.7\n"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_published_port_leads_to_the_guests() {
    let network = Network::new(&[]);

    let output = network.run(
        "sandvmm run --cold --timeout 100s --publish 18080:8000 -- python3 -m http.server --bind 127.0.0.1 8000 >&2 &
         for try in $(seq 100); do curl --silent --fail http://127.0.0.1:18080/ && break; sleep 0.5; done
         kill $!; wait",
    );

    assert!(
        text(&output.stdout).contains("Directory listing"),
        "{output:?}"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_published_port_that_the_system_chose_is_told() {
    let network = Network::new(&[]);

    let output = network.run(
        r"sandvmm run --cold --timeout 100s --publish 0:8000 -- python3 -m http.server --bind 127.0.0.1 8000 2>told &
          for try in $(seq 100); do
              at=$(sed -n 's/^sandvmm: \(.*\) leads to port 8000 of the guest$/\1/p' told)
              curl --silent --fail http://$at/ && break; sleep 0.5
          done
          kill $!; wait",
    );

    assert!(
        text(&output.stdout).contains("Directory listing"),
        "{output:?}"
    );
}
