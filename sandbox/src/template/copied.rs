//! What was copied into a template: one digest over names, modes, links and bytes of a file, or of a folder with all that is in it.
//!
//! What [`Files::copy_in`](crate::Files::copy_in) copies is what counts: the root may be a link and is followed, links below it are links, and devices, pipes and
//! sockets are none of it. Times are not: the same files give the same digest.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use protocol::file::MODE_BITS;
use sha2::{Digest, Sha256};

use super::check::{Content, Note, digest};
use super::error::{TemplateError, file};
use super::manifest::{Copied, InputFile, hex};

/// One letter for each kind of entry.
const FOLDER: u8 = b'd';
const FILE: u8 = b'f';
const LINK: u8 = b'l';

/// A digest that entries are added to, in the order of their paths.
struct Entries(Sha256);

impl Entries {
    fn new() -> Self {
        Self(Sha256::new())
    }

    /// `path` is the entry's below the root, and the root's is empty.
    fn add(&mut self, path: &Path, kind: u8, mode: u32, content: &[u8]) {
        let path = path.as_os_str().as_bytes();
        self.0.update((path.len() as u64).to_le_bytes());
        self.0.update(path);
        self.0.update([kind]);
        self.0.update((mode & MODE_BITS).to_le_bytes());
        self.0.update((content.len() as u64).to_le_bytes());
        self.0.update(content);
    }

    fn finish(self) -> String {
        hex(&self.0.finalize())
    }
}

/// The digest of a file alone, which is open.
///
/// # Errors
/// When it can't be read.
pub(super) fn file_digest(opened: &File, path: &Path) -> Result<String, TemplateError> {
    let mode = opened.metadata().map_err(file("Inspecting", path))?.mode();
    let content = digest(opened, path, Content::Whole)?;
    let mut entries = Entries::new();
    entries.add(Path::new(""), FILE, mode, content.as_bytes());
    Ok(entries.finish())
}

/// The digest of what is at `root`.
///
/// # Errors
/// When something of it can't be read.
pub(super) fn tree_digest(root: &Path) -> Result<String, TemplateError> {
    let mut entries = Entries::new();
    for inner in paths(root)? {
        let path = inside(root, &inner);
        let found = look(root, &inner).map_err(file("Inspecting", &path))?;
        let kind = found.file_type();
        if kind.is_dir() {
            entries.add(&inner, FOLDER, found.mode(), b"");
        } else if kind.is_symlink() {
            let target = fs::read_link(&path).map_err(file("Reading", &path))?;
            // A link's mode says nothing.
            entries.add(&inner, LINK, 0, target.as_os_str().as_bytes());
        } else if kind.is_file() {
            let opened = File::open(&path).map_err(file("Opening", &path))?;
            let content = digest(&opened, &path, Content::Whole)?;
            entries.add(&inner, FILE, found.mode(), content.as_bytes());
        }
    }
    Ok(entries.finish())
}

/// All paths below the root with the root's own, in order.
fn paths(root: &Path) -> Result<Vec<PathBuf>, TemplateError> {
    let mut found = Vec::new();
    let mut left = vec![PathBuf::new()];
    while let Some(inner) = left.pop() {
        let path = inside(root, &inner);
        if look(root, &inner)
            .map_err(file("Inspecting", &path))?
            .is_dir()
        {
            for entry in fs::read_dir(&path).map_err(file("Reading", &path))? {
                left.push(inner.join(entry.map_err(file("Reading", &path))?.file_name()));
            }
        }
        found.push(inner);
    }
    found.sort();
    Ok(found)
}

/// Without a slash behind a root that is a file.
fn inside(root: &Path, inner: &Path) -> PathBuf {
    if inner.as_os_str().is_empty() {
        root.to_owned()
    } else {
        root.join(inner)
    }
}

fn look(root: &Path, inner: &Path) -> io::Result<Metadata> {
    if inner.as_os_str().is_empty() {
        fs::metadata(root)
    } else {
        fs::symlink_metadata(root.join(inner))
    }
}

/// Sees that a file that was copied is what it was, for a fork: which costs a look at it. One that is gone is nothing that has changed, since
/// the copy is in the template; and a folder would cost a look at each file in it. Both are for [`compare`].
///
/// # Errors
/// [`TemplateError::Changed`].
pub(super) fn look_at(note: &mut Note, copied: &Copied) -> Result<(), TemplateError> {
    let (Some(path), false) = (&copied.host_path, copied.is_folder) else {
        return Ok(());
    };
    let is_same = match File::open(path) {
        Ok(opened) if opened.metadata().is_ok_and(|found| found.is_file()) => {
            let known = InputFile {
                path: path.clone(),
                sha256: copied.sha256.clone(),
            };
            note.has(&opened, &known, || file_digest(&opened, path))?
        }
        Ok(_) => false,
        Err(_) => return Ok(()),
    };
    is_same.then_some(()).ok_or_else(|| changed(copied, path))
}

/// Reads all of what was copied, and sees that it is what it was.
///
/// # Errors
/// [`TemplateError::Changed`], also where it is gone.
pub(super) fn compare(copied: &Copied) -> Result<(), TemplateError> {
    // The record of a former version does not say what it was copied from.
    let Some(path) = &copied.host_path else {
        return Ok(());
    };
    match tree_digest(path) {
        Ok(sha256) if sha256 == copied.sha256 => Ok(()),
        _ => Err(changed(copied, path)),
    }
}

fn changed(copied: &Copied, path: &Path) -> TemplateError {
    TemplateError::Changed {
        role: if copied.is_folder {
            "copied folder"
        } else {
            "copied file"
        },
        path: path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn tree() -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        fs::create_dir(root.join("sub")).unwrap();
        fs::write(root.join("sub/a"), "a").unwrap();
        fs::write(root.join("b"), "bb").unwrap();
        symlink("b", root.join("link")).unwrap();
        tree
    }

    #[test]
    fn the_same_files_have_one_digest_wherever_and_whenever_they_are() {
        let (one, two) = (tree(), tree());
        let past = std::time::SystemTime::UNIX_EPOCH;
        let opened = File::options().write(true).open(one.path().join("b"));
        opened.unwrap().set_modified(past).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(two.path().join("socket")).unwrap();

        assert_eq!(
            tree_digest(one.path()).unwrap(),
            tree_digest(two.path()).unwrap()
        );
    }

    #[test]
    fn names_modes_links_and_bytes_count() {
        let changes: [fn(&Path); 8] = [
            |root| fs::write(root.join("b"), "bc").unwrap(),
            |root| fs::set_permissions(root.join("b"), Permissions::from_mode(0o711)).unwrap(),
            |root| fs::set_permissions(root.join("sub"), Permissions::from_mode(0o711)).unwrap(),
            |root| fs::rename(root.join("b"), root.join("c")).unwrap(),
            |root| fs::rename(root.join("sub/a"), root.join("a")).unwrap(),
            |root| fs::create_dir(root.join("empty")).unwrap(),
            |root| fs::remove_file(root.join("sub/a")).unwrap(),
            |root| {
                fs::remove_file(root.join("link")).unwrap();
                symlink("sub/a", root.join("link")).unwrap();
            },
        ];
        let mut seen = vec![tree_digest(tree().path()).unwrap()];
        for change in changes {
            let tree = tree();
            change(tree.path());
            let digest = tree_digest(tree.path()).unwrap();
            assert!(!seen.contains(&digest), "{seen:?}");
            seen.push(digest);
        }
    }

    #[test]
    fn a_file_alone_is_a_tree_of_one() {
        let tree = tree();
        let path = tree.path().join("b");
        let opened = File::open(&path).unwrap();
        let digest = file_digest(&opened, &path).unwrap();
        assert_eq!(digest, tree_digest(&path).unwrap());
        assert_eq!(digest, tree_digest(&tree.path().join("link")).unwrap());
    }
}
