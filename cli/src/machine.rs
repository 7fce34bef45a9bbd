//! From the options of a machine to the library's builder, and the names of its life's phases.

use std::time::{Duration, Instant};

use sandvmm::{Clocks, Sandbox, SandboxBuilder};

use crate::args::MachineArgs;

/// A builder with these options; the library's defaults where there are none.
pub(crate) fn builder(args: &MachineArgs, called_at: Instant) -> SandboxBuilder {
    let mut builder = with_cell(Sandbox::builder(), args, called_at)
        .cpus(args.cpus)
        .memory_mib(args.memory);
    if let Some(path) = &args.kernel {
        builder = builder.kernel(path);
    }
    if let Some(path) = &args.initrd {
        builder = builder.initrd(path);
    }
    if let Some(path) = &args.rootfs {
        builder = builder.rootfs(path);
    }
    builder
}

/// Sets what is not of the machine itself.
pub(crate) fn with_cell(
    builder: SandboxBuilder,
    args: &MachineArgs,
    called_at: Instant,
) -> SandboxBuilder {
    args.dangerously_leave_out.iter().fold(
        builder
            .require_cgroup(args.require_cgroup)
            .called_at(called_at),
        |builder, part| builder.dangerously_leave_out(*part),
    )
}

/// What a booting guest's first word is called.
pub(crate) const GUEST_INIT: &str = "guest init";

/// The files that the user named to boot from, for the message of a boot that failed; `None` where there are none.
pub(crate) fn named_files(args: &MachineArgs) -> Option<String> {
    let named: Vec<String> = [
        ("kernel", &args.kernel),
        ("initramfs", &args.initrd),
        ("root image", &args.rootfs),
    ]
    .into_iter()
    .filter_map(|(role, path)| Some(format!("{role} {}", path.as_deref()?.display())))
    .collect();
    (!named.is_empty()).then(|| format!("booted with the {}", named.join(", the ")))
}

/// The phases of a machine's life that end when the named thing is reached, in their order, and when that
/// was, counted from the user's call. `greeting` is what the guest's first word is called.
pub(crate) fn phases(
    clocks: &Clocks,
    greeting: &'static str,
) -> [(&'static str, Option<Duration>); 7] {
    [
        ("process started", clocks.process_started),
        ("vCPU running", clocks.vcpu_running),
        (greeting, clocks.guest_init),
        ("agent ready", clocks.agent_ready),
        ("first output", clocks.first_output),
        ("program exited", clocks.exited),
        ("all gone", clocks.all_gone),
    ]
}
