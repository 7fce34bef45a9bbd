//! What programs in the guest need to call: a command for shells, a module for Python, and the links by which both are found.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::Place;
use super::client::NAME;
use crate::spawn::OWN_PROGRAM;

/// The module.
const MODULE: &str = include_str!("sandvmm.py");

/// The folder that holds the module, below that of the bridge; for `PYTHONPATH`.
const PYTHON_FOLDER: &str = "python";

/// The module's name.
const MODULE_FILE: &str = "sandvmm.py";

/// Where the command is looked for, in the image.
const COMMANDS: &str = "usr/local/bin";

/// Where Pythons keep what is installed, in the image: `python3*/{dist,site}-packages` below these.
const LIBRARIES: [&str; 2] = ["usr/local/lib", "usr/lib"];
const PACKAGES: [&str; 2] = ["dist-packages", "site-packages"];

/// Puts everything in its place. An image that takes no link keeps its programs from finding what is in the folder by
/// themselves, and nothing else.
pub(super) fn install(place: &Place) -> io::Result<()> {
    folder(&place.folder)?;
    let command = place.folder.join(NAME);
    // The agent's own file is out of reach for programs: it is below the root that was left.
    replace(&command, 0o755, &fs::read(OWN_PROGRAM)?)?;
    let python = place.folder.join(PYTHON_FOLDER);
    folder(&python)?;
    replace(&python.join(MODULE_FILE), 0o644, MODULE.as_bytes())?;
    let commands = place.image.join(COMMANDS);
    let _ = fs::create_dir_all(&commands);
    let _ = symlink(command, commands.join(NAME));
    link_python(place);
    Ok(())
}

/// Links the module into all Pythons of the image. The link may lead nowhere yet.
pub(super) fn link_python(place: &Place) {
    let module = place.folder.join(PYTHON_FOLDER).join(MODULE_FILE);
    for packages in packages(&place.image) {
        // It is there since an earlier time, or the folder takes none.
        let _ = symlink(&module, packages.join(MODULE_FILE));
    }
}

fn packages(image: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for library in LIBRARIES {
        let Ok(entries) = fs::read_dir(image.join(library)) else {
            continue;
        };
        for entry in entries.flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(b"python3") {
                let folders = PACKAGES.map(|packages| entry.path().join(packages));
                found.extend(folders.into_iter().filter(|folder| folder.is_dir()));
            }
        }
    }
    found
}

/// Makes a folder that everybody may enter, unless it is there.
fn folder(path: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => fs::set_permissions(path, Permissions::from_mode(0o755)),
    }
}

/// A former one may be a program that runs: it is replaced, not written to.
fn replace(path: &Path, mode: u32, content: &[u8]) -> io::Result<()> {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    fs::write(path, content)?;
    fs::set_permissions(path, Permissions::from_mode(mode))
}
