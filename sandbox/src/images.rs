//! The kernel, initramfs and root image of the data folder.

use std::env;
use std::path::PathBuf;

/// The files that a sandbox boots from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Images {
    /// The guest kernel, a vmlinux.
    pub kernel: PathBuf,
    /// The initramfs with the agent.
    pub initrd: PathBuf,
    /// The root file system's image.
    pub rootfs: PathBuf,
}

/// Why there are no images.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImagesError {
    /// A file of the data folder is missing.
    #[error("{} is missing: `cargo xtask setup` builds it, or name another file", path.display())]
    Missing {
        /// Which one.
        path: PathBuf,
    },
    /// Nothing says where the data folder is.
    #[error(
        "There is no data folder: set SANDVMM_HOME to the folder of the images, or HOME to one of yours"
    )]
    NoFolder,
}

impl Images {
    /// The images of the data folder: `$SANDVMM_HOME`, else `$XDG_DATA_HOME/sandvmm`, else
    /// `~/.local/share/sandvmm`; the files are `vmlinux`, `initramfs.cpio` and `rootfs.erofs`.
    ///
    /// # Errors
    /// See [`ImagesError`].
    pub fn from_data_folder() -> Result<Self, ImagesError> {
        let images = Self::in_data_folder()?;
        Ok(Self {
            kernel: Self::present(images.kernel)?,
            initrd: Self::present(images.initrd)?,
            rootfs: Self::present(images.rootfs)?,
        })
    }

    /// The path, if something is there.
    pub(crate) fn present(path: PathBuf) -> Result<PathBuf, ImagesError> {
        if path.exists() {
            return Ok(path);
        }
        Err(ImagesError::Missing { path })
    }

    /// Where the images are or should be, whether they are there or not.
    pub(crate) fn in_data_folder() -> Result<Self, ImagesError> {
        let folder = data_folder()?;
        Ok(Self {
            kernel: folder.join("vmlinux"),
            initrd: folder.join("initramfs.cpio"),
            rootfs: folder.join("rootfs.erofs"),
        })
    }
}

/// The data folder.
pub(crate) fn data_folder() -> Result<PathBuf, ImagesError> {
    folder_by(|name| env::var_os(name).map(PathBuf::from))
}

/// The data folder, from the variables that name it. Empty ones count as unset, relative XDG ones too (XDG
/// Base Directory Specification 0.8, "All paths set in these environment variables must be absolute").
fn folder_by(variable: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf, ImagesError> {
    let set = |name: &str| variable(name).filter(|path| !path.as_os_str().is_empty());
    if let Some(folder) = set("SANDVMM_HOME") {
        return Ok(folder);
    }
    if let Some(folder) = set("XDG_DATA_HOME").filter(|path| path.is_absolute()) {
        return Ok(folder.join("sandvmm"));
    }
    set("HOME")
        .map(|home| home.join(".local/share/sandvmm"))
        .ok_or(ImagesError::NoFolder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(variables: &[(&str, &str)]) -> Result<PathBuf, ImagesError> {
        folder_by(|name| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| PathBuf::from(value))
        })
    }

    #[test]
    fn sandvmm_home_is_the_folder_itself_and_wins() {
        let found = folder(&[
            ("SANDVMM_HOME", "/a"),
            ("XDG_DATA_HOME", "/b"),
            ("HOME", "/c"),
        ]);
        assert_eq!(found.unwrap(), PathBuf::from("/a"));
    }

    #[test]
    fn the_xdg_folder_comes_before_the_home() {
        let found = folder(&[("XDG_DATA_HOME", "/b"), ("HOME", "/c")]);
        assert_eq!(found.unwrap(), PathBuf::from("/b/sandvmm"));
    }

    #[test]
    fn empty_and_relative_variables_count_as_unset() {
        let found = folder(&[("SANDVMM_HOME", ""), ("XDG_DATA_HOME", "b"), ("HOME", "/c")]);
        assert_eq!(found.unwrap(), PathBuf::from("/c/.local/share/sandvmm"));
    }

    #[test]
    fn without_any_variable_there_is_no_folder() {
        assert!(matches!(folder(&[]), Err(ImagesError::NoFolder)));
    }
}
