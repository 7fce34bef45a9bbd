//! `--json`: one object that says everything.

use sandvmm_tests::run;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_run_is_told_as_one_object() {
    let ran = run(["--json", "--", "sh", "-c", "echo out; echo err >&2; exit 3"])
        .done()
        .expect(3);

    let json = ran.json();
    assert_eq!(json["exit_code"], 3);
    assert_eq!(json["reason"], "exited");
    assert_eq!(json["stdout"], "out\n");
    assert_eq!(json["stderr"], "err\n");
    assert_eq!(json["stdout_truncated"], false);
    assert!(json["usage"]["peak_memory_bytes"].as_u64().unwrap() > 0);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_clocks_are_there_and_in_order() {
    let json = run(["--json", "--", "echo", "hello"])
        .done()
        .expect(0)
        .json();

    let names = [
        "process_started",
        "vcpu_running",
        "guest_init",
        "agent_ready",
        "first_output",
        "exited",
        "gone",
    ];
    let clocks: Vec<f64> = names
        .iter()
        .map(|name| {
            json["clocks"]
                .as_object()
                .unwrap()
                .iter()
                .find(|(key, _)| key.starts_with(name))
                .unwrap_or_else(|| panic!("no clock {name}: {json}"))
                .1
                .as_f64()
                .unwrap()
        })
        .collect();

    for pair in clocks.windows(2) {
        // The guest's own clock gives one of them: it may be off by what a message takes.
        assert!(pair[0] <= pair[1] * 1.001 + 0.5, "{json}");
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn each_reason_has_its_name() {
    let signal = run(["--json", "--", "sh", "-c", "kill -15 $$"])
        .done()
        .expect(143)
        .json();
    let timeout = run([
        "--json",
        "--timeout",
        "10s",
        "--",
        "sh",
        "-c",
        "echo early; sleep 1000",
    ])
    .done()
    .expect(124)
    .json();
    let missing = run(["--json", "--", "no-such-program"])
        .done()
        .expect(127)
        .json();

    assert_eq!(
        (&signal["reason"], &signal["signal"]),
        (&"signal".into(), &15.into())
    );
    assert_eq!(
        (&timeout["reason"], &timeout["stdout"]),
        (&"timeout".into(), &"early\n".into())
    );
    assert!(missing.to_string().contains("no-such-program"), "{missing}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn output_above_the_cap_is_cut_and_flagged_and_other_bytes_are_encoded() {
    let long = run(["--json", "--", "head", "-c", "5000000", "/dev/zero"])
        .done()
        .expect(0)
        .json();
    let bytes = run(["--json", "--", "printf", r"\377\376"])
        .done()
        .expect(0)
        .json();

    assert_eq!(long["stdout_truncated"], true, "{}", long["usage"]);
    assert!(long["stdout"].as_str().unwrap().len() <= 3 << 20);
    assert_eq!(bytes["stdout"], "//4=");
    assert_eq!(bytes["stdout_encoding"], "base64");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn each_part_of_the_cell_that_is_left_out_is_named() {
    let cell = |left_out: &[&str]| {
        let json = run(["--json"])
            .args(
                left_out
                    .iter()
                    .flat_map(|part| ["--dangerously-leave-out", part]),
            )
            .args(["--", "true"])
            .done()
            .expect(0)
            .json();
        json["cell"].clone()
    };

    let whole = cell(&[]);
    let less = cell(&["namespaces", "landlock"]);

    assert_eq!(whole["left_out"], serde_json::json!([]), "{whole}");
    assert_eq!(whole["namespaces"].as_array().unwrap().len(), 7, "{whole}");
    assert_eq!(
        (&whole["seccomp"], &whole["empty_root"], &whole["own_ids"]),
        (&true.into(), &true.into(), &true.into()),
        "{whole}"
    );
    assert!(
        whole["cgroup"]
            .as_array()
            .unwrap()
            .contains(&"memory.max".into()),
        "{whole}"
    );
    assert_eq!(
        less["left_out"],
        serde_json::json!(["namespaces", "landlock"]),
        "{less}"
    );
    assert_eq!(less["namespaces"], serde_json::json!([]), "{less}");
    assert!(
        less["landlock_abi"].is_null() && less["seccomp"] == true,
        "{less}"
    );
}
