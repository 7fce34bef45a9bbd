//! Which images a sandbox is made from.

use std::path::PathBuf;

use super::SandboxBuilder;
use crate::error::StartError;
use crate::images::Images;

impl SandboxBuilder {
    /// The named files, and those of the data folder for the rest.
    pub(crate) fn images(&self) -> Result<Images, StartError> {
        if let Some(saved) = &self.saved {
            return Ok(saved.origin().images.clone());
        }
        if let Some(template) = &self.template {
            let inputs = &template.manifest().inputs;
            return Ok(Images {
                kernel: inputs.kernel.path.clone(),
                initrd: inputs.initramfs.path.clone(),
                rootfs: inputs.rootfs.path.clone(),
            });
        }
        if let (Some(kernel), Some(initrd), Some(rootfs)) =
            (&self.kernel, &self.initrd, &self.rootfs)
        {
            return Ok(Images {
                kernel: kernel.clone(),
                initrd: initrd.clone(),
                rootfs: rootfs.clone(),
            });
        }
        let defaults = Images::in_data_folder()?;
        let chosen = |named: &Option<PathBuf>, default: PathBuf| match named {
            Some(path) => Ok(path.clone()),
            None => Images::present(default),
        };
        Ok(Images {
            kernel: chosen(&self.kernel, defaults.kernel)?,
            initrd: chosen(&self.initrd, defaults.initrd)?,
            rootfs: chosen(&self.rootfs, defaults.rootfs)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Sandbox;

    #[test]
    fn a_named_file_is_taken_before_that_of_the_data_folder() {
        let builder = Sandbox::builder().kernel("/k").initrd("/i").rootfs("/r");
        let images = builder.images().unwrap();
        assert_eq!(images.kernel, PathBuf::from("/k"));
        assert_eq!(images.rootfs, PathBuf::from("/r"));
    }
}
