//! Which program a machine's process is started from.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::StartError;
use crate::init;

/// The command's name, beside the application and in `PATH`.
const NAME: &str = "sandvmm";

/// The program, as an absolute path: see [`crate::SandboxBuilder::program`].
///
/// # Errors
/// [`StartError::Process`] when there is none.
pub(crate) fn find(chosen: Option<&Path>) -> Result<PathBuf, StartError> {
    let named = chosen
        .map(Path::to_owned)
        .or_else(|| env::var_os("SANDVMM_BIN").map(PathBuf::from))
        .filter(|path| !path.as_os_str().is_empty());
    if let Some(path) = named {
        return std::path::absolute(&path).map_err(|source| StartError::Process {
            program: path,
            source,
        });
    }
    if init::was_called() {
        // Not the path: this very program, also after its file was replaced by a newer one.
        return Ok(PathBuf::from("/proc/self/exe"));
    }
    beside_or_in_path(
        env::current_exe().ok().as_deref(),
        env::var_os("PATH").as_deref(),
    )
    .ok_or_else(|| StartError::Process {
        program: PathBuf::from(NAME),
        source: io::Error::new(
            io::ErrorKind::NotFound,
            "it is not beside this program and not in PATH: call sandvmm::init() first in main, or set SANDVMM_BIN",
        ),
    })
}

fn beside_or_in_path(executable: Option<&Path>, path: Option<&OsStr>) -> Option<PathBuf> {
    let beside = executable.and_then(Path::parent).map(Path::to_owned);
    let in_path = path.into_iter().flat_map(env::split_paths);
    beside
        .into_iter()
        .chain(in_path)
        // An empty or relative entry of PATH means the working folder: no program is taken from there.
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(NAME))
        .find(|program| program.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with_program() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(NAME);
        std::fs::write(&program, b"").unwrap();
        (folder, program)
    }

    #[test]
    fn the_one_beside_the_application_comes_before_that_of_path() {
        let (folder, beside) = folder_with_program();
        let (other, in_path) = folder_with_program();
        let application = folder.path().join("application");

        let found = |executable| beside_or_in_path(executable, Some(other.path().as_os_str()));

        assert_eq!(found(Some(application.as_path())), Some(beside));
        assert_eq!(
            found(Some(Path::new("/nonexistent/x"))),
            Some(in_path.clone())
        );
        assert_eq!(found(None), Some(in_path));
    }

    #[test]
    fn nothing_is_taken_from_the_working_folder() {
        assert_eq!(beside_or_in_path(None, Some(OsStr::new(":.:"))), None);
    }

    #[test]
    fn a_chosen_program_is_made_absolute() {
        let found = find(Some(Path::new("bin/sandvmm"))).unwrap();
        assert!(found.is_absolute() && found.ends_with("bin/sandvmm"));
    }
}
