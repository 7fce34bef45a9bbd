//! A machine that falls over says so: 125, one sentence, never 0, never a hang.

use sandvmm_tests::run;

/// A freestanding kernel: an ELF of one segment at 1 MiB whose code is `code`.
fn kernel(code: &[u8]) -> (tempfile::TempDir, std::path::PathBuf) {
    const ENTRY: u64 = 0x10_0000;
    const CODE_OFFSET: u64 = 0x1000;
    let mut image = vec![0; CODE_OFFSET as usize];
    image[..16].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    let header: [(usize, &[u8]); 8] = [
        (16, &2u16.to_le_bytes()),
        (18, &62u16.to_le_bytes()),
        (20, &1u32.to_le_bytes()),
        (24, &ENTRY.to_le_bytes()),
        (32, &64u64.to_le_bytes()),
        (52, &64u16.to_le_bytes()),
        (54, &56u16.to_le_bytes()),
        (56, &1u16.to_le_bytes()),
    ];
    let length = code.len() as u64;
    let segment: [(usize, &[u8]); 8] = [
        (64, &1u32.to_le_bytes()),
        (68, &7u32.to_le_bytes()),
        (72, &CODE_OFFSET.to_le_bytes()),
        (80, &ENTRY.to_le_bytes()),
        (88, &ENTRY.to_le_bytes()),
        (96, &length.to_le_bytes()),
        (104, &length.to_le_bytes()),
        (112, &0x1000u64.to_le_bytes()),
    ];
    for (offset, bytes) in header.iter().chain(&segment) {
        image[*offset..*offset + bytes.len()].copy_from_slice(bytes);
    }
    image.extend_from_slice(code);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernel");
    std::fs::write(&path, image).unwrap();
    (folder, path)
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_guest_that_restarts_itself_is_a_crash() {
    let program = "import ctypes
ctypes.CDLL(None).reboot(0x1234567)";
    let ran = run(["-u", "root", "-c", program]).done().expect(125);
    assert_eq!(ran.stderr.lines().count(), 1, "{ran:?}");
    let json = run(["--json", "-u", "root", "-c", program])
        .done()
        .expect(125)
        .json();
    assert_eq!(json["reason"], "vm_crash", "{json}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_kernel_panic_is_a_crash_with_the_kernels_own_words() {
    // An initramfs whose /init ends at once: "Attempted to kill init!".
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("initramfs.cpio");
    let build = "set -e
mkdir \"$1/tree\" \"$1/tree/bin\"
cp \"$(command -v busybox)\" \"$1/tree/bin/busybox\"
printf '#!/bin/busybox false\n' > \"$1/tree/init\"
chmod 755 \"$1/tree/init\"
cd \"$1/tree\" && find . | cpio --quiet -o -H newc > ../initramfs.cpio";
    let made = std::process::Command::new("sh")
        .args(["-c", build, "sh"])
        .arg(folder.path())
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");

    let ran = run(["--initrd".as_ref(), archive.as_os_str()])
        .args(["--", "true"])
        .done()
        .expect(125);

    assert!(
        ran.stderr.contains("panic") && ran.stderr.contains("init"),
        "{ran:?}"
    );
    let json = run(["--json", "--initrd"])
        .arg(&archive)
        .args(["--", "true"])
        .done()
        .expect(125)
        .json();
    assert_eq!(json["reason"], "vm_crash", "{json}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_triple_fault_is_a_crash() {
    let (_folder, path) = kernel(&[0x0f, 0x0b]);
    let ran = run(["--kernel"])
        .arg(&path)
        .args(["--", "true"])
        .done()
        .expect(125);
    assert!(ran.stderr.to_lowercase().contains("triple"), "{ran:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_kernel_that_does_nothing_is_ended_by_the_time_out() {
    for code in [&[0xeb, 0xfe][..], &[0xfa, 0xf4, 0xeb, 0xfd]] {
        let (_folder, path) = kernel(code);
        let ran = run(["--timeout", "3s", "--kernel"])
            .arg(&path)
            .args(["--", "true"])
            .done()
            .expect(124);
        assert!(ran.wall.as_secs() < 20, "{ran:?}");
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn an_agent_that_root_kills_off_is_a_crash() {
    // Root in the guest may do as it likes to its own guest, also overwrite the agent's code; the host must notice.
    let program = "import re
print('before', flush=True)
with open('/proc/1/maps') as maps, open('/proc/1/mem', 'r+b', buffering=0) as memory:
    for line in maps:
        start, end = (int(number, 16) for number in re.match('([0-9a-f]+)-([0-9a-f]+)', line).groups())
        if ' r-xp ' in line and '[' not in line:
            memory.seek(start)
            memory.write(bytes(end - start))
";
    let ran = run(["--json", "-u", "root", "-c", program])
        .done()
        .expect(125);

    let json = ran.json();
    assert_eq!(json["reason"], "vm_crash", "{json}");
    assert_eq!(json["stdout"], "before\n", "{json}");
    let message = json["message"].as_str().unwrap();
    assert!(message.contains("init"), "{message}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn an_agent_that_root_holds_still_is_ended_by_the_time_out() {
    // PTRACE_SEIZE and PTRACE_INTERRUPT: init can't be stopped by a signal.
    let program = "import ctypes, time
print('before', flush=True)
time.sleep(1)
libc = ctypes.CDLL(None, use_errno=True)
for request in (0x4206, 0x4207):
    if libc.ptrace(request, 1, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), 'ptrace')
time.sleep(1000)";
    let ran = run(["--timeout", "20s", "-u", "root", "-c", program])
        .done()
        .expect(124);

    assert_eq!(ran.text(), "before\n");
    assert!(ran.wall.as_secs() < 60, "{ran:?}");
}
