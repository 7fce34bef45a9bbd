//! Whether this machine can run virtual machines, in plain words.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use vmm::control::ControlSocket;
use vmm::host::{Hardware, kvm_check};
use vmm::memory::MIN_MEMORY_MIB;

use crate::cell::Cell;
use crate::images::{Images, ImagesError};
use crate::program;
use crate::text::one_line;

/// The first Linux whose KVM, `close_range`, pidfds and cgroup v2 are all that is needed.
const MIN_KERNEL: (u32, u32) = (5, 10);

/// The cgroup controllers that bound a machine's process.
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

/// What was found out about this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostReport {
    /// One check each, in the order in which they matter.
    pub checks: Vec<Check>,
    /// What is on of the cell that a machine would have here; `None` where no process could be put into one.
    pub cell: Option<Cell>,
}

/// One thing that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// A short name, for example `KVM`.
    pub name: &'static str,
    /// How it stands.
    pub status: Status,
    /// What was found, in one sentence.
    pub detail: String,
    /// What to do, if something is to be done.
    pub advice: Option<String>,
}

/// How a check stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// As it should be.
    Ok,
    /// Sandboxes run, but with less: slower, or with fewer walls around the machine's process.
    Warning,
    /// Sandboxes cannot run.
    Missing,
}

impl HostReport {
    /// Looks at this machine, and puts a process into a cell to see which parts are on. Nothing stays changed but that the
    /// group which a cgroup was made in goes on to let its children be limited.
    #[must_use]
    pub fn inspect() -> Self {
        let (cell_check, cell) = cell();
        Self {
            cell,
            checks: vec![
                hardware(),
                kvm(),
                kernel(),
                images(),
                cgroup(),
                landlock(),
                user_namespaces(),
                cell_check,
            ],
        }
    }

    /// Whether sandboxes can run here.
    ///
    /// # Errors
    /// One sentence that says what is missing and what to do; the same that [`crate::SandboxBuilder::start`]
    /// gives.
    pub fn can_run(&self) -> Result<(), String> {
        match self
            .checks
            .iter()
            .find(|check| check.status == Status::Missing)
        {
            None => Ok(()),
            Some(check) => Err(check.sentence()),
        }
    }
}

impl Check {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            detail: detail.into(),
            advice: None,
        }
    }

    fn not_ok(
        name: &'static str,
        status: Status,
        detail: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            name,
            status,
            detail: detail.into(),
            advice: Some(advice.into()),
        }
    }

    /// What was found and what to do, as one sentence.
    fn sentence(&self) -> String {
        match &self.advice {
            None => self.detail.clone(),
            Some(advice) => format!("{}: {advice}", self.detail),
        }
    }
}

/// Starts a process in the cell that a machine's would have, and ends it.
fn cell() -> (Check, Option<Cell>) {
    const NAME: &str = "Cell";
    let cell = match try_cell() {
        Ok(cell) => cell,
        Err(why) => {
            let check = Check::not_ok(
                NAME,
                Status::Warning,
                format!("No process could be put into a cell: {why}"),
                "see what `run` says",
            );
            return (check, None);
        }
    };
    let check = if cell.missing.is_empty() {
        Check::ok(NAME, in_words(&cell))
    } else {
        let missing: Vec<String> = cell.missing.iter().map(ToString::to_string).collect();
        Check::not_ok(
            NAME,
            Status::Warning,
            format!("{}; missing: {}", in_words(&cell), missing.join("; ")),
            "the checks above tell what to do",
        )
    };
    (check, Some(cell))
}

/// How long the process may take until it is in its cell.
const CELL_LIMIT: Duration = Duration::from_secs(10);

fn try_cell() -> Result<Cell, String> {
    let program = program::find(None).map_err(|error| error.to_string())?;
    let (_ours, theirs) = ControlSocket::pair().map_err(|error| error.to_string())?;
    let bounds = jailer::Bounds {
        memory_mib: MIN_MEMORY_MIB,
        vcpus: 1,
        max_file_bytes: 0,
    };
    let mut process = jailer::start(&program, theirs.into(), jailer::Options::new(bounds))
        .map_err(|error| error.to_string())?;
    match process.entered(CELL_LIMIT) {
        Ok(Some(cell)) => Ok(cell),
        Ok(None) => {
            process.end();
            process.read_stderr();
            Err(one_line(&process.stderr_tail()))
        }
        Err(error) => Err(error.to_string()),
    }
}

fn in_words(cell: &Cell) -> String {
    let kinds: Vec<&str> = cell
        .namespaces
        .iter()
        .map(jailer::Namespace::name)
        .collect();
    let kinds = if kinds.is_empty() {
        "no namespace".to_owned()
    } else {
        format!("namespaces ({})", kinds.join(", "))
    };
    let root = if cell.empty_root {
        "an empty file tree"
    } else {
        "the host's file tree"
    };
    let ids = match cell.ids {
        jailer::Ids::Own(_) => "ids of its own",
        _ => "its user's ids",
    };
    let cgroup = cell.cgroup.as_ref().map_or_else(
        || "no cgroup".to_owned(),
        |bounds| format!("a cgroup ({})", bounds.files.join(", ")),
    );
    let landlock = cell
        .landlock_abi
        .map_or_else(|| "no Landlock".to_owned(), |abi| format!("Landlock {abi}"));
    format!(
        "A machine's process has {kinds}, {root}, {ids}, {cgroup}, {landlock}, no capability, and filtered system calls"
    )
}

/// Opens `/dev/kvm` for a machine, if this host can run one: the two checks that a start cannot do without.
///
/// # Errors
/// The sentence of the check that failed.
pub(crate) fn open_kvm() -> Result<OwnedFd, String> {
    let hardware = hardware();
    if hardware.status == Status::Missing {
        return Err(hardware.sentence());
    }
    kvm_device().map_err(|check| check.sentence())
}

fn hardware() -> Check {
    const NAME: &str = "Hardware virtualization";
    let has_kvm = fs::exists("/dev/kvm").unwrap_or(false);
    match (vmm::host::hardware(), vmm::host::is_virtual()) {
        (Some(kind), false) => Check::ok(NAME, format!("The processor has {}", name_of(kind))),
        (Some(kind), true) => Check::not_ok(
            NAME,
            Status::Warning,
            format!(
                "This machine is virtual itself and has nested {}",
                name_of(kind)
            ),
            "all works, slower than on metal",
        ),
        (None, _) if has_kvm => Check::not_ok(
            NAME,
            Status::Missing,
            "The processor shows neither VMX nor SVM, so that /dev/kvm is a software KVM, which cannot run a \
             Linux guest",
            "use a machine with hardware virtualization, or `cargo xtask host`, which emulates one",
        ),
        (None, true) => Check::not_ok(
            NAME,
            Status::Missing,
            "This machine is virtual itself and its processor shows neither VMX nor SVM",
            "switch nested virtualization on where it is hosted, or use `cargo xtask host`, which emulates a \
             host that has it",
        ),
        (None, false) => Check::not_ok(
            NAME,
            Status::Missing,
            "The processor shows neither VMX nor SVM",
            "switch virtualization on in the firmware's setup, or use `cargo xtask host`, which emulates a \
             host that has it",
        ),
    }
}

fn name_of(kind: Hardware) -> &'static str {
    match kind {
        Hardware::Vmx => "Intel VT-x (VMX)",
        Hardware::Svm => "AMD-V (SVM)",
    }
}

const KVM: &str = "KVM";

fn kvm() -> Check {
    let checked = kvm_device().and_then(|device| {
        kvm_check(device).map_err(|problem| {
            Check::not_ok(
                KVM,
                Status::Missing,
                problem.to_string(),
                "use a newer kernel",
            )
        })
    });
    match checked {
        Ok(()) => Check::ok(
            KVM,
            format!(
                "/dev/kvm opens, speaks version {} and has all that a machine needs",
                vmm::host::KVM_API_VERSION
            ),
        ),
        Err(check) => check,
    }
}

fn kvm_device() -> Result<OwnedFd, Check> {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map(OwnedFd::from)
        .map_err(|error| kvm_does_not_open(&error))
}

fn kvm_does_not_open(error: &io::Error) -> Check {
    let (detail, advice) = match error.kind() {
        io::ErrorKind::NotFound => (
            "/dev/kvm does not exist".to_owned(),
            "load the module `kvm_intel` or `kvm_amd`, or switch virtualization on in the firmware's setup; in a \
             container, give it the device with `--device /dev/kvm`",
        ),
        io::ErrorKind::PermissionDenied => (
            "/dev/kvm may not be opened by this user".to_owned(),
            "add the user to the group `kvm` (`sudo usermod -aG kvm $USER`) and log in again",
        ),
        _ => (
            format!("/dev/kvm does not open ({error})"),
            "load the module `kvm_intel` or `kvm_amd`, and see what the kernel's log says of it",
        ),
    };
    Check::not_ok(KVM, Status::Missing, detail, advice)
}

fn kernel() -> Check {
    const NAME: &str = "Kernel";
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let (major, minor) = MIN_KERNEL;
    match version_of(&release) {
        Some(version) if version < MIN_KERNEL => Check::not_ok(
            NAME,
            Status::Missing,
            format!("Linux {release} is older than {major}.{minor}"),
            "use a newer kernel",
        ),
        Some(_) => Check::ok(NAME, format!("Linux {release}")),
        None => Check::not_ok(
            NAME,
            Status::Warning,
            format!("The kernel calls itself {release}, which is no version"),
            format!("see that it has what Linux {major}.{minor} has"),
        ),
    }
}

fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Other files can be named for each sandbox, so that missing images are a warning.
fn images() -> Check {
    const NAME: &str = "Images";
    match Images::from_data_folder() {
        Ok(images) => Check::ok(
            NAME,
            format!(
                "Kernel, initramfs and root image are in {}",
                images.kernel.parent().unwrap_or(&images.kernel).display()
            ),
        ),
        Err(ImagesError::Missing { path }) => Check::not_ok(
            NAME,
            Status::Warning,
            format!("{} is missing", path.display()),
            "build it with `cargo xtask setup`, or name other files",
        ),
        Err(error) => Check::not_ok(NAME, Status::Warning, error.to_string(), "name other files"),
    }
}

fn cgroup() -> Check {
    const NAME: &str = "cgroup v2";
    const LESS: &str = "a machine's process is not held to a share of processor and memory";
    let Ok(mounts) = fs::read_to_string("/proc/self/mounts") else {
        return Check::not_ok(NAME, Status::Warning, "/proc is not mounted", LESS);
    };
    let Some(root) = cgroup_root(&mounts) else {
        return Check::not_ok(
            NAME,
            Status::Warning,
            "cgroup v2 is not mounted",
            format!("boot with `systemd.unified_cgroup_hierarchy=1`, else {LESS}"),
        );
    };
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or("/");
    let folder = format!("{root}{own}");
    let controllers =
        fs::read_to_string(format!("{folder}/cgroup.controllers")).unwrap_or_default();
    let lacking = lacking_controllers(&controllers);
    if !lacking.is_empty() {
        return Check::not_ok(
            NAME,
            Status::Warning,
            format!("{folder} lacks the controllers {}", lacking.join(", ")),
            format!("delegate them (`systemctl edit user@.service`, `Delegate=yes`), else {LESS}"),
        );
    }
    if rustix::fs::access(
        format!("{folder}/cgroup.procs"),
        rustix::fs::Access::WRITE_OK,
    )
    .is_err()
    {
        return Check::not_ok(
            NAME,
            Status::Warning,
            format!("{folder} is not this user's"),
            format!("run under `systemd-run --user --scope -p Delegate=yes`, else {LESS}"),
        );
    }
    Check::ok(
        NAME,
        format!("{folder} has the controllers {}", CONTROLLERS.join(", ")),
    )
}

/// Where cgroup v2 is mounted, from the text of `/proc/self/mounts`.
fn cgroup_root(mounts: &str) -> Option<&str> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (folder, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then_some(folder)
    })
}

fn lacking_controllers(available: &str) -> Vec<&'static str> {
    CONTROLLERS
        .into_iter()
        .filter(|needed| !available.split_whitespace().any(|one| one == *needed))
        .collect()
}

fn landlock() -> Check {
    const NAME: &str = "Landlock";
    match jailer::landlock_abi() {
        Some(version) => Check::ok(NAME, format!("The kernel has version {version}")),
        None => Check::not_ok(
            NAME,
            Status::Warning,
            "The kernel has no Landlock, or it is switched off",
            "boot with `lsm=landlock,…` or a kernel with CONFIG_SECURITY_LANDLOCK, else a machine's process has \
             one wall less",
        ),
    }
}

fn user_namespaces() -> Check {
    const NAME: &str = "User namespaces";
    const LESS: &str = "else a machine's process has one wall less unless it is started by root";
    let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned());
    let off = [
        (
            "/proc/sys/user/max_user_namespaces",
            "0",
            "user.max_user_namespaces=15000",
        ),
        (
            "/proc/sys/kernel/unprivileged_userns_clone",
            "0",
            "kernel.unprivileged_userns_clone=1",
        ),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ]
    .into_iter()
    .find(|(path, off, _)| read(path).is_ok_and(|value| value == *off));
    if fs::exists("/proc/self/ns/user").is_ok_and(|exists| !exists) {
        return Check::not_ok(
            NAME,
            Status::Warning,
            "The kernel has no user namespaces",
            format!("use one with CONFIG_USER_NS, {LESS}"),
        );
    }
    match off {
        None => Check::ok(NAME, "A user without privileges may make them"),
        Some((path, value, setting)) => Check::not_ok(
            NAME,
            Status::Warning,
            format!("{path} is {value}: a user without privileges may not make them"),
            format!("`sudo sysctl {setting}`, {LESS}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_with_something_missing_cannot_run_and_says_what_to_do() {
        let missing = kvm_does_not_open(&io::ErrorKind::PermissionDenied.into());
        let report = HostReport {
            checks: vec![Check::not_ok("A", Status::Warning, "slow", "wait"), missing],
            cell: None,
        };

        let sentence = report.can_run().unwrap_err();

        assert!(
            sentence.starts_with("/dev/kvm may not be opened"),
            "{sentence}"
        );
        assert!(sentence.contains("group `kvm`"), "{sentence}");
    }

    #[test]
    fn warnings_alone_do_not_keep_sandboxes_from_running() {
        let report = HostReport {
            checks: vec![Check::not_ok("A", Status::Warning, "slow", "wait")],
            cell: None,
        };
        assert_eq!(report.can_run(), Ok(()));
    }

    #[test]
    fn this_machine_gets_an_answer_to_every_check() {
        let report = HostReport::inspect();

        let names: Vec<_> = report.checks.iter().map(|check| check.name).collect();
        assert_eq!(
            names,
            [
                "Hardware virtualization",
                "KVM",
                "Kernel",
                "Images",
                "cgroup v2",
                "Landlock",
                "User namespaces",
                "Cell"
            ]
        );
        for check in &report.checks {
            assert_eq!(
                check.status == Status::Ok,
                check.advice.is_none(),
                "{check:?}"
            );
            assert!(
                !check.detail.is_empty() && !check.detail.ends_with('.'),
                "{check:?}"
            );
        }
    }

    #[test]
    fn a_start_and_the_report_give_the_same_sentence() {
        let report = HostReport::inspect();
        let opened = open_kvm();
        let missing = report
            .checks
            .iter()
            .take(2)
            .find(|check| check.status == Status::Missing);
        assert_eq!(opened.err(), missing.map(Check::sentence));
    }

    #[test]
    fn versions_are_read_from_the_releases_of_distributions() {
        assert_eq!(version_of("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(version_of("5.4.0"), Some((5, 4)));
        assert_eq!(version_of("6.18-rc1"), Some((6, 18)));
        assert_eq!(version_of("custom"), None);
    }

    #[test]
    fn cgroup_v2_is_found_among_the_mounts_and_v1_is_not_taken_for_it() {
        let hybrid = "cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(cgroup_root(hybrid), Some("/sys/fs/cgroup/unified"));
        assert_eq!(
            cgroup_root("cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\n"),
            None
        );
    }

    #[test]
    fn controllers_that_lack_are_named() {
        assert_eq!(lacking_controllers("cpuset cpu io pids"), ["memory"]);
        assert!(lacking_controllers("cpu memory pids").is_empty());
    }
}
