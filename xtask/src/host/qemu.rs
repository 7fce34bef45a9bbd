//! The emulated host's machine: QEMU's translator with an AMD processor that has SVM and nested paging.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use super::agent::PORT_NAME;
use super::emulator::Emulator;
use super::guest::Guest;
use super::wire::share_tag;
use crate::tool;

/// Memory of the emulated host where this machine has enough.
const MEMORY_MIB: u64 = 6144;
/// Below this the emulated host holds its own file cache and one small guest, and no more.
const MEMORY_MIN_MIB: u64 = 1536;
/// Processors of the emulated host at most; each is a thread of QEMU.
const CPUS_MAX: usize = 4;
/// Bytes of console output that are kept for an error message.
const CONSOLE_BYTES_MAX: usize = 64 * 1024;

/// How a machine is to be started.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    /// The QEMU to start it with.
    pub(super) emulator: &'a Emulator,
    /// Kernel and initramfs.
    pub(super) guest: &'a Guest,
    /// Folders to share for writing.
    pub(super) shares: &'a [PathBuf],
    /// This program, as it is seen from the emulated host.
    pub(super) agent: &'a Path,
    /// One instruction a nanosecond.
    pub(super) count_instructions: bool,
}

/// Why QEMU did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QemuError {
    /// This machine is too small.
    #[error(
        "Only {available_mib} MiB of memory are available; the emulated host needs {MEMORY_MIN_MIB} MiB or more"
    )]
    Memory {
        /// What there is.
        available_mib: u64,
    },
    /// The path of this program does not fit on a kernel's command line.
    #[error("The path of this program is too long for the emulated host: {}", .0.display())]
    AgentPath(PathBuf),
    /// The process could not be started.
    #[error("Could not start QEMU")]
    Start(#[source] std::io::Error),
}

/// A running machine. Dropping it ends QEMU; the end of this process does so as well.
#[derive(Debug)]
pub(super) struct Qemu {
    process: Child,
    console: Option<JoinHandle<Vec<u8>>>,
}

impl Qemu {
    /// Starts the machine. The returned socket is the other end of the agent's port.
    ///
    /// To be called on a thread that lives as long as the machine: the kernel ends QEMU with the thread that started it.
    pub(super) fn start(plan: &Plan<'_>) -> Result<(Self, UnixStream), QemuError> {
        let arguments = arguments(plan)?;
        let (here, there) = UnixStream::pair().map_err(QemuError::Start)?;
        // setpriv makes the kernel end QEMU together with this process, whatever ends it.
        let mut process = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(plan.emulator.program())
            .args(plan.emulator.arguments())
            .args(arguments)
            .envs(plan.emulator.environment())
            .stdin(OwnedFd::from(there))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(QemuError::Start)?;
        let stdout = process.stdout.take();
        let stderr = process.stderr.take();
        let console = std::thread::spawn(move || {
            let errors = std::thread::spawn(move || stderr.map(read_tail).unwrap_or_default());
            let console = stdout.map(read_tail).unwrap_or_default();
            // QEMU's own words first: most are about processor features that nobody misses, and the end is what is shown.
            let mut seen = errors.join().unwrap_or_default();
            seen.extend(console);
            seen
        });
        let console = Some(console);
        Ok((Self { process, console }, here))
    }

    /// Ends the machine and returns the end of what its console and QEMU itself said.
    pub(super) fn stop(mut self) -> String {
        self.kill();
        let console = self.console.take().and_then(|console| console.join().ok());
        tool::tail(&console.unwrap_or_default())
    }

    fn kill(&mut self) {
        // An error means that it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads to the end and keeps the last [`CONSOLE_BYTES_MAX`] bytes.
fn read_tail(mut from: impl Read) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut chunk = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut chunk) {
        kept.extend_from_slice(chunk.get(..len).unwrap_or_default());
        let excess = kept.len().saturating_sub(CONSOLE_BYTES_MAX);
        kept.drain(..excess);
    }
    kept
}

fn arguments(plan: &Plan<'_>) -> Result<Vec<OsString>, QemuError> {
    let memory = format!("{}M", memory_mib()?);
    let cpus = std::thread::available_parallelism().map_or(1, |count| count.get().min(CPUS_MAX));
    let mut arguments: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| arguments.extend(words.iter().map(OsString::from));
    add(&[
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-M",
        "q35",
        "-m",
        &memory,
    ]);
    add(&["-cpu", "EPYC,+svm,+npt"]);
    if plan.count_instructions {
        // Each instruction advances every clock by 2^0 ns; a wait of all processors advances it to the next timer.
        add(&[
            "-accel",
            "tcg,thread=single",
            "-icount",
            "shift=0,sleep=off",
            "-smp",
            "1",
        ]);
    } else {
        add(&["-accel", "tcg,thread=multi", "-smp", &cpus.to_string()]);
    }
    // Standard output is the console, standard input the socket of the agent's port.
    add(&[
        "-chardev",
        "file,id=console,path=/dev/fd/1",
        "-serial",
        "chardev:console",
    ]);
    add(&[
        "-chardev",
        "socket,id=agent,fd=0",
        "-device",
        "virtio-serial-pci",
    ]);
    add(&[
        "-device",
        &format!("virtserialport,chardev=agent,name={PORT_NAME}"),
    ]);
    share(&mut arguments, "root", Path::new("/"), ",readonly=on");
    for (index, folder) in plan.shares.iter().enumerate() {
        share(&mut arguments, &share_tag(index), folder, "");
    }
    arguments.extend(["-kernel".into(), plan.guest.kernel.clone().into_os_string()]);
    arguments.extend([
        "-initrd".into(),
        plan.guest.initramfs.clone().into_os_string(),
    ]);
    arguments.extend(["-append".into(), command_line(plan)?]);
    Ok(arguments)
}

/// Adds a 9p device for `folder`.
fn share(arguments: &mut Vec<OsString>, tag: &str, folder: &Path, options: &str) {
    // Root gives files away as the command asks; anyone else cannot, and the command is not to fail for it.
    let model = if rustix::process::geteuid().is_root() {
        "passthrough"
    } else {
        "none"
    };
    let mut device = OsString::from(format!(
        "local,id={tag},security_model={model},multidevs=remap{options},path="
    ));
    device.push(doubled_commas(folder));
    arguments.extend(["-fsdev".into(), device]);
    arguments.extend([
        "-device".into(),
        format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}").into(),
    ]);
}

/// QEMU's way to write a comma inside an option's value.
fn doubled_commas(path: &Path) -> OsString {
    let bytes = path.as_os_str().as_bytes();
    let doubled = bytes.iter().flat_map(|byte| match byte {
        b',' => vec![b',', b','],
        other => vec![*other],
    });
    OsString::from_vec(doubled.collect())
}

fn command_line(plan: &Plan<'_>) -> Result<OsString, QemuError> {
    /// `COMMAND_LINE_SIZE` of x86, less what the rest of the line takes.
    const AGENT_CHARACTERS_MAX: usize = 1800;
    let agent = escaped(plan.agent.as_os_str());
    if agent.len() > AGENT_CHARACTERS_MAX {
        return Err(QemuError::AgentPath(plan.agent.to_owned()));
    }
    // The translator keeps the processors' time stamps in step; without a word about it Linux reads a slow timer instead.
    // A panic restarts the machine at once, which -no-reboot turns into QEMU's end; a kernel that is damaged panics, and tests
    // nothing any more.
    let base = "console=ttyS0 quiet loglevel=4 reboot=t oops=panic panic=-1 cgroup_no_v1=all random.trust_cpu=on tsc=reliable";
    Ok(format!("{base} xtask.agent={agent}").into())
}

/// `path` with every byte that means something to a shell or the kernel as `\0NNN`, for `printf %b`.
fn escaped(path: &OsStr) -> String {
    path.as_bytes()
        .iter()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' => {
                char::from(*byte).to_string()
            }
            other => format!("\\0{other:03o}"),
        })
        .collect()
}

/// How many machines of [`MEMORY_MIB`] there may be at once, for each of which this one has a processor at least.
pub(super) fn at_a_time() -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let fit = available_mib() / 4 * 3 / MEMORY_MIB;
    usize::try_from(fit).unwrap_or(usize::MAX).clamp(1, cpus)
}

fn available_mib() -> u64 {
    let information = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    information
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.parse::<u64>().ok())
        .map_or(MEMORY_MIB, |kib| kib / 1024)
}

/// Memory for the emulated host: [`MEMORY_MIB`], or three quarters of what is available where that is less.
fn memory_mib() -> Result<u64, QemuError> {
    let available_mib = available_mib();
    let memory_mib = MEMORY_MIB.min(available_mib / 4 * 3);
    if memory_mib < MEMORY_MIN_MIB {
        return Err(QemuError::Memory { available_mib });
    }
    Ok(memory_mib)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusual_bytes_of_a_path_are_escaped() {
        assert_eq!(escaped(OsStr::new("/a b/$c")), "/a\\0040b/\\0044c");
        assert_eq!(doubled_commas(Path::new("/a,b")), OsString::from("/a,,b"));
    }

    #[test]
    fn the_end_of_a_long_console_is_kept() {
        let mut text = vec![b'x'; 3 * CONSOLE_BYTES_MAX];
        text.extend_from_slice(b"end");

        let kept = read_tail(text.as_slice());

        assert_eq!(kept.len(), CONSOLE_BYTES_MAX);
        assert!(kept.ends_with(b"end"));
    }
}
