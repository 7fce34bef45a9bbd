//! That the same inputs give the same bytes.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::cache::{Cache, CacheError};

/// Two builds gave different bytes.
#[derive(Debug, thiserror::Error)]
#[error(
    "Two builds of {file} differ: {first} and {second} (SHA-256). Did a package's version change in between?"
)]
pub(crate) struct Differs {
    file: &'static str,
    first: String,
    second: String,
}

/// Builds once more, in a folder of its own that is removed afterwards, and compares `files` with those of the entry `kept`.
pub(crate) fn verify<E: From<CacheError> + From<Differs>>(
    kept: &Path,
    files: &[&'static str],
    cache: &Cache,
    build: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let folder = cache
        .folder()
        .join(format!(".again-{}", std::process::id()));
    fs::create_dir(&folder).map_err(CacheError::io("create the folder", &folder))?;
    let compared = build(&folder).and_then(|()| compare(kept, &folder, files));
    fs::remove_dir_all(&folder).map_err(CacheError::io("remove", &folder))?;
    compared
}

fn compare<E: From<CacheError> + From<Differs>>(
    kept: &Path,
    again: &Path,
    files: &[&'static str],
) -> Result<(), E> {
    for file in files {
        let (first, second) = (sha256(&kept.join(file))?, sha256(&again.join(file))?);
        if first != second {
            return Err(Differs {
                file,
                first,
                second,
            }
            .into());
        }
    }
    Ok(())
}

/// The SHA-256 of a file, in hexadecimal.
pub(crate) fn sha256(path: &Path) -> Result<String, CacheError> {
    let mut hash = Sha256::new();
    let mut file = File::open(path).map_err(CacheError::io("open", path))?;
    io::copy(&mut file, &mut hash).map_err(CacheError::io("read", path))?;
    Ok(format!("{:x}", hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error(transparent)]
    enum BuildError {
        Cache(#[from] CacheError),
        Differs(#[from] Differs),
    }

    #[test]
    fn a_second_build_that_differs_is_told_by_its_file_and_nothing_of_it_stays() {
        let folder = tempfile::tempdir().unwrap();
        let kept = folder.path().join("kept");
        fs::create_dir(&kept).unwrap();
        let cache = Cache::at(folder.path());
        let write = |to: &Path, second: &str| -> Result<(), BuildError> {
            fs::write(to.join("one"), "same").unwrap();
            fs::write(to.join("two"), second).unwrap();
            Ok(())
        };
        write(&kept, "a").unwrap();
        let verify = |second| verify(&kept, &["one", "two"], &cache, |again| write(again, second));

        verify("a").unwrap();
        let differs = verify("b").unwrap_err().to_string();

        assert!(
            differs.starts_with("Two builds of two differ: "),
            "{differs}"
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
