//! Many runs, many at a time: nothing grows.

use std::sync::atomic::{AtomicUsize, Ordering};

use sandvmm_tests::{children_of, is_alive, run};

/// Numbers of everything that a run could leave behind on the host, whatever else runs there.
fn footprint() -> (usize, u64) {
    let files = std::fs::read_dir(std::env::temp_dir()).unwrap().count();
    let open: u64 = std::fs::read_to_string("/proc/sys/fs/file-nr")
        .unwrap()
        .split_whitespace()
        .next()
        .unwrap()
        .parse()
        .unwrap();
    (files, open)
}

/// Machines' processes that nobody waits for.
fn orphans() -> Vec<u32> {
    children_of(1)
        .into_iter()
        .filter(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.starts_with(b"sandvmm-machine"))
        })
        .collect()
}

/// Machines' control groups whose supervisor, the first number of their names, is gone.
fn deserted_groups() -> Vec<String> {
    std::fs::read_dir("/sys/fs/cgroup")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
        .filter(|name| {
            let numbers = name.strip_prefix("sandvmm-");
            let supervisor = numbers.and_then(|numbers| numbers.split('-').next()?.parse().ok());
            supervisor.is_some_and(|pid| !is_alive(pid))
        })
        .collect()
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn two_hundred_runs_eight_at_a_time_are_all_right_and_leave_nothing() {
    const RUNS: usize = 200;
    const AT_A_TIME: usize = 8;
    let (files, open) = footprint();
    let deserted_before = deserted_groups();
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
        after.1 < open + 150,
        "open files grew from {open} to {}",
        after.1
    );
    assert!(
        after.0 <= files + 2,
        "temporary files grew from {files} to {}",
        after.0
    );
    assert_eq!(orphans(), [0u32; 0]);
    // Other tests kill supervisors, each of which leaves a group until the next machine is started.
    let mut deserted = deserted_groups();
    deserted.retain(|name| !deserted_before.contains(name));
    assert!(deserted.len() < 8, "{deserted:?}");
}
