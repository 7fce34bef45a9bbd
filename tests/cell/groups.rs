//! The control group around a machine whose disk lies on a device.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::process::Command;

use jailer::BlockDevice;

use crate::machine::{Machine, Wanted};

/// Bytes of the disk.
const DISK_BYTES: u64 = 1 << 20;

/// A loop device, until it is dropped.
struct Loop(String);

impl Loop {
    fn over(file: &std::path::Path) -> Self {
        let made = losetup()
            .args(["--find", "--show"])
            .arg(file)
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        Self(String::from_utf8(made.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = losetup().arg("--detach").arg(&self.0).status();
    }
}

/// The program is the administrator's, and so may not be on `PATH`.
fn losetup() -> Command {
    let mut command = Command::new("losetup");
    command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    command
}

pub(crate) fn what_is_asked_of_a_disks_device_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    File::create(&path).unwrap().set_len(DISK_BYTES).unwrap();
    let device = Loop::over(&path);
    let disk = File::open(&device.0).unwrap();
    let below = BlockDevice::below(disk.as_fd()).unwrap();

    let machine = Machine::wanted(&Wanted {
        devices: vec![below],
        ..Wanted::case("halts_for_ever")
    })
    .unwrap();

    let bounds = machine.cell.cgroup.as_ref().expect("a control group");
    assert!(bounds.files.contains(&"io.max"), "{bounds:?}");
    let group = machine.process.cgroup().unwrap().to_owned();
    let limits = fs::read_to_string(group.join("io.max")).unwrap();
    assert_eq!(
        limits,
        format!("{below} rbps=536870912 wbps=536870912 riops=16384 wiops=16384\n")
    );
    machine.close().unwrap();
    assert!(!group.exists());
}
