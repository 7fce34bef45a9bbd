//! A first fork of a template, made to find out which pages of its memory forks write to until their program says something.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use vmm::snapshot::working_set::{MAX_PAGES, MAX_RUNS, PAGE_BYTES, Run};

use super::error::{TemplateError, file};
use super::save::{create, write_standing};
use super::store::make_private;
use super::using::Saved;
use crate::builder::SandboxBuilder;
use crate::sandbox::{Origin, Sandbox};

/// Where the first fork's files are, in the template's unfinished folder.
const FOLDER: &str = "rehearsal";

/// Bytes that are compared at a time: whole pages.
const CHUNK_BYTES: u64 = 1 << 20;

/// What a first fork runs: it says something, and waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rehearsal {
    /// For a template with a warm interpreter.
    Python,
    /// For any other.
    Shell,
}

impl Rehearsal {
    fn words(self) -> [&'static str; 3] {
        match self {
            Self::Python => [
                "python3",
                "-c",
                "import time; print(1, flush=True); time.sleep(1000)",
            ],
            Self::Shell => ["sh", "-c", "echo 1; sleep 1000"],
        }
    }

    /// The pages that a fork has written to when its program has said something, also those that it has left as they were.
    ///
    /// A fork's own pages are those that don't change with the file which it maps. So it is given a file of its own, and once its
    /// processors stand each byte of that is inverted.
    pub(super) fn working_set(
        self,
        origin: &Origin,
        (state, memory): (&File, &File),
        folder: &Path,
    ) -> Result<Vec<Run>, TemplateError> {
        let folder = folder.join(FOLDER);
        let (standing, inverted) = (folder.join("standing"), folder.join("inverted"));
        for folder in [&folder, &standing, &inverted] {
            make_private(folder).map_err(file("Making", folder))?;
        }
        let path = folder.join("mapped");
        let mapped = create(&path)?;
        copy(memory, &mapped, |byte| byte).map_err(file("Writing", &path))?;
        let again = |opened: &File| {
            opened
                .try_clone()
                .map_err(|error| failed(&error.to_string()))
        };
        let saved = Saved {
            origin: origin.clone(),
            state: again(state)?,
            memory: again(&mapped)?,
        };
        let fork = SandboxBuilder::of_saved(Arc::new(saved))
            .begin()
            .map_err(TemplateError::Start)?;
        self.run(&fork)?;
        fork.shared().freeze(true)?;
        write_standing(&fork, &standing)?;
        copy(memory, &mapped, |byte| !byte).map_err(file("Writing", &path))?;
        let after = write_standing(&fork, &inverted)?;
        fork.end();
        let runs = differing(&mapped, &after).map_err(file("Comparing", &path))?;
        fs::remove_dir_all(&folder).map_err(file("Removing", &folder))?;
        Ok(runs)
    }

    fn run(self, fork: &Sandbox) -> Result<(), TemplateError> {
        let [program, option, code] = self.words();
        let mut child = fork
            .command(program)
            .args([option, code])
            .spawn()
            .map_err(|error| match fork.wait_ready() {
                Err(start) => TemplateError::Start(start),
                Ok(()) => failed(&error.to_string()),
            })?;
        let said = child.stdout.take().map(|mut said| said.read(&mut [0]));
        match said {
            Some(Ok(1)) => Ok(()),
            Some(Err(error)) => Err(failed(&error.to_string())),
            _ => Err(failed(&format!("{:?}", child.wait().outcome))),
        }
    }
}

fn failed(why: &str) -> TemplateError {
    TemplateError::Rehearsal {
        why: why.to_owned(),
    }
}

/// Writes what is in `from` to its place in `to`, each byte as it is changed by this.
fn copy(from: &File, to: &File, change: fn(u8) -> u8) -> std::io::Result<()> {
    to.set_len(from.metadata()?.len())?;
    let mut chunk = vec![0; usize::try_from(CHUNK_BYTES).unwrap_or_default()];
    let mut offset = 0;
    while let Some((start, end)) = data(from, offset)? {
        let bytes = CHUNK_BYTES.min(end - start);
        let part = chunk
            .get_mut(..usize::try_from(bytes).unwrap_or_default())
            .unwrap_or_default();
        from.read_exact_at(part, start)?;
        part.iter_mut().for_each(|byte| *byte = change(*byte));
        to.write_all_at(part, start)?;
        offset = start + bytes;
    }
    Ok(())
}

/// The pages of `after` that are not all zeros and differ from `before`'s.
fn differing(before: &File, after: &File) -> std::io::Result<Vec<Run>> {
    let mut runs: Vec<Run> = Vec::new();
    let mut pages = 0;
    let mut old = vec![0; usize::try_from(CHUNK_BYTES).unwrap_or_default()];
    let mut new = old.clone();
    let page_len = usize::try_from(PAGE_BYTES).unwrap_or_default();
    let mut offset = 0;
    while let Some((start, end)) = data(after, offset)? {
        let bytes = CHUNK_BYTES.min(end - start);
        let length = usize::try_from(bytes).unwrap_or_default();
        let (old, new) = (
            old.get_mut(..length).unwrap_or_default(),
            new.get_mut(..length).unwrap_or_default(),
        );
        before.read_exact_at(old, start)?;
        after.read_exact_at(new, start)?;
        let numbers = (start / PAGE_BYTES)..;
        for ((old, new), number) in old.chunks(page_len).zip(new.chunks(page_len)).zip(numbers) {
            if old == new {
                continue;
            }
            pages += 1;
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            match runs.last_mut() {
                Some(run) if run.first + run.count == number => run.count += 1,
                _ => runs.push(Run {
                    first: number,
                    count: 1,
                }),
            }
            if pages == MAX_PAGES || runs.len() == MAX_RUNS {
                return Ok(runs);
            }
        }
        offset = start + bytes;
    }
    Ok(runs)
}

/// The next range from `offset` on that is no hole.
fn data(opened: &File, offset: u64) -> std::io::Result<Option<(u64, u64)>> {
    let start = match seek(opened, SeekFrom::Data(offset)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let end = seek(opened, SeekFrom::Hole(start))?;
    // A file system's blocks may be smaller than pages: memory's are whole.
    Ok(Some((
        start / PAGE_BYTES * PAGE_BYTES,
        end.next_multiple_of(PAGE_BYTES),
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_inverted_where_there_is_something() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        from.set_len(64 << 20).unwrap();
        from.write_all_at(&[7; 4096], 5 * PAGE_BYTES).unwrap();

        copy(&from, &to, |byte| byte).unwrap();
        assert_eq!(differing(&from, &to).unwrap(), []);
        copy(&from, &to, |byte| !byte).unwrap();

        assert_eq!(to.metadata().unwrap().len(), 64 << 20);
        let page = Run { first: 5, count: 1 };
        assert_eq!(differing(&from, &to).unwrap(), [page]);
        let mut bytes = [0; 4096];
        to.read_exact_at(&mut bytes, 5 * PAGE_BYTES).unwrap();
        assert_eq!(bytes, [!7; 4096]);
    }

    #[test]
    fn pages_that_were_written_are_found_in_runs_and_holes_are_none() {
        let file_of = |writes: &[(u64, u8)]| {
            let opened = tempfile::tempfile().unwrap();
            opened.set_len(64 << 20).unwrap();
            for (page, byte) in writes {
                let content = [*byte; 4096];
                opened.write_all_at(&content, page * PAGE_BYTES).unwrap();
            }
            opened
        };
        let before = file_of(&[(0, 1), (5, 1), (300, 1), (9000, 1)]);
        let after = file_of(&[(0, 1), (5, 2), (6, 1), (300, 1), (9000, 2), (16383, 1)]);

        let runs = differing(&before, &after).unwrap();

        let run = |first, count| Run { first, count };
        assert_eq!(runs, [run(5, 2), run(9000, 1), run(16383, 1)]);
    }
}
