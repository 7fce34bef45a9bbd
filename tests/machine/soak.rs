//! Many runs, many at a time: nothing grows.

use std::sync::atomic::{AtomicUsize, Ordering};

use sandvmm_tests::run;

/// Numbers of everything that a run could leave behind on the host.
fn footprint() -> (usize, usize, u64) {
    let processes = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .filter(|line| line.starts_with(b"sandvmm-machine"))
        .count();
    let files = std::fs::read_dir(std::env::temp_dir()).unwrap().count();
    let open: u64 = std::fs::read_to_string("/proc/sys/fs/file-nr")
        .unwrap()
        .split_whitespace()
        .next()
        .unwrap()
        .parse()
        .unwrap();
    (processes, files, open)
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn two_hundred_runs_eight_at_a_time_are_all_right_and_leave_nothing() {
    const RUNS: usize = 200;
    const AT_A_TIME: usize = 8;
    let (_, files, open) = footprint();
    let next = AtomicUsize::new(0);

    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= RUNS {
                        break;
                    }
                    let code = i32::try_from(number % 50).unwrap();
                    let text = format!("run {number}");
                    let ran = run(["--timeout", "120s", "--memory", "128M", "--", "sh", "-c"])
                        .arg(format!("echo {text}; exit {code}"))
                        .done()
                        .expect(code);
                    assert_eq!(ran.text(), format!("{text}\n"));
                }
            });
        }
    });

    let after = footprint();
    assert!(
        after.2 < open + 150,
        "open files grew from {open} to {}",
        after.2
    );
    assert!(
        after.1 <= files + 2,
        "temporary files grew from {files} to {}",
        after.1
    );
}
