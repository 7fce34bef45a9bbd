//! Trees that are copied into a real guest and out of it: whose the copies are, and from when.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use sandvmm::{CopyLimits, Sandbox};

use crate::{Test, machine, printed};

pub(crate) const TESTS: &[Test] = &[(
    "trees_keep_mode_and_time_and_owners_where_these_are_asked_for_and_may_be_given",
    owners,
)];

/// Owner and group of the original: nobody's on either side.
const UID: u32 = 4321;
const GID: u32 = 1234;

/// When all of it was changed last, in seconds since the Unix epoch.
const MODIFIED_S: u64 = 1_000_000_000;

/// A folder with a program that runs as its owner, and a link.
fn original(root: &Path) {
    fs::create_dir_all(root.join("sub")).unwrap();
    let tool = root.join("sub/tool");
    fs::write(&tool, "content").unwrap();
    symlink("tool", root.join("sub/link")).unwrap();
    for path in ["sub/tool", "sub", ""] {
        chown(root.join(path), Some(UID), Some(GID)).unwrap();
    }
    lchown(root.join("sub/link"), Some(UID), Some(GID)).unwrap();
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o4751)).unwrap();
    fs::set_permissions(root.join("sub"), fs::Permissions::from_mode(0o711)).unwrap();
    let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(MODIFIED_S);
    for path in ["sub/tool", "sub"] {
        let file = fs::File::open(root.join(path)).unwrap();
        file.set_modified(modified).unwrap();
    }
}

fn in_guest(sandbox: &Sandbox, path: &str) -> String {
    let code =
        format!("stat -c '%u:%g %a %Y' {path}/sub/tool {path}/sub; stat -c %u:%g {path}/sub/link");
    printed(sandbox, "sh", &code)
}

/// Owner, mode and time of a file that came out.
fn on_host(path: &Path) -> (u32, u32, u32, i64) {
    let found = fs::metadata(path).unwrap();
    (
        found.uid(),
        found.gid(),
        found.mode() & 0o7777,
        found.mtime(),
    )
}

fn owners() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("from");
    original(&from);
    let sandbox = machine();
    let user = printed(&sandbox, "sh", "echo $(id -u):$(id -g)");
    let user = user.trim();
    let (plain, keeping) = (sandbox.files(), sandbox.files().keep_owners(true));
    let (root, root_keeping) = (
        sandbox.files().user("root"),
        sandbox.files().user("root").keep_owners(true),
    );

    for (files, path, owner) in [
        (&plain, "/tmp/plain", user),
        (&keeping, "/tmp/keeping", user),
        (&root, "/srv/root", "0:0"),
        (&root_keeping, "/srv/keeping", "4321:1234"),
    ] {
        files.copy_in(&from, path).unwrap();
        let expected = format!("{owner} 4751 {MODIFIED_S}\n{owner} 711 {MODIFIED_S}\n{owner}\n");
        assert_eq!(in_guest(&sandbox, path), expected, "{path}");
    }

    // What runs here may give files away.
    let own = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    assert_eq!(own.0, 0);
    let modified = i64::try_from(MODIFIED_S).unwrap();
    for (files, name, (uid, gid)) in [(&root, "out", own), (&root_keeping, "kept", (UID, GID))] {
        let to = folder.path().join(name);
        let copied = files
            .copy_out("/srv/keeping", &to, CopyLimits::default())
            .unwrap();
        assert_eq!(copied.left_out, [Path::new("sub/link")]);
        assert_eq!(on_host(&to.join("sub/tool")), (uid, gid, 0o751, modified));
        assert_eq!(on_host(&to.join("sub")), (uid, gid, 0o711, modified));
    }
}
