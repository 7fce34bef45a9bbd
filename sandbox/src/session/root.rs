//! The folder of all sessions of a user, which nobody else may look into.
//!
//! It may lie where all may write (`/tmp`). Whoever can change it could name processes to be signalled, files to be removed and a socket to be
//! talked to: a folder that is not this user's alone is refused, whether sessions are made or looked for.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::SessionError;

/// The folder of all sessions of this user: `$XDG_RUNTIME_DIR/sandvmm/sessions`, for root without that `/run/sandvmm/sessions`, for others
/// `/tmp/sandvmm-UID/sessions`.
///
/// A runtime folder is this user's with mode 0700 (XDG Base Directory Specification). Another one, as a changed user may inherit it, is none.
pub(super) fn root() -> PathBuf {
    let uid = rustix::process::geteuid();
    let base = match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(folder) if folder.is_absolute() && matches!(is_private(&folder), Ok(true)) => {
            folder.join("sandvmm")
        }
        _ if uid.is_root() => PathBuf::from("/run/sandvmm"),
        _ => PathBuf::from(format!("/tmp/sandvmm-{}", uid.as_raw())),
    };
    base.join("sessions")
}

/// Makes a folder that nobody else may look into, if it is not there; refuses one that is not so. `false` where it is gone again.
pub(super) fn make_private(path: &Path) -> Result<bool, SessionError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(failed("made", path)(error));
        }
        _ => {}
    }
    is_private(path)
}

/// Whether there is such a folder; refuses one of somebody else, or that others may look into.
fn is_private(path: &Path) -> Result<bool, SessionError> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        found => found.map_err(failed("looked at", path))?,
    };
    let uid = rustix::process::geteuid().as_raw();
    if found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0 {
        return Ok(true);
    }
    Err(SessionError::NotPrivate {
        path: path.to_owned(),
    })
}

/// Whether there is a folder of sessions. Whoever made it, what is in it is believed only where nobody else can have put it there.
pub(super) fn is_there(root: &Path) -> Result<bool, SessionError> {
    let base = root.parent().map_or(Ok(true), is_private)?;
    Ok(base && is_private(root)?)
}

/// What could not be done with a path.
pub(super) fn failed<'a>(
    done: &'static str,
    path: &'a Path,
) -> impl Fn(io::Error) -> SessionError + 'a {
    move |source| SessionError::File {
        done,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_is_not_there_is_nothing_and_what_others_may_change_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let root = base.path().join("own/sessions");
        let change = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        assert!(!is_there(&root).unwrap());
        make_private(root.parent().unwrap()).unwrap();
        assert!(!is_there(&root).unwrap());
        make_private(&root).unwrap();
        assert!(is_there(&root).unwrap());

        for path in [root.parent().unwrap(), &root] {
            for mode in [0o701, 0o710, 0o777] {
                change(path, mode);
                let refused = is_there(&root);
                assert!(matches!(refused, Err(SessionError::NotPrivate { .. })));
            }
            change(path, 0o700);
        }

        let link = base.path().join("own/link");
        std::os::unix::fs::symlink(&root, &link).unwrap();
        let refused = is_there(&link);
        assert!(matches!(refused, Err(SessionError::NotPrivate { .. })));
    }
}
