//! Watching files of a real guest.

use std::iter;
use std::time::Duration;

use sandvmm::{ChangeKind, FileError};

use crate::{Test, machine, printed};

pub(crate) const TESTS: &[Test] = &[(
    "what_a_program_does_in_a_watched_folder_is_told_and_nothing_else",
    watched,
)];

/// How long a change may take to be told, on an emulated processor.
const TOLD_WITHIN: Duration = Duration::from_secs(60);

/// After this nothing more comes of what was done.
const QUIET: Duration = Duration::from_secs(2);

fn watched() {
    let sandbox = machine();
    let files = sandbox.files();
    files.create_dir_all("in").unwrap();
    files.create_dir_all("beside").unwrap();
    let mut watch = files.watch("in").unwrap();

    printed(
        &sandbox,
        "sh",
        "echo 1 > beside/x; echo 1 > in/a; mv in/a in/b; mkdir in/sub; echo 1 > in/sub/y; rm in/b",
    );

    let mut seen = Vec::new();
    while !seen.contains(&(ChangeKind::Removed, "b".into())) {
        let change = watch.next_within(TOLD_WITHIN).unwrap().unwrap();
        seen.push((change.kind, change.name.into_string().unwrap()));
    }
    let told = |kind, name: &str| (kind, name.to_owned());
    assert_eq!(
        seen,
        [
            told(ChangeKind::Created, "a"),
            told(ChangeKind::Modified, "a"),
            told(ChangeKind::Written, "a"),
            told(ChangeKind::MovedAway, "a"),
            told(ChangeKind::MovedHere, "b"),
            told(ChangeKind::Created, "sub"),
            told(ChangeKind::Removed, "b"),
        ]
    );
    // Written by the host: atomically, under another name before.
    files.write("in/c", &b"1"[..]).unwrap();
    let mut here = || watch.next_within(TOLD_WITHIN).unwrap().unwrap();
    while here().kind != ChangeKind::MovedHere {}
    // The agent may close it after that.
    let after: Vec<_> = iter::from_fn(|| watch.next_within(QUIET))
        .map(|change| change.unwrap())
        .filter(|change| {
            (change.kind, change.name.as_os_str()) != (ChangeKind::Written, "c".as_ref())
        })
        .collect();
    assert_eq!(after, []);
    files.remove("in").unwrap();
    for change in watch {
        change.unwrap();
    }
    let error = files.watch("in").unwrap_err();
    assert!(matches!(error, FileError::NotFound(_)), "{error:?}");
    // Many that are dropped leave their places.
    for _ in 0..100 {
        drop(files.watch("/tmp").unwrap());
    }
}
