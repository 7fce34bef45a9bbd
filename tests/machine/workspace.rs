//! Disks that outlive a run.

use std::time::Duration;

use sandvmm_tests::{Background, eventually, run, sandvmm};

/// A data folder of its own, with the images of the real one.
fn data_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let real = std::path::PathBuf::from(std::env::var_os("SANDVMM_HOME").unwrap());
    for name in ["vmlinux", "initramfs.cpio", "rootfs.erofs"] {
        std::os::unix::fs::symlink(real.join(name), folder.path().join(name)).unwrap();
    }
    folder
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn three_runs_find_what_the_one_before_wrote() {
    let home = data_folder();
    let with = |program: &str| {
        run([
            "--workspace",
            "dev",
            "--workspace-size",
            "64M",
            "-u",
            "root",
            "--",
            "sh",
            "-c",
            program,
        ])
        .env("SANDVMM_HOME", home.path())
        .done()
    };

    with("echo one > /root/kept; rm /etc/debian_version; mkdir /opt/made").expect(0);
    with("set -e; cat /root/kept; test ! -e /etc/debian_version; echo two >> /root/kept").expect(0);
    let third =
        with("cat /root/kept; ls -d /opt/made; head -c 100000000 /dev/zero > /full; echo $?")
            .expect(0);

    assert_eq!(
        third.text(),
        "one\ntwo\n/opt/made\n1\n",
        "the quota holds: {third:?}"
    );
    let listed = sandvmm(["workspace", "list"])
        .env("SANDVMM_HOME", home.path())
        .done()
        .expect(0);
    assert!(
        listed.text().starts_with("dev  ") && listed.text().contains("of 64M"),
        "{listed:?}"
    );
    sandvmm(["workspace", "rm", "dev"])
        .env("SANDVMM_HOME", home.path())
        .done()
        .expect(0);
    let gone = sandvmm(["workspace", "rm", "dev"])
        .env("SANDVMM_HOME", home.path())
        .done()
        .expect(125);
    assert!(gone.stderr.contains("no workspace"), "{gone:?}");
}

/// A tmpfs of a few MiB on a folder, as long as this lives.
struct Small<'a>(&'a std::path::Path);

impl<'a> Small<'a> {
    fn mount(folder: &'a std::path::Path) -> Self {
        use rustix::mount::{MountFlags, mount};

        mount("tmpfs", folder, "tmpfs", MountFlags::empty(), c"size=7M").unwrap();
        Self(folder)
    }
}

impl Drop for Small<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn what_a_full_host_does_not_keep_of_a_workspace_is_told() {
    let home = data_folder();
    let disks = home.path().join("workspaces");
    std::fs::create_dir(&disks).unwrap();
    let _small = Small::mount(&disks);
    let call = |size: &str| {
        let program = format!("head -c {size} /dev/urandom > ~/x; echo written");
        run(["--json", "--timeout", "120s", "--workspace", "dev"])
            .args(["--", "sh", "-c", &program])
            .env("SANDVMM_HOME", home.path())
            .done()
    };

    let kept = call("1000000").expect(0).json();
    let lost = call("9000000").expect(125).json();

    assert_eq!(kept["error"], serde_json::Value::Null);
    assert_eq!(lost["stdout"], "written\n");
    assert_eq!(
        (&lost["reason"], &lost["error"]),
        (&"exited".into(), &"workspace".into())
    );
    assert!(
        lost["message"].as_str().unwrap().contains("is full"),
        "{lost}"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_workspace_has_one_run_at_a_time_and_survives_its_death() {
    let home = data_folder();
    let program =
        "echo done > ~/done; sync; echo ready; n=0; while :; do echo $n > ~/n; n=$((n+1)); done";
    let mut first = Background::start(
        std::process::Command::new("sandvmm")
            .args([
                "run",
                "--workspace",
                "dev",
                "--timeout",
                "0",
                "--",
                "sh",
                "-c",
                program,
            ])
            .env("SANDVMM_HOME", home.path()),
    );
    first.wait_for_output("ready");

    let second = run(["--workspace", "dev", "--", "true"])
        .env("SANDVMM_HOME", home.path())
        .done()
        .expect(125);
    assert!(second.stderr.contains("in use"), "{second:?}");
    first.child().kill().unwrap();
    first.wait();

    let mut third = None;
    eventually(
        Duration::from_secs(20),
        "the lock goes with the machine",
        || {
            let ran = run(["--workspace", "dev", "--", "sh", "-c", "cat ~/done"])
                .env("SANDVMM_HOME", home.path())
                .done();
            let is_free = !ran.stderr.contains("in use");
            third = Some(ran);
            is_free
        },
    );
    assert_eq!(third.unwrap().expect(0).text(), "done\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_scratch_disk_holds_more_than_memory_does_and_is_gone_at_the_end() {
    let home = data_folder();
    // More than the half of the memory that is there to write to without a disk. Its file is in the emulated host's memory, which counts
    // as the machine's: hence no more.
    let program = "set -e; test ! -e ~/kept; head -c 62M /dev/zero > ~/kept; wc -c < ~/kept
        head -c 62M /dev/zero > /tmp/more 2> /dev/null || echo full";
    let with = |disk: &[&str]| {
        run(["--memory", "128M", "--timeout", "200s", "--json"])
            .args(disk)
            .args(["--", "sh", "-c", program])
            .env("SANDVMM_HOME", home.path())
            .done()
    };
    let memory = with(&[]).json();
    assert_ne!(memory["exit_code"], 0, "{memory}");
    for _ in 0..2 {
        let disk = with(&["--disk", "72M"]).expect(0).json();
        assert_eq!(disk["stdout"], "65011712\nfull\n", "{disk}");
        assert_eq!(disk["limits_hit"], serde_json::json!(["disk"]), "{disk}");
    }

    let left: Vec<_> = std::fs::read_dir(home.path().join("workspaces"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, [".empty-72"]);
    let none = run(["--disk", "1M", "--", "true"])
        .env("SANDVMM_HOME", home.path())
        .done();
    assert_ne!(none.code, 0, "{none:?}");
    run(["--disk", "1G", "--workspace", "a", "--", "true"])
        .done()
        .expect(2);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn names_and_sizes_that_are_none_are_usage_errors() {
    let home = data_folder();
    for line in [
        &["--workspace", "../x"][..],
        &["--workspace", ""],
        &["--workspace", "a", "--workspace-size", "1M"],
    ] {
        run(line)
            .args(["--", "true"])
            .env("SANDVMM_HOME", home.path())
            .done()
            .expect(2);
    }
    assert!(!home.path().join("workspaces").exists());
}
