//! Has programs trust the sandbox's own authority, beside all that the image trusts.
//!
//! Files of their own, of which variables tell; and, for programs that look at the image's list alone, that list with the
//! authority in it, laid over the image's: nothing of it stays on a disk that outlives the sandbox.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use protocol::gate::{AUTHORITY_FILE, TRUST_FILE, Trust};
use rustix::fs::{Mode, OFlags};
use rustix::mount::mount_bind;

/// Where distributions keep the list of who is trusted: Debian, Alpine and Arch; Red Hat; SUSE; BSD's place.
const LISTS: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Longest list that is taken over, in bytes; that of Debian has 220 KB. A longer one is as good as none.
const MAX_LIST_BYTES: u64 = 4 << 20;

/// What stands in front of the authority. In a fork there is one of a former sandbox, which is left out.
const MARK: &str = "# sandvmm: the authority of this sandbox\n";

/// Puts the certificates in their places. A list that nothing can be laid over is left as it is.
///
/// # Errors
/// When the files can't be written.
pub(super) fn install(trust: &Trust) -> io::Result<()> {
    let list = LISTS
        .iter()
        .find_map(|path| Some((Path::new(path), read(Path::new(path))?)));
    let image = list
        .as_ref()
        .map_or(trust.host_roots.as_bytes(), |(_, text)| text);
    write(Path::new(AUTHORITY_FILE), trust.authority.as_bytes())?;
    write(Path::new(TRUST_FILE), &together(image, &trust.authority))?;
    if let Some((path, _)) = list {
        // The file may be a link; what it leads to is what programs read.
        let path = fs::canonicalize(path)?;
        if !is_same(&path, Path::new(TRUST_FILE)) {
            let _ = mount_bind(TRUST_FILE, &path);
        }
    }
    Ok(())
}

/// What the image trusts, and the authority.
fn together(image: &[u8], authority: &str) -> Vec<u8> {
    let end = image
        .windows(MARK.len())
        .position(|part| part == MARK.as_bytes())
        .unwrap_or(image.len());
    let mut all = image.get(..end).unwrap_or_default().to_vec();
    if !all.is_empty() && !all.ends_with(b"\n") {
        all.push(b'\n');
    }
    all.extend_from_slice(MARK.as_bytes());
    all.extend_from_slice(authority.as_bytes());
    all
}

/// A list that is there and no longer than is taken over: a part of one would end within a certificate.
fn read(path: &Path) -> Option<Vec<u8>> {
    // An image may have a pipe there, which nobody writes to.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = Vec::new();
    let count = file.take(MAX_LIST_BYTES + 1).read_to_end(&mut text).ok()?;
    let is_whole = u64::try_from(count).is_ok_and(|count| count <= MAX_LIST_BYTES);
    (is_whole && !text.is_empty()).then_some(text)
}

/// Writes a file that everybody may read. It is written to and not replaced: it may be laid over another. One that has this
/// content is left alone, as programs may be reading it.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|known| known == content) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(folder)?;
        fs::set_permissions(folder, Permissions::from_mode(0o755))?;
    }
    fs::write(path, content)?;
    fs::set_permissions(path, Permissions::from_mode(0o644))
}

fn is_same(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (fs::metadata(one), fs::metadata(other)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_taken_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list");
        assert_eq!(read(&path), None);
        fs::write(&path, "a list").unwrap();
        assert_eq!(read(&path).unwrap(), b"a list");
        let longest = usize::try_from(MAX_LIST_BYTES).unwrap();
        fs::write(&path, vec![b'x'; longest]).unwrap();
        assert_eq!(read(&path).map(|text| text.len()), Some(longest));
        fs::write(&path, vec![b'x'; longest + 1]).unwrap();
        assert_eq!(read(&path), None);

        // Nobody writes to it, and nothing waits for that.
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            Mode::RWXU,
            0,
        )
        .unwrap();
        assert_eq!(read(&pipe), None);
        assert_eq!(read(Path::new("/dev/zero")), None);
    }

    #[test]
    fn a_former_authority_is_left_out() {
        let first = together(b"image", "one\n");
        assert_eq!(first, format!("image\n{MARK}one\n").as_bytes());
        assert_eq!(
            together(&first, "two\n"),
            format!("image\n{MARK}two\n").as_bytes()
        );
        assert_eq!(together(b"", "one\n"), format!("{MARK}one\n").as_bytes());
    }
}
