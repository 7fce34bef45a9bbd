//! From what a builder was told to what a machine is started from: its first message, and all files that it will have, open.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use vmm::control::{DiskConfig, MachineConfig, RestoreConfig, ToMachine};
use vmm::snapshot::format::MAX_STATE_BYTES;

use super::SandboxBuilder;
use crate::clock::nanos;
use crate::error::StartError;
use crate::file::{self, Role};
use crate::host;
use crate::images::Images;
use crate::program;
use crate::randomness::random_bytes;
use crate::sandbox::Origin;
use crate::scratch;
use crate::supervisor::{GuestOptions, Plan};
use crate::template::ForkFiles;

/// What the guest's kernel prints: panics and errors alone, since each byte costs time; or all of it, when
/// somebody reads it.
const QUIET_WORDS: &str = "quiet";
const VERBOSE_WORDS: &str = "loglevel=8";

/// Largest file that the console may write to, where it is a file: what comes after that is dropped.
const MAX_CONSOLE_BYTES: u64 = 1 << 30;

/// The root image's name, as the guest reads it from the disk.
const ROOT_SERIAL: &str = "root";

/// The workspace's, likewise.
const WORKSPACE_SERIAL: &str = "workspace";

/// A scratch disk's: what is on it need not be made durable.
const SCRATCH_SERIAL: &str = "scratch";

impl SandboxBuilder {
    /// Checks all options and opens all files: the machine's process will open none.
    pub(super) fn plan(self, now_ns: u64) -> Result<(Plan, Origin), StartError> {
        self.check_options()?;
        let kvm = host::open_kvm().map_err(|sentence| StartError::NoKvm { sentence })?;
        let program = program::find(self.program.as_deref())?;
        let images = self.images()?;
        let has_workspace = self.workspace.is_some() || self.scratch_disk_mib.is_some();
        let has_console = self.console.is_some();
        let mut max_file_bytes = max_file_bytes(self.memory_mib, has_console);
        let files = match (&self.saved, &self.template) {
            (Some(saved), _) => Some(saved.fork_files()?),
            (None, Some(template)) => Some(template.fork_files()?),
            (None, None) => None,
        };
        let mut machine = match files {
            Some(files) => restored_machine(kvm, files, has_console),
            None => self.new_machine(kvm, &images)?,
        };
        let rootfs = machine
            .rootfs
            .try_clone()
            .map_err(|source| StartError::System {
                action: "Keeping the root image open",
                source,
            })?;
        let mut devices: Vec<_> = jailer::BlockDevice::below(machine.rootfs.as_fd())
            .into_iter()
            .collect();
        let mut descriptors = machine.before_console;
        descriptors.extend(self.console.map(OwnedFd::from));
        descriptors.push(machine.rootfs);
        let writable = match (self.workspace, self.scratch_disk_mib) {
            (Some(workspace), _) => Some((
                workspace.quota_bytes(),
                workspace.into_file(),
                WORKSPACE_SERIAL,
            )),
            (None, Some(mib)) => Some((u64::from(mib) << 20, scratch::disk(mib)?, SCRATCH_SERIAL)),
            (None, None) => None,
        };
        if let Some((size_bytes, file, serial)) = writable {
            max_file_bytes = max_file_bytes.max(size_bytes);
            let disk = OwnedFd::from(file);
            let device = jailer::BlockDevice::below(disk.as_fd());
            devices.extend(device.filter(|device| !devices.contains(device)));
            descriptors.push(disk);
            if let ToMachine::Start(config) = &mut machine.order {
                config.disks.push(DiskConfig {
                    read_only: false,
                    serial: serial.to_owned(),
                });
            }
        }
        let cell = jailer::Options {
            leave_out: self.leave_out,
            // Nothing else keeps a share.
            require_cgroup: self.require_cgroup || self.cpu_quota_percent.is_some(),
            cpu_quota_percent: self.cpu_quota_percent,
            devices,
            ..jailer::Options::new(jailer::Bounds {
                memory_mib: self.memory_mib,
                vcpus: self.cpus,
                max_file_bytes,
            })
        };
        let plan = Plan {
            program,
            cell,
            order: machine.order,
            descriptors,
            guest: GuestOptions {
                hostname: self.hostname,
                max_processes: self.max_processes,
            },
            deadline: self
                .timeout
                .map(|timeout| (now_ns.saturating_add(nanos(timeout)), timeout)),
            // The processors', and the thread that serves the devices.
            cpu_time: self.cpu_time.map(|limit| (limit, u32::from(self.cpus) + 1)),
        };
        let origin = match self.saved {
            Some(saved) => saved.origin().clone(),
            None => Origin {
                images,
                rootfs: Arc::new(rootfs.into()),
                cpus: self.cpus,
                memory_mib: self.memory_mib,
                has_workspace,
                template: self.template,
            },
        };
        Ok((plan, origin))
    }

    /// A machine that boots.
    fn new_machine(&self, kvm: OwnedFd, images: &Images) -> Result<Machine, StartError> {
        let has_console = self.console.is_some();
        let before_console = vec![
            kvm,
            file::open(Role::Kernel, &images.kernel)?,
            file::open(Role::Initramfs, &images.initrd)?,
        ];
        let rng_seed = random_bytes().map_err(|source| StartError::System {
            action: "Reading the system's randomness",
            source,
        })?;
        let config = MachineConfig {
            vcpu_count: self.cpus,
            memory_mib: self.memory_mib,
            cmdline: if has_console {
                VERBOSE_WORDS
            } else {
                QUIET_WORDS
            }
            .to_owned(),
            guest_cid: protocol::port::GUEST_CID,
            rng_seed,
            has_initramfs: true,
            has_console,
            disks: vec![root_disk()],
        };
        Ok(Machine {
            order: ToMachine::Start(config),
            before_console,
            rootfs: file::open(Role::Disk, &images.rootfs)?,
        })
    }
}

/// A machine's first message, and what goes with it.
struct Machine {
    order: ToMachine,
    /// The descriptors up to the console's.
    before_console: Vec<OwnedFd>,
    rootfs: OwnedFd,
}

/// A machine that goes on from where it was saved.
fn restored_machine(kvm: OwnedFd, files: ForkFiles, has_console: bool) -> Machine {
    Machine {
        order: ToMachine::Restore(RestoreConfig {
            has_console,
            disks: vec![root_disk()],
            // It was, when the template was opened; or it was saved here.
            check_host: false,
            has_working_set: files.working_set.is_some(),
        }),
        before_console: [kvm, files.state, files.memory]
            .into_iter()
            .chain(files.working_set)
            .collect(),
        rootfs: files.rootfs,
    }
}

/// The first disk of every machine.
fn root_disk() -> DiskConfig {
    DiskConfig {
        read_only: true,
        serial: ROOT_SERIAL.to_owned(),
    }
}

/// Largest file that the machine's process may write: its own snapshot, or a console that is a file. The root image is read-only.
fn max_file_bytes(memory_mib: u32, has_console: bool) -> u64 {
    let snapshot = (u64::from(memory_mib) << 20).max(MAX_STATE_BYTES);
    if has_console {
        snapshot.max(MAX_CONSOLE_BYTES)
    } else {
        snapshot
    }
}
