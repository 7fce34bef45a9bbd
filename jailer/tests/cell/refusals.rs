//! Supervisors that the host refuses a part of the cell: their machines do without it, and it is told.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::skip;
use crate::supervisor::{
    CROWDED, HOARDERS_ID, HOARDING, NOBODY, NOBODYS, SUPERVISORS, end, may_give_ids,
    program_for_others, started, started_as, wait_until_gone,
};

/// A root that may not give its machines ids of their own.
struct LesserRoot {
    /// What it lacks.
    lacks: &'static str,
    /// The shell's command that makes it so.
    command: &'static str,
    /// Whether that needs no other root.
    can_be_made_by_a_user: bool,
    /// How many kinds of namespaces its machines have, and whose ids.
    namespaces: &'static str,
    ids: &'static str,
    /// What its machines keep of its ids.
    keeps: Option<&'static str>,
}

/// Lets the machines of the program after it have no user namespace.
const NO_USER_NAMESPACES: &str =
    r#"sh -c 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"' sh "$@""#;

/// Waits for its ids, of which there are as many as in most containers.
const CONTAINER: &str = r#"
    (for try in $(seq 500); do echo 0 0 65536 >/proc/$$/uid_map && break; sleep 0.02; done 2>/dev/null
    echo 0 0 65536 >/proc/$$/gid_map) &
    exec unshare -U sh -c 'for try in $(seq 500); do [ "$(id -u) $(id -g)" = "0 0" ] && exec "$@"; sleep 0.02; done' sh "#;

const LESSER_ROOTS: [LesserRoot; 7] = [
    LesserRoot {
        lacks: "other ids",
        command: r#"exec unshare -Ur "$@""#,
        can_be_made_by_a_user: true,
        namespaces: "7",
        ids: SUPERVISORS,
        keeps: Some("user, group"),
    },
    LesserRoot {
        lacks: "other ids, with process numbers of its own",
        command: r#"exec unshare -Urpf --kill-child --mount-proc "$@""#,
        can_be_made_by_a_user: true,
        namespaces: "7",
        ids: SUPERVISORS,
        keeps: Some("user, group"),
    },
    LesserRoot {
        lacks: "other ids and user namespaces",
        command: "exec unshare -Ur ",
        can_be_made_by_a_user: true,
        namespaces: "6",
        ids: SUPERVISORS,
        keeps: Some("user, group"),
    },
    LesserRoot {
        lacks: "ids for machines",
        command: CONTAINER,
        can_be_made_by_a_user: false,
        namespaces: "7",
        ids: NOBODYS,
        keeps: None,
    },
    LesserRoot {
        lacks: "ids for machines, and user namespaces",
        command: CONTAINER,
        can_be_made_by_a_user: false,
        namespaces: "6",
        ids: NOBODYS,
        keeps: None,
    },
    LesserRoot {
        lacks: "the capabilities to change user and group",
        command: r#"exec setpriv --bounding-set=-setuid,-setgid "$@""#,
        can_be_made_by_a_user: false,
        namespaces: "7",
        ids: SUPERVISORS,
        keeps: Some("user, group"),
    },
    LesserRoot {
        lacks: "the capability to change the group",
        command: r#"exec setpriv --bounding-set=-setgid "$@""#,
        can_be_made_by_a_user: false,
        namespaces: "7",
        ids: SUPERVISORS,
        keeps: Some("group"),
    },
];

pub(crate) fn a_root_that_may_give_no_ids_has_machines_without() {
    if !may_give_ids() {
        skip(
            "a_root_that_may_give_no_ids_has_machines_without",
            "it needs root to make others of it",
        );
        return;
    }
    let (_folder, program) = program_for_others();
    for root in LESSER_ROOTS {
        let users: &[u32] = if root.can_be_made_by_a_user {
            &[0, NOBODY]
        } else {
            &[0]
        };
        // What is done with the program is not said yet where the command ends without it.
        let last = match (root.command.ends_with(' '), root.namespaces) {
            (true, "6") => NO_USER_NAMESPACES,
            (true, _) => r#""$@""#,
            (false, _) => "",
        };
        for user in users {
            let mut shell = Command::new("sh");
            shell
                .args(["-c", &format!("{}{last}", root.command), "sh"])
                .arg(&program);

            let (supervisor, words) = started(shell.uid(*user).gid(*user));

            let case = format!("user {user} as a root without {}: {words:?}", root.lacks);
            assert!(words.len() >= 5, "{case}");
            assert_eq!(words[2..5], [root.namespaces, "true", root.ids], "{case}");
            let missing = words[5..].join(" ");
            match root.keeps {
                Some(keeps) => assert!(missing.contains(&format!("keeps: {keeps}")), "{case}"),
                None => assert!(!missing.contains("keeps"), "{case}"),
            }
            end(supervisor);
        }
    }
}

pub(crate) fn a_user_without_user_namespaces_is_told_what_stays() {
    if !may_give_ids() {
        skip(
            "a_user_without_user_namespaces_is_told_what_stays",
            "it needs root to forbid them",
        );
        return;
    }
    let (_folder, program) = program_for_others();
    // In a user namespace whose limit is 0, a user that is not its root.
    let mut shell = Command::new("sh");
    let become_another = format!(
        "{CONTAINER} sh -c 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --reuid 7 --regid 7 --clear-groups \"$@\"' sh \"$@\""
    );
    shell.args(["-c", &become_another, "sh"]).arg(&program);

    let (supervisor, words) = started(&mut shell);

    assert_eq!(words[2..5], ["0", "false", SUPERVISORS], "{words:?}");
    let missing = words[5..].join(" ");
    for part in ["cgroup", "bounding set", "no_new_privs"] {
        assert!(missing.contains(part), "{missing}");
    }
    let status = fs::read_to_string(format!("/proc/{}/status", words[0])).unwrap();
    let has = |line: &str| status.lines().any(|found| found == line);
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert!(has(&format!("{set}:\t0000000000000000")), "{status}");
    }
    assert!(has("NoNewPrivs:\t1"), "{status}");
    end(supervisor);
}

/// A root of a user namespace who does this `first`, and is made what it is by these `words`.
fn lesser_root(first: &str, words: &str) -> Command {
    let script = format!("{first} && exec {words} \"$@\"");
    let mut shell = Command::new("unshare");
    shell
        .args(["-Ur", "sh", "-c", &script, "sh"])
        .arg(std::env::current_exe().unwrap());
    shell
}

pub(crate) fn a_kind_of_namespace_that_is_forbidden_is_the_only_one_that_lacks() {
    for (kind, has_root) in [("net", "true"), ("mnt", "false")] {
        let forbid = format!("echo 0 >/proc/sys/user/max_{kind}_namespaces");

        let (supervisor, words) = started(&mut lesser_root(&forbid, ""));

        assert_eq!(words[2..4], ["6", has_root], "{words:?}");
        let missing = words[5..].join(" ");
        let shown = kind.replace("mnt", "mount");
        assert!(
            missing.contains(&format!("namespaces of these kinds: {shown} (")),
            "{missing}"
        );
        end(supervisor);
        wait_until_gone(&words[0]);
    }
}

pub(crate) fn a_kind_of_namespace_that_there_are_enough_of_is_told_and_none_is_left_out() {
    let mut crowded = lesser_root(
        "echo 1 >/proc/sys/user/max_net_namespaces && { unshare -n sleep 30 & sleep 0.5; }",
        "",
    );

    let (mut supervisor, words) = started_as(&mut crowded, CROWDED);

    assert!(supervisor.wait().unwrap().success());
    let said = words.join(" ");
    assert!(said.contains("raise `user.max_user_namespaces`"), "{said}");
}

pub(crate) fn a_limit_of_an_outer_namespace_leaves_the_others() {
    // What is in the inner one has no limit of its own, and can't know whether the outer one's is met for ever.
    let mut inner = lesser_root("echo 1 >/proc/sys/user/max_user_namespaces", "unshare -Ur");

    let (supervisor, words) = started(&mut inner);

    assert_eq!(words[2..4], ["6", "true"], "{words:?}");
    let missing = words[5..].join(" ");
    assert!(missing.contains("of these kinds: user ("), "{missing}");
    end(supervisor);
}

pub(crate) fn secure_bits_that_are_locked_are_told() {
    let mut locked = lesser_root(
        "echo 0 >/proc/sys/user/max_user_namespaces",
        "setpriv --securebits +noroot_locked",
    );

    let (supervisor, words) = started(&mut locked);

    let missing = words[5..].join(" ");
    assert!(missing.contains("secure bits are locked"), "{words:?}");
    let status = fs::read_to_string(format!("/proc/{}/status", words[0])).unwrap();
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let none = format!("{set}:\t0000000000000000");
        assert!(status.lines().any(|line| line == none), "{status}");
    }
    end(supervisor);
}

/// Fills the user's quota with keys that go with this process.
#[expect(unsafe_code, reason = "no crate of ours has keys")]
pub(crate) fn hoard_keys() {
    // Who has none is given one whatever the quota is.
    // SAFETY: with a null name the call reads no memory.
    let session = unsafe {
        libc::syscall(
            libc::SYS_keyctl,
            libc::KEYCTL_JOIN_SESSION_KEYRING,
            std::ptr::null::<libc::c_char>(),
        )
    };
    assert!(session > 0, "{}", std::io::Error::last_os_error());
    for number in 0_u32..100_000 {
        let name = std::ffi::CString::new(format!("of-a-test-{number}")).unwrap();
        // SAFETY: two strings and a byte that live here.
        let added = unsafe {
            libc::syscall(
                libc::SYS_add_key,
                c"user".as_ptr(),
                name.as_ptr(),
                c"x".as_ptr(),
                1_usize,
                libc::KEY_SPEC_PROCESS_KEYRING,
            )
        };
        if added < 0 {
            let error = std::io::Error::last_os_error();
            assert_eq!(error.raw_os_error(), Some(libc::EDQUOT), "{error}");
            return;
        }
    }
    panic!("there is no quota");
}

pub(crate) fn a_session_keyring_that_is_kept_is_told() {
    if !may_give_ids() {
        skip(
            "a_session_keyring_that_is_kept_is_told",
            "it needs another user, whose quota is smaller",
        );
        return;
    }
    let (_folder, program) = program_for_others();

    let (supervisor, words) = started_as(
        Command::new(&program).uid(HOARDERS_ID).gid(HOARDERS_ID),
        HOARDING,
    );

    let missing = words[5..].join(" ");
    assert!(missing.contains("session keyring"), "{words:?}");
    end(supervisor);
}
