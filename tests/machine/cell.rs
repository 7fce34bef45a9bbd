//! The cell around a machine's process, for whoever starts it: root and others, with control groups and without.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use sandvmm_tests::{Background, Nobodys, children_of, eventually};
use serde_json::Value;

const GROUPS: &str = "/sys/fs/cgroup";

/// Has `$1`, a user's folder with a copy of the command, and the command's arguments; runs it as that user, who may open `/dev/kvm` in
/// here and nowhere else, and who may read the images wherever they are.
const AS_NOBODY: &str = r#"set -e
folder=$1
shift
mount -t tmpfs none /mnt
mknod -m 666 /mnt/kvm c 10 232
mount --bind /mnt/kvm /dev/kvm
mkdir -p "$folder/images"
mount --bind "$SANDVMM_HOME" "$folder/images"
cd /
SANDVMM_HOME=$folder/images HOME=$folder exec setpriv --reuid 65534 --regid 65534 --clear-groups "$folder/sandvmm" "$@""#;

/// A call of the copy in a mount namespace of its own, as the user who owns nothing.
fn as_nobody(nobodys: &Nobodys, args: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", AS_NOBODY, "sh"])
        .arg(nobodys.folder())
        .args(args);
    command
}

#[track_caller]
fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn missing(cell: &Value) -> Vec<&str> {
    let missing = cell["missing"].as_array().unwrap();
    missing
        .iter()
        .map(|missing| missing["part"].as_str().unwrap())
        .collect()
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_user_without_privileges_runs_a_script_in_a_cell() {
    let nobodys = Nobodys::copied();

    let output = as_nobody(
        &nobodys,
        &["run", "--json", "--timeout", "120s", "-c", "print(6 * 7)"],
    )
    .output()
    .unwrap();

    let json = object(&output);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(json["stdout"], "42\n", "{json}");
    let cell = &json["cell"];
    assert_eq!(cell["namespaces"].as_array().unwrap().len(), 7, "{cell}");
    assert_eq!(cell["empty_root"], true, "{cell}");
    assert_eq!(cell["seccomp"], true, "{cell}");
    assert!(cell["landlock_abi"].is_u64(), "{cell}");
    // The group that he is in is root's.
    assert!(cell["cgroup"].is_null(), "{cell}");
    assert!(missing(cell).contains(&"cgroup"), "{cell}");
}

/// A control group of a test's own with one in it, from where a command is called; both removed at its end, whatever that is.
struct Delegated {
    outer: PathBuf,
    inner: PathBuf,
}

impl Delegated {
    fn to(user: u32) -> Self {
        let root = Path::new(GROUPS);
        fs::write(root.join("cgroup.subtree_control"), "+cpu +memory +pids").unwrap();
        let outer = root.join(format!("delegated-{user}-{}", std::process::id()));
        let inner = outer.join("inner");
        fs::create_dir_all(&inner).unwrap();
        // As cgroups(7) says that a group is delegated, and what systemd does for `Delegate=`.
        for group in [&outer, &inner] {
            for file in ["", "cgroup.procs", "cgroup.subtree_control"] {
                chown(group.join(file), Some(user), Some(user)).unwrap();
            }
        }
        Self { outer, inner }
    }

    /// `command`, begun in the inner group.
    fn begun(&self, command: &Command) -> Command {
        let mut begun = Command::new("sh");
        begun
            .args(["-c", "echo $$ > \"$0/cgroup.procs\"; exec \"$@\""])
            .arg(&self.inner)
            .arg(command.get_program())
            .args(command.get_args());
        begun
    }

    /// Those that are neither of the two.
    fn machines(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.outer).unwrap().flatten();
        entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir() && *path != self.inner)
            .collect()
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        eventually(Duration::from_secs(20), "the groups can be removed", || {
            for group in self.machines() {
                let _ = fs::remove_dir(group);
            }
            let _ = fs::remove_dir(&self.inner);
            fs::remove_dir(&self.outer).is_ok()
        });
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_machines_control_group_has_the_bounds_of_its_options() {
    const ARGS: [&str; 11] = [
        "run",
        "--memory",
        "512M",
        "--cpus",
        "2",
        "--timeout",
        "0",
        "--",
        "sh",
        "-c",
        "echo up; sleep 1000",
    ];
    let nobodys = Nobodys::copied();
    let mut by_root = Command::new("sandvmm");
    by_root.args(ARGS);
    for (user, command) in [(0, by_root), (Nobodys::ID, as_nobody(&nobodys, &ARGS))] {
        let groups = Delegated::to(user);
        let mut machine = Background::start(&mut groups.begun(&command));
        machine.wait_for_output("up\n");

        let made = groups.machines();
        let [group] = &*made else {
            panic!("{user}: {made:?}")
        };
        let read = |file: &str| fs::read_to_string(group.join(file)).unwrap();
        let processes = children_of(machine.child().id());
        assert_eq!(processes.len(), 1);
        // KVM has a thread of the kernel's own in there too, for each virtual machine.
        let is_process = |pid: &&str| !fs::read(format!("/proc/{pid}/cmdline")).unwrap().is_empty();
        let within = read("cgroup.procs");
        let within: Vec<&str> = within.lines().filter(is_process).collect();
        assert_eq!(within, [processes[0].to_string()]);
        // docs/cell.md: a processor more than the guest's; its memory, a 128th of that and 96 MiB; a thread for each processor, the
        // loop, and four of KVM's.
        assert_eq!(read("cpu.max").trim(), "300000 100000");
        let memory = ((512 + 96) << 20) + (512 << 20) / 128;
        assert_eq!(read("memory.max").trim(), memory.to_string());
        assert_eq!(read("pids.max").trim(), "7");
        assert_eq!(read("memory.swap.max").trim(), "0");

        machine.child().kill().unwrap();
        machine.wait();
        eventually(Duration::from_secs(10), "the machine is gone", || {
            read_or_empty(&group.join("cgroup.procs")).is_empty()
        });
    }
}

fn read_or_empty(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_default()
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_control_group_that_no_process_may_be_moved_into_is_done_without() {
    let nobodys = Nobodys::copied();
    let groups = Delegated::to(Nobodys::ID);
    // As of somebody who delegates a folder alone.
    chown(groups.outer.join("cgroup.procs"), Some(0), Some(0)).unwrap();
    let run = |options: &[&str]| {
        let args = [
            &["run", "--json", "--timeout", "120s"],
            options,
            &["--", "true"],
        ]
        .concat();
        let command = as_nobody(&nobodys, &args);
        groups.begun(&command).output().unwrap()
    };

    let told = run(&[]);
    let required = run(&["--require-cgroup"]);

    let json = object(&told);
    assert_eq!(told.status.code(), Some(0), "{told:?}");
    assert_eq!(missing(&json["cell"]), ["cgroup"], "{json}");
    let why = json["cell"]["missing"][0]["why"].as_str().unwrap();
    assert!(why.contains("cgroup.procs"), "{why}");
    let json = object(&required);
    assert_eq!(required.status.code(), Some(125), "{required:?}");
    let said = json["message"].as_str().unwrap();
    assert!(said.contains("cgroup.procs"), "{said}");
    assert!(groups.machines().is_empty(), "{:?}", groups.machines());
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_host_without_control_groups_is_told_and_is_no_failure_unless_one_is_required() {
    let without = |args: &[&str]| {
        Command::new("unshare")
            .args(["--mount", "sh", "-c"])
            .arg("umount -l /sys/fs/cgroup; exec sandvmm \"$@\"")
            .arg("sh")
            .args(args)
            .output()
            .unwrap()
    };

    let told = without(&["run", "--json", "--timeout", "120s", "--", "true"]);
    let required = without(&["run", "--require-cgroup", "--", "true"]);
    let doctor = without(&["doctor", "--json"]);

    let json = object(&told);
    assert_eq!(told.status.code(), Some(0), "{told:?}");
    assert_eq!(missing(&json["cell"]), ["cgroup"], "{json}");
    let said = String::from_utf8_lossy(&required.stderr);
    assert_eq!(required.status.code(), Some(125), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("control group"), "{said}");
    assert_eq!(doctor.status.code(), Some(0), "{doctor:?}");
    assert_eq!(missing(&object(&doctor)["cell"]), ["cgroup"], "{doctor:?}");
}
