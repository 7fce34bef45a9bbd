//! Machines that wait before anybody asks.

use std::time::{Duration, Instant};

use sandvmm::{Outcome, Pool, PoolError, Template};
use sandvmm_tests::children_of;

use super::{Named, python, shell, text, warmed};

/// How long a pool may take to fill itself, on an emulated processor.
const PATIENCE: Duration = Duration::from_secs(60);

fn template(name: &str) -> Named {
    let parent = warmed("import json");
    let template = Named::of(&parent, name);
    parent.end();
    template
}

/// How many machines there are that have this template's memory. Other tests of this process have machines at the same time.
fn machines_of(template: &Template) -> usize {
    let folder = template.folder().to_str().unwrap();
    let has_its_memory = |machine: &u32| {
        // One that has just ended has none.
        std::fs::read_to_string(format!("/proc/{machine}/maps"))
            .is_ok_and(|maps| maps.contains(folder))
    };
    let children = children_of(std::process::id());
    children
        .iter()
        .filter(|child| has_its_memory(child))
        .count()
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_pool_has_machines_ready_refills_itself_and_keeps_its_ceiling() {
    let template = template("pool");
    let pool = Pool::builder(&template.0)
        .ready(2)
        .ceiling(4)
        .build()
        .unwrap();
    pool.wait_filled().unwrap();
    assert_eq!((pool.waiting(), machines_of(&template.0)), (2, 2));

    let first = pool.take().unwrap();
    let output = python(&first, "print('hello')").output().unwrap();
    assert_eq!(output.stdout, b"hello\n");
    assert!(output.completion.warm);
    let clocks = first.clocks();
    assert_eq!(
        clocks.vcpu_running,
        Some(Duration::ZERO),
        "it ran before it was taken"
    );
    assert!(clocks.first_output.unwrap() > Duration::ZERO);

    let mut taken = vec![first];
    taken.extend((0..3).map(|_| pool.take().unwrap()));
    let names: std::collections::HashSet<String> = taken
        .iter()
        .map(|sandbox| shell(sandbox, "uname -n"))
        .collect();
    assert_eq!(names.len(), 4, "{names:?}");
    let error = pool.take().unwrap_err();
    assert!(matches!(error, PoolError::Full { ceiling: 4 }), "{error:?}");
    assert_eq!(machines_of(&template.0), 4);
    let asked = Instant::now();
    pool.take_within(Duration::from_millis(300)).unwrap_err();
    assert!(asked.elapsed() >= Duration::from_millis(300));
    assert_eq!(machines_of(&template.0), 4);

    drop(taken.pop());
    taken.push(pool.take_within(PATIENCE).unwrap());
    drop(pool);
    // Those that were taken live on, and nothing else.
    assert_eq!(text(&mut python(&taken[0], "print(1)")), "1\n");
    assert_eq!(machines_of(&template.0), 4);
    drop(taken);
    assert_eq!(machines_of(&template.0), 0);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_time_of_a_pools_machine_begins_when_it_is_taken() {
    let template = template("pool-time");
    let pool = Pool::builder(&template.0)
        .ready(1)
        .ceiling(1)
        .timeout(Some(Duration::from_secs(10)))
        .build()
        .unwrap();
    pool.wait_filled().unwrap();
    std::thread::sleep(Duration::from_secs(12));

    let sandbox = pool.take().unwrap();

    assert_eq!(shell(&sandbox, "echo lives"), "lives\n");
    let asleep = sandbox.command("sleep").arg("100").output().unwrap();
    assert_eq!(asleep.completion.outcome, Outcome::TimedOut);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_pool_whose_machines_do_not_start_says_why_and_tries_again() {
    let template = template("pool-trouble");
    let pool = Pool::builder(&template.0)
        .options(|builder| builder.hostname("-no-name-"))
        .build()
        .unwrap();

    for _ in 0..2 {
        let error = pool.take().unwrap_err();
        assert!(matches!(error, PoolError::Start(_)), "{error:?}");
    }
    let name = template.0.folder().file_name().unwrap().to_str().unwrap();
    Template::inspect(name).unwrap();
}
