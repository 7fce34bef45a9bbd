//! What a sandbox is made from.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::error::StartError;
use crate::sandbox::Sandbox;

/// What a sandbox is made from; all of it has defaults.
#[derive(Debug)]
pub struct SandboxBuilder {
    pub(crate) kernel: Option<PathBuf>,
    pub(crate) initrd: Option<PathBuf>,
    pub(crate) rootfs: Option<PathBuf>,
    pub(crate) cpus: u8,
    pub(crate) memory_mib: u32,
    pub(crate) timeout: Option<Duration>,
    pub(crate) hostname: String,
    pub(crate) program: Option<PathBuf>,
    pub(crate) console: Option<File>,
    pub(crate) called_at: Option<Instant>,
}

impl SandboxBuilder {
    pub(crate) fn new() -> Self {
        Self {
            kernel: None,
            initrd: None,
            rootfs: None,
            cpus: 1,
            memory_mib: 256,
            timeout: None,
            hostname: "sandvmm".to_owned(),
            program: None,
            console: None,
            called_at: None,
        }
    }

    /// The guest kernel, a vmlinux or bzImage. Default: that of the data folder, see [`crate::Images`].
    #[must_use]
    pub fn kernel(mut self, path: impl Into<PathBuf>) -> Self {
        self.kernel = Some(path.into());
        self
    }

    /// The initramfs with the agent. Default: that of the data folder.
    #[must_use]
    pub fn initrd(mut self, path: impl Into<PathBuf>) -> Self {
        self.initrd = Some(path.into());
        self
    }

    /// The root file system: a raw image (erofs, squashfs or ext4; the guest finds out which) in a regular
    /// file or a block device, its size a multiple of 512. The guest cannot write to it. Default: that of
    /// the data folder.
    #[must_use]
    pub fn rootfs(mut self, path: impl Into<PathBuf>) -> Self {
        self.rootfs = Some(path.into());
        self
    }

    /// Virtual processors, 1 to 32. Default: 1.
    #[must_use]
    pub fn cpus(mut self, count: u8) -> Self {
        self.cpus = count;
        self
    }

    /// Guest memory in MiB. Default: 256.
    #[must_use]
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// The time of the whole sandbox, counted from [`Self::start`]; whatever runs at its end is killed.
    /// Default: `None`, no end.
    #[must_use]
    pub fn timeout(mut self, timeout: Option<Duration>) -> Self {
        self.timeout = timeout;
        self
    }

    /// The guest's host name: 1 to 64 letters, digits and hyphens. Default: `sandvmm`.
    #[must_use]
    pub fn hostname(mut self, name: impl Into<String>) -> Self {
        self.hostname = name.into();
        self
    }

    /// The program to start the machine's process with; it must call [`crate::init`] first. Default:
    /// `$SANDVMM_BIN`; else this very program if it called [`crate::init`]; else `sandvmm` beside it; else
    /// `sandvmm` of `PATH`.
    #[must_use]
    pub fn program(mut self, path: impl Into<PathBuf>) -> Self {
        self.program = Some(path.into());
        self
    }

    /// Gets everything that the guest's kernel says, for debugging; what does not fit is dropped.
    #[must_use]
    pub fn console(mut self, sink: File) -> Self {
        self.console = Some(sink);
        self
    }

    /// When the user's wait began; what [`crate::Clocks`] count from. Default: the call of [`Self::start`].
    #[must_use]
    pub fn called_at(mut self, instant: Instant) -> Self {
        self.called_at = Some(instant);
        self
    }

    /// Starts the machine and waits until its guest is ready for commands.
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left behind.
    pub fn start(self) -> Result<Sandbox, StartError> {
        todo!()
    }
}
