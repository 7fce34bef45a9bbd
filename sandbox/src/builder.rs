//! What a sandbox is made from.

mod check;
mod images;
mod plan;

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::{Duration, Instant};

use crate::cell::Part;
use crate::clock::{instant_ns, now_ns};
use crate::egress::{Attempt, Decision, EgressOptions, Limits, Record, Resolver, Secret};
use crate::error::StartError;
use crate::event::{Event, Events};
use crate::sandbox::Sandbox;
use crate::shared::Shared;
use crate::spans::Spans;
use crate::supervisor;
use crate::template::{Saved, Template};
use crate::workspace::Workspace;

/// Stack of a sandbox's thread, in bytes: less than the huge page that the system's kernel may give for the first byte that is used.
const THREAD_STACK_BYTES: usize = 512 << 10;

/// The guest's host name where none was chosen; a fork's gets a suffix.
pub(crate) const DEFAULT_HOSTNAME: &str = "sandvmm";

/// What a sandbox is made from; all of it has defaults. What is impossible, alone or together, is refused when it starts.
///
/// ```no_run
/// use std::time::Duration;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # sandvmm::init();
/// let sandbox = sandvmm::Sandbox::builder()
///     .cpus(2)
///     .memory_mib(512)
///     .scratch_disk_mib(4096)
///     .timeout(Some(Duration::from_secs(60)))
///     .cpu_time(Some(Duration::from_secs(20)))
///     .cpu_quota_percent(Some(150))
///     .max_processes(Some(200))
///     .start()?;
/// let completion = sandbox.command("make").status()?;
/// println!("{:?} met {:?}", completion.outcome, completion.limits_hit);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct SandboxBuilder {
    kernel: Option<PathBuf>,
    initrd: Option<PathBuf>,
    rootfs: Option<PathBuf>,
    cpus: u8,
    memory_mib: u32,
    timeout: Option<Duration>,
    cpu_time: Option<Duration>,
    cpu_quota_percent: Option<u32>,
    max_processes: Option<u32>,
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
            cpu_quota_percent: None,
            max_processes: None,
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

    /// The machine's share of the host's processors, in hundredths of one: with 50 it has half a processor, and waits when it has used that up
    /// in a period of 100 ms ([`crate::Limit::CpuQuota`], [`crate::Usage::throttled`]). What serving the guest takes counts too, the boot
    /// included, which takes longer by that. 1 to 100 for each of its processors and 100 more. It is kept by the control group of the machine's
    /// process: one is required then, as by [`Self::require_cgroup`]. Default: `None`, all of its processors and one more.
    #[must_use]
    pub fn cpu_quota_percent(mut self, percent: Option<u32>) -> Self {
        self.cpu_quota_percent = percent;
        self
    }

    /// The most processes and threads of all commands together, those that read and write files and a warm interpreter's included: above, a
    /// `fork` fails ([`crate::Limit::Processes`]). At least 1, and never more than go with the memory: one for 256 KiB, 4096 at most. Kept by the
    /// guest's kernel. Default: `None`, what goes with the memory; in a fork, what the saved guest had.
    #[must_use]
    pub fn max_processes(mut self, count: Option<u32>) -> Self {
        self.max_processes = count;
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

    /// The program to start the machine's process with; it must call [`fn@crate::init`] first. Default:
    /// `$SANDVMM_BIN`; else this very program if it called [`fn@crate::init`]; else `sandvmm` beside it; else
    /// `sandvmm` of `PATH`.
    #[must_use]
    pub fn program(mut self, path: impl Into<PathBuf>) -> Self {
        self.program = Some(path.into());
        self
    }

    /// Gets everything that the guest's kernel says, for debugging; what does not fit is dropped. The open file is made non-blocking, also for
    /// others that have it: give it a pipe or a file of its own, and no copy of this process's standard error.
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
    /// and [`Sandbox::cell`] says that there is none. With one that is left out it is [`StartError::InvalidOption`].
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
                source: jailer::name_limit(source),
            })?;
        Ok(Sandbox::new(shared, origin, thread))
    }
}
