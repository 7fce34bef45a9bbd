//! The program's status is the command's, and the reasons why there is none have codes of their own.

use std::time::Duration;

use sandvmm_tests::{Background, run};

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn every_exit_code_passes_through() {
    for code in [0, 1, 2, 7, 42, 124, 255] {
        run(["--", "sh", "-c", &format!("exit {code}")])
            .done()
            .expect(code);
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_signal_is_128_plus_its_number() {
    for signal in [1, 6, 9, 11, 15] {
        run(["--", "sh", "-c", &format!("kill -{signal} $$")])
            .done()
            .expect(128 + signal);
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_missing_program_is_127_and_named() {
    let ran = run(["--", "no-such-program"]).done().expect(127);
    assert!(ran.stderr.contains("no-such-program"), "{ran:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_missing_interpreter_is_127_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    std::fs::write(&script, "#!/opt/no/such/interpreter\n").unwrap();

    let by_line = run([&script]).done().expect(127);
    let by_extension = {
        let script = folder.path().join("script.rb");
        std::fs::write(&script, "puts 1\n").unwrap();
        run([&script]).done().expect(127)
    };

    assert!(
        by_line.stderr.contains("/opt/no/such/interpreter"),
        "{by_line:?}"
    );
    assert!(by_extension.stderr.contains("ruby"), "{by_extension:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_file_without_execute_permission_or_a_folder_is_126() {
    run(["--", "/etc/passwd"]).done().expect(126);
    run(["--", "/usr"]).done().expect(126);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_missing_working_folder_or_user_is_125_and_named() {
    let folder = run(["-w", "/no/such/folder", "--", "true"])
        .done()
        .expect(125);
    let user = run(["-u", "nosuchuser", "--", "true"]).done().expect(125);

    assert!(folder.stderr.contains("/no/such/folder"), "{folder:?}");
    assert!(user.stderr.contains("nosuchuser"), "{user:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_time_out_is_124_and_takes_the_descendants_with_it() {
    let program = "import subprocess, time
subprocess.Popen(['sh', '-c', 'trap \"\" TERM INT; sleep 1000 & sleep 1000'])
print('started', flush=True)
time.sleep(1000)";

    let ran = run(["--timeout", "15s", "-c", program]).done().expect(124);

    assert_eq!(ran.text(), "started\n");
    assert!(ran.wall < Duration::from_secs(60), "{ran:?}");
    assert!(
        ran.stderr.contains("15 s"),
        "the message names the limit: {ran:?}"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_program_that_burns_the_processor_is_timed_out_too() {
    run(["--timeout", "10s", "-c", "while True: pass"])
        .done()
        .expect(124);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_run_ends_with_its_program_whatever_its_children_hold_open() {
    let ran = run(["--", "sh", "-c", "sleep 1000 & echo done; exit 3"])
        .done()
        .expect(3);

    assert_eq!(ran.text(), "done\n");
    assert!(ran.wall < Duration::from_secs(60), "{ran:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_quiet_program_is_not_cut_short() {
    let ran = run(["--", "sh", "-c", "sleep 20; echo still here"])
        .done()
        .expect(0);
    assert_eq!(ran.text(), "still here\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_default_timeout_is_thirty_seconds_and_zero_means_none() {
    let mut endless = Background::run(["--timeout", "0", "--", "sleep", "35"]);

    run(["--", "sleep", "45"]).done().expect(124);

    assert_eq!(endless.wait(), Some(0));
}
