//! Many forks of one template at the same time.

use sandvmm::{Sandbox, SandboxBuilder};
use sandvmm_tests::resident_kib;

use super::{Named, machine, python, shell, text, warmed};

/// How many live at once.
const FORKS: usize = 50;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn fifty_forks_live_at_once_and_the_template_is_what_it_was() {
    let parent = warmed("import json");
    let template = Named::of(&parent, "many");
    parent.end();

    let begun: Vec<Sandbox> = (0..FORKS)
        .map(|_| template.0.sandbox())
        .map(SandboxBuilder::begin)
        .collect::<Result<_, _>>()
        .unwrap();
    let forks: Vec<Sandbox> = begun
        .into_iter()
        .inspect(|fork| fork.wait_ready().unwrap())
        .collect();

    for (number, fork) in forks.iter().enumerate() {
        let code = format!("open('own', 'w').write('{number}'); print(open('own').read())");
        assert_eq!(text(&mut python(fork, &code)), format!("{number}\n"));
    }
    for (number, fork) in forks.iter().enumerate() {
        assert_eq!(shell(fork, "cat own"), number.to_string());
    }
    drop(forks);
    let name = template.0.folder().file_name().unwrap().to_str().unwrap();
    sandvmm::Template::verify(name).unwrap();
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_sandbox_in_use_has_forks_that_share_nothing_but_the_past() {
    let parent = machine();
    shell(&parent, "echo before > ~/file");

    let forks = parent.fork(3).unwrap();

    shell(&parent, "echo parent >> ~/file");
    let mut names = vec![shell(&parent, "uname -n")];
    for (number, fork) in forks.iter().enumerate() {
        shell(fork, &format!("echo {number} >> ~/file"));
        names.push(shell(fork, "uname -n"));
    }
    for (number, fork) in forks.iter().enumerate() {
        assert_eq!(shell(fork, "cat ~/file"), format!("before\n{number}\n"));
    }
    assert_eq!(shell(&parent, "cat ~/file"), "before\nparent\n");
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), 4, "{names:?}");
    // A fork of a fork, when its parents are gone; and of a fork there is a template.
    let last = forks.into_iter().next_back().unwrap();
    parent.end();
    let mut generations = last.fork(1).unwrap();
    last.end();
    let fork = generations.remove(0);
    assert_eq!(shell(&fork, "cat ~/file"), "before\n2\n");
    let template = Named::of(&fork, "of-fork");
    assert_eq!(shell(&template.fork(), "cat ~/file"), "before\n2\n");
    assert!(resident_kib(std::process::id()).unwrap() < 1 << 20);
}
