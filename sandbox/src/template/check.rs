//! Whether a template and what it was built from are still what they were.
//!
//! A file's content is compared by its SHA-256, which takes a while for a large one. What was compared is remembered beside the
//! template, in `verified.json`: the file's device, number, length and both times. The time of the last status change can't be set
//! by anyone, and every write moves it, so a file that has all of these is the same without being read again. The note also has
//! the host's boot: within one the processor is the same.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::{TemplateError, file};
use super::manifest::{InputFile, hex};
use crate::name::unique;

/// Bytes read at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;

/// Largest note in bytes: it has an entry for each file that was copied, as the manifest does.
const MAX_NOTE_BYTES: u64 = 1 << 20;

/// Where the note is, in the template's folder.
const NOTE: &str = "verified.json";

/// Permissions of the note: nobody but the template's owner has use for it.
const PRIVATE: u32 = 0o600;

/// The host's boot, a number that is new with each.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What identifies a file without reading it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    status_changed: (i64, i64),
}

/// A file that was compared, by the digest that it had.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Compared {
    sha256: String,
    identity: Identity,
}

/// What was compared before.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Note {
    boot_id: Option<String>,
    files: Vec<Compared>,
    #[serde(skip)]
    is_news: bool,
}

impl Note {
    /// The note of a template; an empty one where there is none that can be read.
    pub(super) fn read(folder: &Path) -> Self {
        let read = || -> Option<Self> {
            let mut text = Vec::new();
            File::open(folder.join(NOTE))
                .ok()?
                .take(MAX_NOTE_BYTES)
                .read_to_end(&mut text)
                .ok()?;
            serde_json::from_slice(&text).ok()
        };
        read().unwrap_or_default()
    }

    /// Reads an open file, notes what it is, and gives its digest.
    ///
    /// # Errors
    /// When it can't be read.
    pub(super) fn digest(
        &mut self,
        opened: &File,
        path: &Path,
        content: Content,
    ) -> Result<String, TemplateError> {
        // Before it is read: what changes meanwhile is not what was noted.
        let identity = identity(opened).map_err(file("Inspecting", path))?;
        let sha256 = digest(opened, path, content)?;
        self.files.push(Compared {
            sha256: sha256.clone(),
            identity,
        });
        self.is_news = true;
        Ok(sha256)
    }

    /// Whether the open file has the known content: by the note, else by reading it.
    ///
    /// # Errors
    /// When it can't be read.
    pub(super) fn has_content(
        &mut self,
        opened: &File,
        known: &InputFile,
        content: Content,
    ) -> Result<bool, TemplateError> {
        self.has(opened, known, || digest(opened, &known.path, content))
    }

    /// The same of a content that is digested in another way.
    ///
    /// # Errors
    /// When it can't be read.
    pub(super) fn has(
        &mut self,
        opened: &File,
        known: &InputFile,
        digest: impl FnOnce() -> Result<String, TemplateError>,
    ) -> Result<bool, TemplateError> {
        let identity = identity(opened).map_err(file("Inspecting", &known.path))?;
        let compared = Compared {
            sha256: known.sha256.clone(),
            identity,
        };
        if self.files.contains(&compared) {
            return Ok(true);
        }
        if digest()? != known.sha256 {
            return Ok(false);
        }
        self.files
            .retain(|other| other.identity.inode != compared.identity.inode);
        self.files.push(compared);
        self.is_news = true;
        Ok(true)
    }

    /// Whether the host is the one, since it was started, that the template was compared with.
    pub(super) fn is_of_this_boot(&self) -> bool {
        self.boot_id.is_some() && self.boot_id == boot_id()
    }

    /// The template was compared with this host.
    pub(super) fn set_this_boot(&mut self) {
        self.boot_id = boot_id();
        self.is_news = true;
    }

    /// Keeps what is new. A folder that can't be written to has its files read again next time.
    pub(super) fn write(&self, folder: &Path) {
        if !self.is_news {
            return;
        }
        let text = serde_json::to_vec(self).unwrap_or_default();
        let new = folder.join(format!(".{NOTE}.{}", unique()));
        let written = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(PRIVATE)
            .open(&new)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| fs::rename(&new, folder.join(NOTE)));
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
    }
}

fn boot_id() -> Option<String> {
    fs::read_to_string(BOOT_ID)
        .ok()
        .map(|text| text.trim().to_owned())
}

fn identity(file: &File) -> std::io::Result<Identity> {
    let metadata = file.metadata()?;
    Ok(Identity {
        device: metadata.dev(),
        inode: metadata.ino(),
        bytes: metadata.len(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        status_changed: (metadata.ctime(), metadata.ctime_nsec()),
    })
}

/// How a file's content is digested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Every byte.
    Whole,
    /// The length, and each page that is not all zeros with its number: most of a guest's memory is zeros, whether the file
    /// system keeps them or not.
    Sparse,
}

/// SHA-256 of a file's content, in hexadecimal digits. Its position is not used.
///
/// # Errors
/// When it can't be read.
pub(super) fn digest(
    opened: &File,
    path: &Path,
    content: Content,
) -> Result<String, TemplateError> {
    let mut digest = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut offset = 0_u64;
    loop {
        let count = fill(opened, &mut chunk, offset).map_err(file("Reading", path))?;
        let read = chunk.get(..count).unwrap_or_default();
        match content {
            Content::Whole => digest.update(read),
            Content::Sparse => {
                for (page_offset, page) in
                    (offset..).step_by(PAGE_BYTES).zip(read.chunks(PAGE_BYTES))
                {
                    if page.iter().any(|byte| *byte != 0) {
                        digest.update(page_offset.to_le_bytes());
                        digest.update(page);
                    }
                }
            }
        }
        offset += count as u64;
        if count < CHUNK_BYTES {
            if content == Content::Sparse {
                digest.update(offset.to_le_bytes());
            }
            return Ok(hex(&digest.finalize()));
        }
    }
}

/// Reads until the chunk is full or the file has ended.
fn fill(opened: &File, chunk: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let mut count = 0;
    while let Some(rest) = chunk.get_mut(count..).filter(|rest| !rest.is_empty()) {
        match opened.read_at(rest, offset + count as u64) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn what_was_read_for_its_digest_is_not_read_again_before_it_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "abc").unwrap();
        let mut note = Note::default();

        let sha256 = note
            .digest(&File::open(&path).unwrap(), &path, Content::Whole)
            .unwrap();

        assert_eq!(sha256, ABC);
        let known = InputFile {
            path: path.clone(),
            sha256,
        };
        // One that can't be read.
        let opened = File::options().write(true).open(&path).unwrap();
        assert!(note.has_content(&opened, &known, Content::Whole).unwrap());
        note.write(folder.path());
        let mut note = Note::read(folder.path());
        assert!(note.has_content(&opened, &known, Content::Whole).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(&path, "abd").unwrap();
        let opened = File::open(&path).unwrap();
        assert!(!note.has_content(&opened, &known, Content::Whole).unwrap());
    }

    #[test]
    fn content_is_compared_once_and_again_after_every_change() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "abc").unwrap();
        let known = InputFile {
            path: path.clone(),
            sha256: ABC.into(),
        };
        let check = |note: &mut Note| {
            note.is_news = false;
            let file = File::open(&path).unwrap();
            let is_same = note.has_content(&file, &known, Content::Whole).unwrap();
            (is_same, note.is_news)
        };

        let mut note = Note::read(folder.path());
        assert_eq!(check(&mut note), (true, true));
        note.is_news = true;
        note.write(folder.path());
        let written = fs::metadata(folder.path().join(NOTE)).unwrap();
        assert_eq!(written.mode() & 0o777, PRIVATE);
        let mut note = Note::read(folder.path());
        assert_eq!(check(&mut note), (true, false));

        // The same length, and the old time of modification.
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(&path, "abd").unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(modified)
            .unwrap();
        assert_eq!(check(&mut note), (false, false));
        fs::write(&path, "abc").unwrap();
        assert_eq!(check(&mut note), (true, true));
    }

    #[test]
    fn a_sparse_digest_is_of_pages_their_places_and_the_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let digest_of = |len: u64, writes: &[(u64, &[u8])]| {
            let file = File::create_new(&path).unwrap();
            file.set_len(len).unwrap();
            for (offset, bytes) in writes {
                file.write_all_at(bytes, *offset).unwrap();
            }
            drop(file);
            let digest = digest(&File::open(&path).unwrap(), &path, Content::Sparse).unwrap();
            fs::remove_file(&path).unwrap();
            digest
        };
        let len = 3 << 20;
        let one = digest_of(len, &[(0x2000, b"a")]);

        assert_eq!(digest_of(len, &[(0x2000, b"a"), (0x9000, &[0; 4096])]), one);
        assert_ne!(digest_of(len, &[(0x3000, b"a")]), one);
        assert_ne!(digest_of(len, &[(0x2001, b"a")]), one);
        assert_ne!(digest_of(len + 4096, &[(0x2000, b"a")]), one);
        assert_ne!(digest_of(len, &[(0x2000, b"a"), (len - 1, b"b")]), one);
    }

    #[test]
    fn a_note_that_is_none_counts_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(NOTE), "{").unwrap();
        let note = Note::read(folder.path());
        assert!(!note.is_of_this_boot());
        assert!(note.files.is_empty());
    }

    #[test]
    fn a_host_is_known_by_its_boot() {
        let mut note = Note::default();
        assert!(!note.is_of_this_boot());
        note.set_this_boot();
        assert!(note.is_of_this_boot());
        note.boot_id = Some("another".into());
        assert!(!note.is_of_this_boot());
    }
}
