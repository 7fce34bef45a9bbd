//! Files in the guest: written, read, listed, watched, and copied with all that is in them.

mod copy_in;
mod copy_out;
mod exchange;
mod extract;
mod metadata;
mod read;
mod watch;

use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use protocol::file::{FileOperation, FileRequest, FolderItem, MODE_BITS};
use protocol::frame::MAX_FROM_AGENT_BYTES;

use crate::error::FileError;
use crate::shared::Shared;
use exchange::Exchange;

pub use copy_in::CopiedIn;
pub use copy_out::{CopiedOut, CopyLimits};
pub use metadata::{Entry, FileType, Metadata};
pub use read::FileReader;
pub use watch::{ChangeKind, FileChange, FileWatch};

/// Longest path in bytes (`PATH_MAX` of `limits.h`, with its end).
const MAX_PATH_BYTES: usize = 4095;

/// Mode of a file that is written without one.
const DEFAULT_MODE: u32 = 0o644;

/// Most bytes that [`Files::read`] takes into memory; [`Files::open`] has no such bound.
pub const MAX_READ_BYTES: u64 = 256 << 20;

/// Most entries of a folder that [`Files::list`] takes into memory.
pub const MAX_LISTED_ENTRIES: usize = 100_000;

/// The guest's files, as one of its users sees them: made by [`crate::Sandbox::files`].
///
/// Relative paths start at the user's home. What is made belongs to the user, missing folders on the way included.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # sandvmm::init();
/// # let sandbox = sandvmm::Sandbox::builder().start()?;
/// let files = sandbox.files();
/// files.write("data/in.csv", &b"1,2\n"[..])?;
/// sandbox.command("sh").arg("-c").arg("wc -l < data/in.csv > data/out").output()?;
/// assert_eq!(files.read("data/out")?, b"1\n");
/// files.copy_out("data", "results", Default::default())?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Files<'a> {
    shared: &'a Shared,
    user: Option<String>,
    mode: u32,
    keep_owners: bool,
}

impl<'a> Files<'a> {
    pub(crate) fn new(shared: &'a Shared) -> Self {
        Self {
            shared,
            user: None,
            mode: DEFAULT_MODE,
            keep_owners: false,
        }
    }

    /// As this user of the guest: `USER[:GROUP]`, by name or number. Without it, the image's unprivileged user.
    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        self.user = Some(user.to_owned());
        self
    }

    /// The permission bits of files that are written, `0o644` without it.
    #[must_use]
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = mode;
        self
    }

    /// Has copies of trees keep owner and group, by number, as far as whoever makes them may give files away: root may, in the guest by
    /// [`Self::user`], on the host where this process is. Others' copies are their own all the same.
    ///
    /// Without it, what is copied in is the user's, and what is copied out is this process's. Out of a guest it takes trust: a guest chooses then
    /// which of the host's users owns what it sends.
    #[must_use]
    pub fn keep_owners(mut self, are_kept: bool) -> Self {
        self.keep_owners = are_kept;
        self
    }

    /// Writes a file, replacing one that is there atomically: it is seen whole or not at all. The content is streamed.
    /// Returns the absolute path.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn write(&self, path: impl AsRef<Path>, content: impl Read) -> Result<PathBuf, FileError> {
        if self.mode & !MODE_BITS != 0 {
            return Err(FileError::Invalid(format!(
                "{:#o} is no mode of a file: {MODE_BITS:#o} at most",
                self.mode
            )));
        }
        let operation = FileOperation::Write { mode: self.mode };
        let mut exchange = self.ask(path.as_ref(), operation)?;
        let sent = exchange.send_content(content)?;
        exchange.done_after(sent).and_then(exchange::path)
    }

    /// Reads a whole file into memory.
    ///
    /// # Errors
    /// See [`FileError`]; [`FileError::TooLarge`] above [`MAX_READ_BYTES`].
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>, FileError> {
        let mut content = Vec::new();
        let mut reader = self.open(path)?.take(MAX_READ_BYTES + 1);
        reader
            .read_to_end(&mut content)
            .map_err(FileError::Stream)?;
        if content.len() as u64 > MAX_READ_BYTES {
            return Err(FileError::TooLarge {
                what: "The file",
                bound: format!("{} MiB", MAX_READ_BYTES >> 20),
            });
        }
        Ok(content)
    }

    /// Opens a regular file for reading: its content is streamed, with back-pressure. A reader that gets to the end without an
    /// error has read all of it.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<FileReader, FileError> {
        let mut exchange = self.ask(path.as_ref(), FileOperation::Read)?;
        let metadata = exchange::metadata(&exchange.done()?)?;
        Ok(FileReader::new(exchange.into_stream(), metadata))
    }

    /// What a file is; a symbolic link is not followed.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Metadata, FileError> {
        let done = self.ask(path.as_ref(), FileOperation::Metadata)?.done()?;
        exchange::metadata(&done)
    }

    /// What is in a folder, by name.
    ///
    /// # Errors
    /// See [`FileError`]; [`FileError::TooLarge`] above [`MAX_LISTED_ENTRIES`].
    pub fn list(&self, path: impl AsRef<Path>) -> Result<Vec<Entry>, FileError> {
        let mut exchange = self.ask(path.as_ref(), FileOperation::List)?;
        exchange.done()?;
        let mut entries = Vec::new();
        loop {
            match exchange.receive(MAX_FROM_AGENT_BYTES)? {
                FolderItem::Entry { name, metadata } => {
                    entries.push(Entry::checked(&name, metadata)?);
                }
                FolderItem::Failed(failure) => return Err(failure.into()),
                FolderItem::End => break,
            }
            if entries.len() > MAX_LISTED_ENTRIES {
                return Err(FileError::TooLarge {
                    what: "The folder",
                    bound: format!("{MAX_LISTED_ENTRIES} entries"),
                });
            }
        }
        entries.sort_by(|one, two| one.name.cmp(&two.name));
        Ok(entries)
    }

    /// Makes a folder and those on the way; one that is there is left as it is. Returns the absolute path.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> Result<PathBuf, FileError> {
        self.ask(path.as_ref(), FileOperation::MakeFolder)?
            .done()
            .and_then(exchange::path)
    }

    /// Gives a file or folder another place, atomically, in place of a file that is there. Returns the absolute path.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn rename(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
    ) -> Result<PathBuf, FileError> {
        let to = checked_path(to.as_ref())?;
        self.ask(from.as_ref(), FileOperation::Rename { to })?
            .done()
            .and_then(exchange::path)
    }

    /// Removes a file, or a folder with all that is in it. Links are not followed.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn remove(&self, path: impl AsRef<Path>) -> Result<(), FileError> {
        self.ask(path.as_ref(), FileOperation::Remove)?
            .done()
            .map(drop)
    }

    /// Watches a file, or a folder and what is in it, but not in the folders in it: whatever happens from now on is told.
    ///
    /// As long as there is one, it takes one of the 32 places that operations on files have in a sandbox.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # sandvmm::init();
    /// # let sandbox = sandvmm::Sandbox::builder().start()?;
    /// let files = sandbox.files();
    /// let watch = files.watch(".")?;
    /// let child = sandbox.command("sh").args(["-c", "sleep 1; echo 42 > answer"]).spawn()?;
    /// for change in watch {
    ///     let change = change?;
    ///     if change.kind == sandvmm::ChangeKind::Written && change.name == "answer" {
    ///         assert_eq!(sandbox.read("answer")?, b"42\n");
    ///         break;
    ///     }
    /// }
    /// # drop(child);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn watch(&self, path: impl AsRef<Path>) -> Result<FileWatch<'a>, FileError> {
        let mut exchange = self.ask(path.as_ref(), FileOperation::Watch)?;
        exchange.done()?;
        Ok(FileWatch::new(exchange))
    }

    /// Copies a file, or a folder with all that is in it, from the host to `to` in the guest, which is the copy's own path, with modes
    /// and times of modification, and with owners if [`Self::keep_owners`] says so. Symbolic links are copied as such; devices, pipes and sockets
    /// are left out, and said.
    ///
    /// # Errors
    /// See [`FileError`]. What was copied before is left.
    pub fn copy_in(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
    ) -> Result<CopiedIn, FileError> {
        let source = copy_in::Source::open(from.as_ref())?;
        let keep_owners = self.keep_owners;
        let mut exchange = self.ask(to.as_ref(), FileOperation::WriteTree { keep_owners })?;
        let (copied, sent) = source.send(&mut exchange)?;
        exchange.done_after(sent)?;
        Ok(copied)
    }

    /// Copies a file, or a folder with all that is in it, from the guest to `to` on the host, which is the copy's own path, with modes
    /// and times of modification, and with owners if [`Self::keep_owners`] says so.
    ///
    /// The guest is not trusted: nothing is made outside `to`, no link is followed or made, neither are devices, pipes
    /// and sockets; what is left out is said. Set-user and set-group bits are dropped. A file that is there is replaced, a
    /// folder that is there is filled.
    ///
    /// # Errors
    /// See [`FileError`]. Files that were copied whole before are left, half a file is not.
    pub fn copy_out(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        limits: CopyLimits,
    ) -> Result<CopiedOut, FileError> {
        let from = from.as_ref();
        let mut exchange = self.ask(from, FileOperation::ReadTree)?;
        exchange.done()?;
        copy_out::receive(&mut exchange, from, to.as_ref(), limits, self.keep_owners)
    }

    fn ask(&self, path: &Path, operation: FileOperation) -> Result<Exchange<'a>, FileError> {
        let request = FileRequest {
            path: checked_path(path)?,
            user: self.user.clone(),
            operation,
        };
        Exchange::open(self.shared, request)
    }
}

/// A path that a request can carry.
fn checked_path(path: &Path) -> Result<Vec<u8>, FileError> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > MAX_PATH_BYTES || bytes.contains(&0) {
        return Err(FileError::Invalid(format!(
            "A path in the guest has 1 to {MAX_PATH_BYTES} bytes and none of them is 0"
        )));
    }
    Ok(bytes.to_vec())
}

/// What a guest says that no agent would: it was taken over.
fn hostile(what: &str) -> FileError {
    FileError::Guest(format!("The guest answered {what}, which no agent does"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_are_none_are_refused() {
        let long = "x".repeat(MAX_PATH_BYTES + 1);
        for path in ["", "a\0b", &long] {
            assert!(matches!(
                checked_path(Path::new(path)),
                Err(FileError::Invalid(_))
            ));
        }
        assert_eq!(checked_path(Path::new("a")).unwrap(), b"a");
    }

    #[test]
    fn a_done_of_another_kind_is_no_answer() {
        let done = protocol::file::FileDone::At(b"/x".to_vec());
        assert!(matches!(
            exchange::metadata(&done),
            Err(FileError::Guest(_))
        ));
    }
}
