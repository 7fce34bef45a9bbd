//! `--events`, and the ceilings that a result names.

use serde_json::Value;

use sandvmm_tests::run;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_record_of_connections_that_can_not_be_written_is_told_once() {
    let program = "import socket
for _ in range(3):
    print(socket.socket().connect_ex(('1.2.3.4', 443)) != 0)";

    let ran = run(["--timeout", "120s", "--egress-log", "/dev/full"])
        .args(["--allow-host", "allowed.example", "-c", program])
        .done()
        .expect(0);

    assert_eq!(ran.text(), "True\nTrue\nTrue\n");
    assert_eq!(ran.stderr.matches("--egress-log").count(), 1, "{ran:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn what_happens_is_written_down_as_it_happens() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("events");

    run(["--host-function", "f=/bin/cat", "--events"])
        .arg(&file)
        .args(["--", "sh", "-c", "sandvmm-call f 1; exit 3"])
        .done()
        .expect(3);

    let text = std::fs::read_to_string(&file).unwrap();
    let events: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let names: Vec<&str> = events
        .iter()
        .map(|event| event["event"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "started",
            "ready",
            "command_started",
            "host_call",
            "command_ended",
            "ended"
        ],
        "{text}"
    );
    assert_eq!(events[2]["program"], "sh");
    assert_eq!(
        (&events[3]["function"], &events[3]["result"]),
        (&"f".into(), &"ok".into())
    );
    assert_eq!(
        (&events[4]["outcome"], &events[4]["status"]),
        (&"exited".into(), &3.into())
    );
    assert!(
        events[4]["peak_memory_bytes"].as_u64().unwrap() > 0,
        "{text}"
    );
    let times: Vec<u64> = events
        .iter()
        .map(|event| event["at_us"].as_u64().unwrap())
        .collect();
    assert!(times.is_sorted(), "{text}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_ceilings_are_kept_and_named() {
    let cpu = run([
        "--json",
        "--cpu-time",
        "20s",
        "--timeout",
        "200s",
        "-c",
        "while True: pass",
    ])
    .done()
    .expect(125)
    .json();
    assert_eq!(
        (&cpu["reason"], &cpu["limits_hit"]),
        (&"policy".into(), &serde_json::json!(["cpu_time"])),
        "{cpu}"
    );
    assert!(
        cpu["message"]
            .as_str()
            .unwrap()
            .contains("processor time; --cpu-time"),
        "{cpu}"
    );

    let output = run(["--max-output", "1M", "--", "cat", "/dev/zero"])
        .done()
        .expect(125);
    let named = "bytes of output; --max-output";
    assert!(output.stderr.contains(named), "{output:?}");
    assert!(output.stdout.len() >= 1 << 20 && output.stdout.len() < 8 << 20);

    let full = "head -c 10M /dev/zero > kept; head -c 1G /dev/zero > /tmp/full 2> /dev/null; printf done; exit 0";
    let disk = run(["--json", "--timeout", "120s", "--", "sh", "-c", full])
        .done()
        .expect(0)
        .json();
    assert_eq!(
        (&disk["limits_hit"], &disk["stdout"]),
        (&serde_json::json!(["disk"]), &"done".into()),
        "{disk}"
    );
    assert!(
        disk["usage"]["disk_bytes"].as_u64().unwrap() > 10 << 20,
        "{disk}"
    );
    assert_eq!(disk["usage"]["bytes_out"], 4, "{disk}");
    assert!(disk["usage"]["wall_us"].as_u64().unwrap() > 0, "{disk}");
}
