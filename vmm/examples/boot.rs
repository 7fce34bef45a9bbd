//! Boots a kernel and shows what it prints: a supervisor reduced to the least.
//!
//! `boot KERNEL [INITRAMFS [CMDLINE [CPUS [MEMORY_MIB [DISK...]]]]]`; `-` stands for no initramfs. With `BOOT_QUIET` in the
//! environment the machine has no console, as in real use, and the times are those of real use.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};

use rustix::time::{ClockId, clock_gettime};
use sandvmm_vmm::Served;
use sandvmm_vmm::control::{
    ControlError, ControlSocket, DiskConfig, FromMachine, MachineConfig, ToMachine,
};

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let kernel = args.next().ok_or("Name a kernel file")?;
    if kernel == "serve" {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        return Ok(match sandvmm_vmm::serve(socket.into()) {
            Served::NoStart => ExitCode::FAILURE,
            _ => ExitCode::SUCCESS,
        });
    }
    let initramfs = args.next().filter(|name| name != "-");
    let cmdline = args.next().unwrap_or_default();
    let vcpu_count = args.next().map_or(Ok(1), |count| count.parse())?;
    let memory_mib = args.next().map_or(Ok(128), |mib| mib.parse())?;
    let disks: Vec<OwnedFd> = args
        .map(|name| File::open(name).map(OwnedFd::from))
        .collect::<Result<_, _>>()?;

    let started_ns = monotonic_ns();
    let (socket, theirs) = ControlSocket::pair()?;
    let mut machine = Command::new(std::env::current_exe()?)
        .arg("serve")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    let (mut console, console_end) = UnixStream::pair()?;
    let mut descriptors = vec![OwnedFd::from(
        OpenOptions::new().read(true).write(true).open("/dev/kvm")?,
    )];
    descriptors.push(File::open(kernel)?.into());
    if let Some(initramfs) = &initramfs {
        descriptors.push(File::open(initramfs)?.into());
    }
    let has_console = std::env::var_os("BOOT_QUIET").is_none();
    if has_console {
        descriptors.push(console_end.into());
    } else {
        // The printer then reads the end of file at once.
        drop(console_end);
    }
    let config = MachineConfig {
        vcpu_count,
        memory_mib,
        cmdline,
        guest_cid: 3,
        rng_seed: [7; 32],
        has_initramfs: initramfs.is_some(),
        has_console,
        disks: disks
            .iter()
            .map(|_| DiskConfig {
                read_only: true,
                serial: String::from("disk"),
            })
            .collect(),
    };
    descriptors.extend(disks);
    {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        socket.send(&ToMachine::Start(config), &borrowed)?;
    }
    drop(descriptors);

    let printer = std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = console.read(&mut buffer) {
            let _ = io::stdout().write_all(buffer.get(..count).unwrap_or_default());
        }
    });
    loop {
        match socket.receive() {
            Ok((FromMachine::Ended { reason, .. }, _)) => {
                println!("[{} µs] ended: {reason:?}", since_us(started_ns));
                break;
            }
            Ok((
                FromMachine::Running {
                    process_started_ns,
                    vcpu_running_ns,
                },
                _,
            )) => println!(
                "main began after {} µs, vCPU ran {} µs later",
                (process_started_ns - started_ns) / 1000,
                (vcpu_running_ns - process_started_ns) / 1000
            ),
            Ok((message, _)) => println!("{message:?}"),
            Err(ControlError::Closed) => break,
            Err(error) => return Err(error.into()),
        }
    }
    drop(socket);
    machine.wait()?;
    println!("[{} µs] process gone", since_us(started_ns));
    let _ = printer.join();
    Ok(ExitCode::SUCCESS)
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)).unwrap_or(0)
}

fn since_us(start_ns: u64) -> u64 {
    (monotonic_ns() - start_ns) / 1000
}
