//! Files and numbers that can't be right are refused before anything starts, by name and without blocking.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use sandvmm_tests::{Ran, run};

fn images() -> std::path::PathBuf {
    std::path::PathBuf::from(std::env::var_os("SANDVMM_HOME").expect("xtask names the data folder"))
}

fn with(option: &str, path: &Path) -> Ran {
    let ran = run([
        option.into(),
        OsString::from(path),
        "--".into(),
        "true".into(),
    ])
    .done();
    assert!(ran.code == 125 || ran.code == 2, "{ran:?}");
    assert!(ran.stdout.is_empty(), "{ran:?}");
    assert!(ran.wall < Duration::from_secs(20), "{ran:?}");
    let name = path.file_name().unwrap().to_string_lossy();
    assert!(
        ran.stderr.contains(&*name),
        "the message names {name}: {ran:?}"
    );
    ran
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn things_that_are_no_files_are_refused_and_opening_never_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    let socket = folder.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    let empty = folder.path().join("empty");
    File::create(&empty).unwrap();
    let link = folder.path().join("dangling");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();

    for option in ["--kernel", "--rootfs", "--initrd"] {
        for path in [
            &fifo,
            &socket,
            &empty,
            &link,
            folder.path(),
            &folder.path().join("missing"),
            Path::new("/dev/null"),
        ]
        .map(AsRef::<Path>::as_ref)
        {
            with(option, path);
        }
    }
    for path in [&fifo, &socket, &folder.path().join("missing.py")] {
        assert_eq!(run([path]).done().code, 2);
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn kernels_that_are_cut_or_not_kernels_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let good = fs::read(images().join("vmlinux")).unwrap();
    let mut other_machine = good.clone();
    other_machine[18] = 0xb7;
    let mut thirty_two_bits = good.clone();
    thirty_two_bits[4] = 1;
    let mut far_headers = good.clone();
    far_headers[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut many_headers = good.clone();
    many_headers[56..58].copy_from_slice(&u16::MAX.to_le_bytes());
    let mut no_entry = good.clone();
    no_entry[24..32].copy_from_slice(&0u64.to_le_bytes());
    let cases: [(&str, &[u8]); 10] = [
        ("three-bytes", b"\x7fEL"),
        ("cut-in-header", &good[..80]),
        ("cut-in-segment", &good[..good.len() / 2]),
        ("text", b"#!/bin/sh\necho this is no kernel\n"),
        ("zeros", &[0; 8192]),
        ("other-machine", &other_machine),
        ("thirty-two-bits", &thirty_two_bits),
        ("far-headers", &far_headers),
        ("many-headers", &many_headers),
        ("no-entry", &no_entry),
    ];
    for (name, bytes) in cases {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        let ran = run(["--kernel"]).arg(&path).args(["--", "true"]).done();
        assert_eq!(ran.code, 125, "{name}: {ran:?}");
        assert!(
            ran.stderr.to_lowercase().contains("kernel"),
            "{name}: {ran:?}"
        );
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_disk_of_odd_length_is_refused_and_one_without_a_file_system_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let odd = folder.path().join("odd");
    fs::write(&odd, vec![0; 1000]).unwrap();
    with("--rootfs", &odd);

    let zeros = folder.path().join("zeros");
    File::create(&zeros).unwrap().set_len(1 << 20).unwrap();
    let ran = run(["--rootfs"])
        .arg(&zeros)
        .args(["--", "true"])
        .done()
        .expect(125);
    assert!(
        ran.stderr.contains("erofs") && ran.stderr.contains(zeros.to_str().unwrap()),
        "the sentence says what is understood, and which file it is about: {ran:?}"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_disk_that_is_cut_short_is_an_error_in_the_guest_and_no_hang() {
    let folder = tempfile::tempdir().unwrap();
    let cut = folder.path().join("cut");
    let good = fs::read(images().join("rootfs.erofs")).unwrap();
    fs::write(&cut, &good[..(good.len() / 8) & !511]).unwrap();
    let ran = run(["--rootfs"])
        .arg(&cut)
        .args(["--", "python3", "-c", "print(1)"])
        .done();
    assert_ne!(ran.code, 0, "{ran:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn an_initramfs_larger_than_memory_or_of_no_archive_is_refused_or_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let large = folder.path().join("large");
    File::create(&large).unwrap().set_len(300 << 20).unwrap();
    let ran = run(["--initrd"])
        .arg(&large)
        .args(["--", "true"])
        .done()
        .expect(125);
    assert!(ran.stderr.contains("initramfs file"), "{ran:?}");

    let garbage = folder.path().join("garbage");
    fs::write(&garbage, vec![0x5a; 65536]).unwrap();
    let ran = run(["--initrd"])
        .arg(&garbage)
        .args(["--", "true"])
        .done()
        .expect(125);
    assert!(ran.stderr.contains(garbage.to_str().unwrap()), "{ran:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn impossible_numbers_are_usage_errors() {
    for bad in [
        ["--cpus", "0"],
        ["--cpus", "-1"],
        ["--cpus", "1000"],
        ["--cpus", "two"],
        ["--memory", "0"],
        ["--memory", "1K"],
        ["--memory", "99999999999999999999G"],
        ["--memory", "lots"],
        ["--timeout", "-3s"],
        ["--timeout", "soon"],
        ["-e", "=x"],
        ["--no-such-option", "x"],
    ] {
        let ran = run(bad).args(["--", "true"]).done();
        assert_eq!(ran.code, 2, "{bad:?}: {ran:?}");
        assert!(!ran.stderr.is_empty());
    }
    assert_eq!(run([] as [&str; 0]).done().code, 2);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn missing_images_name_the_command_that_builds_them() {
    let empty = tempfile::tempdir().unwrap();
    let ran = run(["--", "true"])
        .env("SANDVMM_HOME", empty.path())
        .done()
        .expect(125);
    assert!(ran.stderr.contains("cargo xtask setup"), "{ran:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn memory_around_the_mmio_hole_works() {
    for memory in ["3071M", "3072M", "3073M", "3584M"] {
        run(["--memory", memory, "--", "true"]).done().expect(0);
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_compressed_kernel_boots_as_the_plain_one_does() {
    let kernel = std::env::var_os("SANDVMM_TEST_BZIMAGE").expect("xtask names the bzImage");
    let plain = run(["--", "uname", "-rv"]).done().expect(0);

    for options in [["--cpus", "1"], ["--cpus", "2"], ["--memory", "4G"]] {
        let ran = run(["--kernel"])
            .arg(&kernel)
            .args(options)
            .args(["--", "uname", "-rv"])
            .done()
            .expect(0);
        assert_eq!(ran.text(), plain.text(), "{options:?}");
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn ext4_and_squashfs_images_are_found_out_by_the_guest() {
    let folder = tempfile::tempdir().unwrap();
    let tree = folder.path().join("tree");
    for place in ["bin", "proc", "sys", "dev", "run", "tmp", "etc", "home"] {
        fs::create_dir_all(tree.join(place)).unwrap();
    }
    let busybox = ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .find(|path| Path::new(path).exists())
        .unwrap();
    fs::copy(busybox, tree.join("bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", tree.join("bin/sh")).unwrap();
    let build = "set -e
mkfs.ext4 -q -d \"$1/tree\" \"$1/ext4\" 16M
mksquashfs \"$1/tree\" \"$1/squashfs\" -quiet -no-progress > /dev/null
mkfs.erofs \"$1/erofs\" \"$1/tree\" > /dev/null";
    let built = std::process::Command::new("sh")
        .args(["-c", build, "sh"])
        .arg(folder.path())
        .output()
        .unwrap();
    assert!(built.status.success(), "{built:?}");

    for kind in ["ext4", "squashfs", "erofs"] {
        let ran = run(["-u", "0", "--rootfs"])
            .arg(folder.path().join(kind))
            .args([
                "--",
                "sh",
                "-c",
                "echo $0 > /made && /bin/busybox cat /made",
            ])
            .done()
            .expect(0);
        assert_eq!(ran.text(), "sh\n", "{kind}");
    }
}
