//! What a sandbox is made from.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::{Duration, Instant};

use vmm::control::{DiskConfig, MachineConfig, RestoreConfig, ToMachine};
use vmm::memory::{MAX_MEMORY_MIB, MIN_MEMORY_MIB};
use vmm::mptable::MAX_VCPUS;
use vmm::snapshot::format::MAX_STATE_BYTES;

use crate::cell::Part;
use crate::clock::{instant_ns, nanos, now_ns};
use crate::egress::{Attempt, Decision, EgressOptions, Limits, Record, Resolver, Secret};
use crate::error::StartError;
use crate::event::{Event, Events};
use crate::file::{self, Role};
use crate::host;
use crate::images::Images;
use crate::program;
use crate::sandbox::{Origin, Sandbox};
use crate::scratch;
use crate::shared::Shared;
use crate::spans::Spans;
use crate::supervisor::{self, Plan, random_bytes};
use crate::template::{ForkFiles, Saved, Template};
use crate::workspace::Workspace;

/// Stack of a sandbox's thread, in bytes: less than the huge page that the system's kernel may give for the first byte that is used.
const THREAD_STACK_BYTES: usize = 512 << 10;

/// Longest host name in bytes (Linux's `__NEW_UTS_LEN`).
const MAX_HOSTNAME_BYTES: usize = 64;

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

/// The guest's host name where none was chosen; a fork's gets a suffix.
pub(crate) const DEFAULT_HOSTNAME: &str = "sandvmm";

/// What a sandbox is made from; all of it has defaults.
#[derive(Debug)]
pub struct SandboxBuilder {
    kernel: Option<PathBuf>,
    initrd: Option<PathBuf>,
    rootfs: Option<PathBuf>,
    cpus: u8,
    memory_mib: u32,
    timeout: Option<Duration>,
    cpu_time: Option<Duration>,
    events: Option<SyncSender<Event>>,
    hostname: Option<String>,
    program: Option<PathBuf>,
    console: Option<File>,
    called_at: Option<Instant>,
    leave_out: jailer::Parts,
    require_cgroup: bool,
    workspace: Option<Workspace>,
    scratch_disk_mib: Option<u32>,
    template: Option<Template>,
    saved: Option<Arc<Saved>>,
    egress: EgressOptions,
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
            cpu_time: None,
            events: None,
            hostname: None,
            program: None,
            console: None,
            called_at: None,
            leave_out: jailer::Parts::default(),
            require_cgroup: false,
            workspace: None,
            scratch_disk_mib: None,
            template: None,
            saved: None,
            egress: EgressOptions::default(),
        }
    }

    /// For a fork of a template.
    pub(crate) fn of_template(template: Template) -> Self {
        let inputs = &template.manifest().inputs;
        Self {
            cpus: inputs.cpus,
            memory_mib: inputs.memory_mib,
            template: Some(template),
            ..Self::new()
        }
    }

    /// For a fork of a sandbox in use.
    pub(crate) fn of_saved(saved: Arc<Saved>) -> Self {
        let origin = saved.origin();
        Self {
            cpus: origin.cpus,
            memory_mib: origin.memory_mib,
            saved: Some(saved),
            ..Self::new()
        }
    }

    /// Processors, and memory in MiB.
    pub(crate) fn size(&self) -> (u8, u32) {
        (self.cpus, self.memory_mib)
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

    /// The disk on which everything stays that the guest writes. Default: none; it is kept in the guest's memory and gone with
    /// it.
    #[must_use]
    pub fn workspace(mut self, workspace: Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }

    /// Keeps what the guest writes on a disk of the host, of this size, which is gone with the sandbox: a sparse file of the data
    /// folder's file system. Default: none; it is kept in the guest's memory, up to half of that.
    #[must_use]
    pub fn scratch_disk_mib(mut self, size_mib: u32) -> Self {
        self.scratch_disk_mib = Some(size_mib);
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

    /// The most processor time of the machine's process: what the guest uses, and what serving it does, the boot included.
    /// Whatever runs when it is used up is killed, and ends as [`crate::Outcome::LimitExceeded`]. Counted by the host's kernel in hundredths of
    /// a second. Default: `None`, no bound.
    #[must_use]
    pub fn cpu_time(mut self, limit: Option<Duration>) -> Self {
        self.cpu_time = limit;
        self
    }

    /// Gets what happens in the sandbox, as it happens; the channel is closed behind [`crate::EventKind::Ended`]. Nobody waits for its
    /// reader: events that find no room in the channel are counted, and told of as [`crate::EventKind::Lost`].
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # sandvmm::init();
    /// let (sender, events) = std::sync::mpsc::sync_channel(1000);
    /// let sandbox = sandvmm::Sandbox::builder().events(sender).start()?;
    /// std::thread::spawn(move || events.iter().for_each(|event| println!("{}", event.to_json())));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn events(mut self, sender: SyncSender<Event>) -> Self {
        self.events = Some(sender);
        self
    }

    /// The guest's host name: 1 to 64 letters, digits and hyphens. Default: `sandvmm`, for a fork with a suffix of its own.
    #[must_use]
    pub fn hostname(mut self, name: impl Into<String>) -> Self {
        self.hostname = Some(name.into());
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

    /// Leaves a part out of the cell around the machine's process. The virtual machine still holds the guest; who breaks out of
    /// it meets one wall less: see [`Part::risk`]. For hosts that cannot have the part and say so by failing,
    /// and for finding faults.
    #[must_use]
    pub fn dangerously_leave_out(mut self, part: Part) -> Self {
        self.leave_out = self.leave_out.with(part);
        self
    }

    /// Refuses to start a machine that has no control group to bound its processor time and memory. Default: it starts,
    /// and [`Sandbox::cell`] says that there is none.
    #[must_use]
    pub fn require_cgroup(mut self, is_required: bool) -> Self {
        self.require_cgroup = is_required;
        self
    }

    /// Lets connections leave, to this and what else is named: `HOST[:PORT[,PORT]]`, where HOST is a name, `*.DOMAIN` for all
    /// names below a domain, an address, or a range of addresses; without ports 443 and 80. May be repeated. Default: nothing
    /// leaves, and the guest has no network at all. `docs/egress.md` has the checks that each connection goes through.
    #[must_use]
    pub fn allow_host(mut self, rule: impl Into<String>) -> Self {
        self.egress.rules.push(rule.into());
        self
    }

    /// What passes on this port, to hosts that are allowed on it, is neither TLS nor HTTP and is not looked into. May be repeated.
    #[must_use]
    pub fn raw_port(mut self, port: u16) -> Self {
        self.egress.raw_ports.push(port);
        self
    }

    /// Lets the guest use a secret that it never has: it finds a placeholder in the variable of the secret's name, and in header
    /// fields of requests to the secret's hosts, which are allowed thereby, this process puts the value in. TLS to these hosts is opened here, and
    /// the guest's programs trust a certificate of this sandbox's own; `docs/egress.md` says what that means. May be repeated.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # sandvmm::init();
    /// use sandvmm::egress::Secret;
    ///
    /// let value = std::env::var("OPENAI_API_KEY")?.into_bytes();
    /// let secret = Secret::new("OPENAI_API_KEY", &["api.openai.com"], value)?;
    /// let sandbox = sandvmm::Sandbox::builder().secret(secret).start()?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.egress.secrets.push(secret);
        self
    }

    /// Certificates in PEM that servers of secrets' hosts are known by, beside those that the host trusts: at most
    /// [`MAX_ROOTS_BYTES`](crate::egress::MAX_ROOTS_BYTES). Default: none.
    #[must_use]
    pub fn egress_roots(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.egress.roots_pem = pem.into();
        self
    }

    /// Decides on each connection in place of the rules, with its name, port and process, and the rule that would allow it. It is
    /// called on the connection's thread. The checks of contents and addresses remain. Ports are those of all rules and raw
    /// ports, and 443 and 80.
    #[must_use]
    pub fn decide_egress(
        mut self,
        decide: impl Fn(&Attempt, Option<&str>) -> Decision + Send + Sync + 'static,
    ) -> Self {
        self.egress.decide = Some(Arc::new(decide));
        self
    }

    /// Is told of each attempt when it is over, on a thread of its own.
    #[must_use]
    pub fn on_egress(mut self, sink: impl Fn(&Record) + Send + Sync + 'static) -> Self {
        self.egress.sink = Some(Arc::new(sink));
        self
    }

    /// Finds the addresses of names that may leave. Default: the host's own resolver.
    #[must_use]
    pub fn egress_resolver(mut self, resolver: impl Resolver + 'static) -> Self {
        self.egress.resolver = Some(Arc::new(resolver));
        self
    }

    /// What the connections may use together. Default: [`Limits::default`].
    #[must_use]
    pub fn egress_limits(mut self, limits: Limits) -> Self {
        self.egress.limits = limits;
        self
    }

    /// Whether ports of the guest can be reached, by [`Sandbox::connect`]. Default: no.
    #[must_use]
    pub fn ports_in(mut self, are_reached: bool) -> Self {
        self.egress.ports_in = are_reached;
        self
    }

    /// Starts the machine and waits until its guest is ready for commands.
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left behind.
    pub fn start(self) -> Result<Sandbox, StartError> {
        let sandbox = self.begin()?;
        sandbox.wait_ready()?;
        Ok(sandbox)
    }

    /// Begins to start the machine: [`Sandbox::wait_ready`] waits until its guest is ready for commands, and
    /// [`Sandbox::end`], from another thread, or dropping the sandbox ends it also while it starts.
    ///
    /// A command may be spawned at once: it is sent with the first words to the guest, which spares it a round trip. Where the machine
    /// does not start, the command says that the sandbox has ended, and [`Sandbox::wait_ready`] says why.
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left behind.
    pub fn begin(mut self) -> Result<Sandbox, StartError> {
        let now_ns = now_ns();
        let called_ns = self.called_at.map_or(now_ns, instant_ns);
        let is_fork = self.template.is_some() || self.saved.is_some();
        let spans = Spans::new(self.cpus, self.memory_mib, is_fork);
        let events = Events::new(self.events.take(), called_ns, spans);
        let hostname = self.hostname.as_deref().unwrap_or(DEFAULT_HOSTNAME);
        let egress = std::mem::take(&mut self.egress).open(hostname, &events)?;
        let (plan, origin) = self.plan(now_ns)?;
        let shared = Shared::new(called_ns, events).map_err(|source| StartError::System {
            action: "Making an event descriptor",
            source,
        })?;
        let shared = Arc::new(shared.with_egress(egress));
        let supervised = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("sandvmm".to_owned())
            .stack_size(THREAD_STACK_BYTES)
            .spawn(move || supervisor::run(&supervised, plan))
            .map_err(|source| StartError::System {
                action: "Starting a thread",
                source,
            })?;
        Ok(Sandbox::new(shared, origin, thread))
    }

    /// Checks all options and opens all files: the machine's process will open none.
    fn plan(self, now_ns: u64) -> Result<(Plan, Origin), StartError> {
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
            require_cgroup: self.require_cgroup,
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
            hostname: self.hostname,
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

    fn check_options(&self) -> Result<(), StartError> {
        let invalid = |sentence: String| Err(StartError::InvalidOption { sentence });
        if !(1..=MAX_VCPUS).contains(&self.cpus) {
            return invalid(format!(
                "{} processors are not possible: 1 to {MAX_VCPUS} are",
                self.cpus
            ));
        }
        if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&self.memory_mib) {
            return invalid(format!(
                "{} MiB of memory are not possible: {MIN_MEMORY_MIB} to {MAX_MEMORY_MIB} are",
                self.memory_mib
            ));
        }
        if let Some(template) = &self.template {
            let inputs = &template.manifest().inputs;
            if self.size() != (inputs.cpus, inputs.memory_mib)
                || self.kernel.is_some()
                || self.initrd.is_some()
                || self.rootfs.is_some()
                || self.workspace.is_some()
                || self.scratch_disk_mib.is_some()
            {
                return invalid(format!(
                    "A fork has what its template was built with: {} processors, {} MiB of memory, its images and no \
                     workspace",
                    inputs.cpus, inputs.memory_mib
                ));
            }
        }
        if self.workspace.is_some() && self.scratch_disk_mib.is_some() {
            return invalid(
                "What is written is kept in a workspace or on a scratch disk, not on both"
                    .to_owned(),
            );
        }
        if self.timeout.is_some_and(|timeout| timeout.is_zero()) {
            return invalid(
                "A time of 0 is over before it begins: give none for no end".to_owned(),
            );
        }
        if self.cpu_time.is_some_and(|limit| limit.is_zero()) {
            return invalid(
                "A processor time of 0 is used up before it begins: give none for no bound"
                    .to_owned(),
            );
        }
        let hostname = self.hostname.as_deref().unwrap_or(DEFAULT_HOSTNAME);
        let name = hostname.as_bytes();
        let is_name = (1..=MAX_HOSTNAME_BYTES).contains(&name.len())
            && name
                .iter()
                .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
            && name.first() != Some(&b'-')
            && name.last() != Some(&b'-');
        if !is_name {
            return invalid(format!(
                "{hostname:?} is no host name: 1 to {MAX_HOSTNAME_BYTES} letters, digits and hyphens, none of these at an \
                 end"
            ));
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(builder: SandboxBuilder) -> String {
        match builder.start().unwrap_err() {
            StartError::InvalidOption { sentence } => sentence,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn processors_outside_the_bounds_are_refused() {
        for cpus in [0, 33, 255] {
            let sentence = refused(Sandbox::builder().cpus(cpus));
            assert!(
                sentence.starts_with(&format!("{cpus} processors")),
                "{sentence}"
            );
        }
    }

    #[test]
    fn memory_outside_the_bounds_is_refused() {
        for memory_mib in [0, MIN_MEMORY_MIB - 1, MAX_MEMORY_MIB + 1, u32::MAX] {
            let sentence = refused(Sandbox::builder().memory_mib(memory_mib));
            assert!(sentence.contains("MiB of memory"), "{sentence}");
        }
    }

    #[test]
    fn names_that_no_host_can_have_are_refused() {
        for name in ["", "-a", "a-", "a b", "a\0", "ä", "a.b", &"a".repeat(65)] {
            let sentence = refused(Sandbox::builder().hostname(name));
            assert!(sentence.contains("is no host name"), "{sentence}");
        }
    }

    #[test]
    fn no_time_at_all_is_refused() {
        let sentence = refused(Sandbox::builder().timeout(Some(Duration::ZERO)));
        assert!(sentence.contains("over before it begins"), "{sentence}");
    }

    #[test]
    fn options_at_their_bounds_are_taken() {
        for (cpus, memory_mib, name) in [
            (1, MIN_MEMORY_MIB, "a".to_owned()),
            (MAX_VCPUS, MAX_MEMORY_MIB, "A1-".repeat(21) + "z"),
        ] {
            let builder = Sandbox::builder()
                .cpus(cpus)
                .memory_mib(memory_mib)
                .hostname(name);
            builder.check_options().unwrap();
        }
    }

    #[test]
    fn a_named_file_is_taken_before_that_of_the_data_folder() {
        let builder = Sandbox::builder().kernel("/k").initrd("/i").rootfs("/r");
        let images = builder.images().unwrap();
        assert_eq!(images.kernel, PathBuf::from("/k"));
        assert_eq!(images.rootfs, PathBuf::from("/r"));
    }
}
